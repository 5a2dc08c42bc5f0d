"""The paper's figures as functions of reports; each returns matplotlib axes.

Functions that take ``reports`` draw one line per name → EvalReport, for a single run as for a comparison of
many methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.codes import dead_bits, unpack_codes
from hashnet.errors import ConfigError
from hashnet.reports.style import BAD, INK, PALETTE, QUIET, legend, line_style, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hashnet.metrics import EvalReport

Reports = Mapping[str, "EvalReport"]
TSNE_CLASSES, TSNE_ROWS = 10, 1000


def precision_recall(reports: Reports, ax: Axes | None = None, by: str = "rank") -> Axes:
    """Precision over recall, ``by`` rank (1 … k) or by Hamming radius (0 … n_bits): two different curves.

    By radius an empty ball counts precision 0, and only radii within which some query finds anything
    are drawn.
    """
    if by not in ("rank", "radius"):
        raise ConfigError(f"by must be rank or radius, got {by!r}")
    ax = new_axes(ax)
    for place, (name, report) in enumerate(reports.items()):
        curve = report.by_rank if by == "rank" else report.by_radius
        recall, precision = np.asarray(curve.recall), np.asarray(curve.precision)
        if by == "radius":
            drawn = np.asarray(report.by_radius.empty) < 1
            recall, precision = recall[drawn], precision[drawn]
        marker: dict[str, Any] = {"marker": "o", "markersize": 3.5} if by == "radius" else {}
        ax.plot(recall, precision, label=name, **line_style(place), **marker)
    last = max((report.k for report in reports.values()), default=0)
    where = f"rank 1 … {last:,}" if by == "rank" else "Hamming radius 0 … n_bits"
    ax.set(xlabel=f"recall ({where})", ylabel="precision")
    return _finish(ax, reports)


def precision_at(reports: Reports, ax: Axes | None = None) -> Axes:
    """Precision of the N nearest items over N."""
    return _over_ranks(reports, ax, "precision")


def recall_at(reports: Reports, ax: Axes | None = None) -> Axes:
    """Recall of the N nearest items over N."""
    return _over_ranks(reports, ax, "recall")


def _over_ranks(reports: Reports, ax: Axes | None, what: str) -> Axes:
    ax = new_axes(ax)
    for place, (name, report) in enumerate(reports.items()):
        ax.plot(report.by_rank.ranks, getattr(report.by_rank, what), label=name, **line_style(place))
    ax.set(xlabel="N, items retrieved", ylabel=f"{what} of the top N")
    ax.set_xlim(left=0)
    return _finish(ax, reports)


def precision_over_bits(reports: Mapping[str, Sequence[EvalReport]], ax: Axes | None = None) -> Axes:
    """P@H<=2 over code lengths: one line per name → reports of several lengths."""
    ax = new_axes(ax)
    lengths: set[int] = set()
    for place, (name, of_name) in enumerate(reports.items()):
        ordered = sorted(of_name, key=lambda report: report.n_bits)
        bits = [report.n_bits for report in ordered]
        lengths.update(bits)
        values = [report.precision_within(2) for report in ordered]
        ax.plot(bits, values, label=name, marker="o", markersize=5, **line_style(place))
    ax.set_xticks(sorted(lengths))
    ax.set(xlabel="code length in bits", ylabel="precision within Hamming radius 2")
    return _finish(ax, reports)


def radius(report: EvalReport, ax: Axes | None = None) -> Axes:
    """Precision, recall and the share of empty balls over the Hamming radius."""
    ax = new_axes(ax)
    radii = np.arange(report.n_bits + 1)
    ax.plot(radii, report.by_radius.precision, label="precision (empty ball = 0)", **line_style(0))
    ax.plot(radii, report.by_radius.recall, label="recall", **line_style(1))
    ax.plot(radii, report.by_radius.empty, label="queries with an empty ball", color=QUIET, linestyle=":")
    ax.axvline(2, color=QUIET, linewidth=0.8)
    ax.set(xlabel="Hamming radius", ylabel="mean over queries", ylim=(-0.02, 1.02))
    legend(ax)
    return ax


def distances(report: EvalReport, ax: Axes | None = None) -> Axes:
    """How far apart similar and dissimilar (query, item) pairs are, each as a share of its kind."""
    ax = new_axes(ax)
    bins = np.arange(report.n_bits + 1)
    for counts, label, colour in (
        (report.dissimilar, "dissimilar pairs", PALETTE[1]),
        (report.similar, "similar pairs", PALETTE[0]),
    ):
        share = np.asarray(counts, dtype=np.float64) / max(sum(counts), 1)
        edges = np.append(bins - 0.5, bins[-1] + 0.5)
        ax.stairs(share, edges, fill=True, color=colour, alpha=0.5, label=label)
        ax.stairs(share, edges, color=colour, linewidth=1.4)
    ax.set(xlabel="Hamming distance", ylabel="share of pairs", xlim=(-0.5, report.n_bits + 0.5))
    ax.set_ylim(bottom=0)
    ax.grid(axis="x", visible=False)
    legend(ax)
    return ax


def per_class(report: EvalReport, ax: Axes | None = None, most: int = 20) -> Axes:
    """MAP of each class; of more than ``most`` classes, the best and the worst."""
    scores = sorted(report.per_class, key=lambda score: score.map)
    if len(scores) > most:
        scores = scores[: most // 2] + scores[-(most // 2) :]
    ax = new_axes(ax, size=(5.2, max(2.2, 0.24 * len(scores) + 1)))
    names = [score.name or f"class {score.class_id}" for score in scores]
    ax.barh(range(len(scores)), [score.map for score in scores], color=PALETTE[0], height=0.72)
    shown = [name if len(name) <= 18 else name[:17] + "…" for name in names]
    ax.set_yticks(range(len(scores)), shown, parse_math=False)  # a name may contain $
    ax.axvline(report.map, color=INK, linewidth=1, linestyle="--")
    ax.set(xlabel=f"MAP@{report.k:,} of the class (dashed: all queries)", xlim=(0, 1))
    ax.grid(axis="y", visible=False)
    return ax


def relaxed_histogram(counts: Mapping[str, Sequence[int]], ax: Axes | None = None) -> Axes:
    """|g| = |tanh(beta z)| before binarisation in bins of [0, 1], the frequency on a square root scale."""
    ax = new_axes(ax)
    for place, (name, values) in enumerate(counts.items()):
        share = np.asarray(values, dtype=np.float64) / max(sum(values), 1)
        edges = np.linspace(0, 1, len(share) + 1)
        colour = PALETTE[place % len(PALETTE)]
        ax.stairs(share, edges, fill=True, color=colour, alpha=0.6 if len(counts) > 1 else 0.9, label=name)
    top = max((max(values) / max(sum(values), 1) for values in counts.values()), default=1)
    ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    ax.set(xlabel="|g| before binarisation, 100 bins", ylabel="share of values (square root scale)")
    ax.set(xlim=(0, 1), ylim=(0, min(1.0, top * 1.1)))
    ticks = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if top > 0.2 else (0, 0.001, 0.01, 0.05, 0.1, 0.2)
    shown = [tick for tick in ticks if tick <= top * 1.1]
    ax.set_yticks(shown, [f"{tick:g}" for tick in shown])
    if len(counts) > 1:
        legend(ax)
    return ax


def losses(history: Any, ax: Axes | None = None, *, common: bool = False) -> Axes:
    """J (relaxed codes) and L (binary codes) over steps, with the stages of beta marked.

    ``history`` has ``steps`` (columns by name) and ``stages``, as training keeps it. ``common`` shows both by
    HashNet's loss where the method has another and the history knows them.
    """
    ax = new_axes(ax)
    suffix = "_common" if common and any(v is not None for v in history.steps["J_common"]) else ""
    steps = np.asarray(history.steps["step"], dtype=np.float64)
    for place, (name, meaning) in enumerate((("L", "L, binary codes"), ("J", "J, relaxed codes"))):
        values = np.array(
            [np.nan if v is None else v for v in history.steps[name + suffix]], dtype=np.float64
        )
        known = np.isfinite(values)
        if known.any():
            style = line_style(1 - place)
            ax.plot(steps[known], values[known], alpha=0.25, linewidth=0.8, color=style["color"])
            ax.plot(steps[known], _smooth(values[known]), label=meaning, **style)
    _mark_stages(ax, history)
    ax.set(xlabel="training step", ylabel="HashNet's loss" if suffix else "loss, sum(w l) / sum(w)")
    ax.set_ylim(bottom=0)
    legend(ax)
    return ax


def _mark_stages(ax: Axes, history: Any) -> None:
    stage = np.asarray(history.steps["stage"])
    steps, beta = history.steps["step"], history.steps["beta"]
    starts = np.flatnonzero(np.diff(stage, prepend=stage[:1] - 1)) if len(stage) else np.zeros(0, int)
    if len(starts) < 2:
        return
    top, free = ax.get_xaxis_transform(), -1.0  # the previous text ends at ``free``
    wide = (steps[-1] - steps[0]) * 0.018  # the width of a character, roughly
    for count, place in enumerate(starts):
        if count:
            ax.axvline(steps[place], color=QUIET, linewidth=0.7, linestyle=":")
        text = f"β={beta[place]:g}" if count == 0 else f"{beta[place]:g}"
        if steps[place] >= free:
            ax.text(steps[place], 1.01, text, transform=top, fontsize=8, color=QUIET, ha="left", va="bottom")
            free = steps[place] + wide * (len(text) + 0.5)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over a fiftieth of the values: single batches are noisy."""
    width = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - width)
    return (sums[last] - sums[first]) / (last - first)


def bit_balance(shares: Sequence[float] | np.ndarray, ax: Axes | None = None) -> Axes:
    """The share of ones of each bit over the database: 0.5 carries most information, 0 and 1 none."""
    ax = new_axes(ax)
    values = np.asarray(shares)
    colours = np.where(dead_bits(values), BAD, PALETTE[0]).tolist()
    ax.bar(np.arange(len(values)), values, color=colours, width=0.8)
    ax.axhline(0.5, color=INK, linewidth=1, linestyle="--")
    ax.set(xlabel="bit", ylabel="share of ones", ylim=(0, 1), xlim=(-0.6, len(values) - 0.4))
    ax.grid(axis="x", visible=False)
    return ax


def embedding(points: np.ndarray, classes: Sequence[str], ax: Axes | None = None) -> Axes:
    """Codes in the plane, float (n, 2), coloured by class name (n,)."""
    ax = new_axes(ax, size=(5.2, 4.2))
    for place, name in enumerate(dict.fromkeys(classes)):
        some = np.asarray([other == name for other in classes])
        colour = PALETTE[place % len(PALETTE)]
        ax.scatter(points[some, 0], points[some, 1], s=9, color=colour, alpha=0.75, linewidths=0, label=name)
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    legend(ax, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, markerscale=1.8, handletextpad=0.1)
    return ax


def tsne_rows(labels: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows int64 (m,) to show and their class (m,): equally many of each of the ten most frequent classes.

    ``labels`` multi-hot (n, n_classes). Rows with several labels are left out: they have no single colour.
    """
    single = labels.sum(axis=1, dtype=np.int64) == 1
    classes = np.where(single, labels.argmax(axis=1), -1)
    sizes = np.bincount(classes[single], minlength=labels.shape[1])
    chosen = np.sort(np.argsort(-sizes, kind="stable")[: min(TSNE_CLASSES, int((sizes > 0).sum()))])
    rng = np.random.default_rng(seed)
    per_class = TSNE_ROWS // max(len(chosen), 1)
    rows = [rng.permutation(np.flatnonzero(classes == c))[:per_class] for c in chosen]
    picked = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return picked, classes[picked]


def tsne(codes: np.ndarray, seed: int = 0) -> np.ndarray:
    """float (n, 2): t-SNE of the signs, whose squared distance is four times the Hamming distance."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    signs = unpack_codes(codes).astype(np.float32)
    # equal codes would start at the same point and stay on it
    signs += np.random.default_rng(seed).normal(0, 1e-3, signs.shape).astype(np.float32)
    perplexity = min(30.0, (len(signs) - 1) / 3)
    with threadpool_limits(1):  # on a busy machine, OpenMP threads that wait for each other take minutes
        return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(signs)


def _finish(ax: Axes, reports: Mapping[str, Any]) -> Axes:
    ax.set_ylim(0, 1.02)
    if len(reports) > 6:
        legend(ax, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    elif len(reports) > 1:
        legend(ax)
    return ax
