"""The paper's figures with every method in one plot, and HashNet beside DHN from the inside.

``draw`` returns name → (caption, PNG bytes): precision within Hamming radius 2 over code lengths,
precision-recall and precision of the top N at the longest code, J and L through training, the histogram
of |g|, t-SNE of the codes.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet import storage
from hashnet.codes import unpack_codes
from hashnet.comparison.cells import CODES
from hashnet.comparison.methods import DEEP, TITLES
from hashnet.comparison.results import Entry, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSIDE = ("hashnet", "dhn")  # whose training is shown side by side, and HashNet+C where HashNet is missing
TSNE_CLASSES, TSNE_ROWS = 10, 1000
COLOURS = {  # HashNet in reds, the other deep methods in blues, the rest apart from both
    "hashnet+c": "#d62728", "hashnet": "#8c1515", "hashnet-w": "#ff7f0e", "hashnet-sgn": "#e377c2",
    "dhn": "#1f4e9c", "dnnh": "#17a2b8", "cnnh": "#6f9fd8",
    "sdh": "#2ca02c", "ksh": "#7a5c00", "itq-cca": "#9467bd", "itq": "#4b2e83", "bre": "#556b2f",
    "sh": "#7f7f7f", "lsh": "#222222",
}  # fmt: skip


def draw(tables: list[Table]) -> dict[str, tuple[str, bytes]]:
    """Every figure there are cells for."""
    main = [table for table in tables if table.number in (1, 3)]
    if not main:
        return {}
    entries: dict[tuple[str, int], Entry] = {}
    for table in main:
        entries |= table.entries
    longest = max(n_bits for _, n_bits in entries)
    at_longest = {m: entries[m, longest] for m in TITLES if (m, longest) in entries}
    found = {
        "precision_h2": ("Precision within Hamming radius 2 over code lengths", _over_bits(entries)),
        "precision_recall": (
            f"Precision-recall by rank at {longest} bits",
            _curves(at_longest, _precision_recall, "recall", "precision"),
        ),
        "precision_top_n": (
            f"Precision of the top N at {longest} bits",
            _curves(at_longest, _precision_at_n, "N", "precision"),
        ),
    }
    inside = {m: e for m in DEEP if m in at_longest and (e := at_longest[m]) and _history(e) is not None}
    shown = [m for m in INSIDE if m in inside] or list(inside)[:2]
    if shown:
        pair = {m: inside[m] for m in shown}
        found |= {
            "losses": (
                f"J (relaxed codes) and L (binary codes) through training at {longest} bits",
                _side_by_side(pair, _draw_losses),
            ),
            "histogram": (
                f"|g| before binarisation at {longest} bits, 100 bins, square root of the frequency",
                _side_by_side(pair, _draw_histogram),
            ),
            "tsne": (
                f"t-SNE of database codes of at most {TSNE_CLASSES} classes at {longest} bits",
                _side_by_side(pair, _draw_tsne),
            ),
        }
    return {name: (caption, _png(figure)) for name, (caption, figure) in found.items()}


def _new(columns: int = 1) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(6.5 * columns + 1.5 * (columns == 1), 4.8), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns)))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def style(method: str) -> dict[str, Any]:
    """Colour and line of a method, the same in every figure: HashNet's variants solid, others dashed."""
    line = "-" if method.startswith("hashnet") else "--" if method in DEEP else ":"
    return {"color": COLOURS[method], "linestyle": line, "label": TITLES[method], "linewidth": 1.7}


def _over_bits(entries: dict[tuple[str, int], Entry]) -> Figure:
    figure, (ax,) = _new()
    bits = sorted({n_bits for _, n_bits in entries})
    for method in TITLES:
        known = [n for n in bits if (method, n) in entries]
        if known:
            values = [entries[method, n].precision_within(2) for n in known]
            ax.plot(known, values, marker="o", markersize=4, **style(method))
    ax.set(xlabel="bits", ylabel="precision within radius 2", xticks=bits)
    _finish(ax)
    return figure


def _curves(entries: dict[str, Entry], values: Any, x_name: str, y_name: str) -> Figure:
    figure, (ax,) = _new()
    for method, entry in entries.items():
        x, y = values(entry)
        ax.plot(x, y, **style(method))
    ax.set(xlabel=x_name, ylabel=y_name)
    _finish(ax)
    return figure


def _finish(ax: Axes) -> None:
    ax.grid(alpha=0.3)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)


def _precision_recall(entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision at each rank, means over seeds."""
    curves = [report.by_rank for report in entry.reports]
    return np.mean([c.recall for c in curves], axis=0), np.mean([c.precision for c in curves], axis=0)


def _precision_at_n(entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """Ranks and precision there, mean over seeds."""
    curves = [report.by_rank for report in entry.reports]
    return np.asarray(curves[0].ranks), np.mean([c.precision for c in curves], axis=0)


def _side_by_side(pair: dict[str, Entry], draw_one: Any) -> Figure:
    figure, axes = _new(len(pair))
    for ax, (method, entry) in zip(axes, pair.items(), strict=True):
        draw_one(ax, entry)
        ax.set_title(TITLES[method])
    return figure


def _history(entry: Entry) -> Any:
    """The training history of the first seed, None for a shallow method."""
    from hashnet.training import read_history

    if entry.method not in DEEP:
        return None
    return read_history(storage.join(entry.records[0]["folder"], "model"))


def _draw_losses(ax: Axes, entry: Entry) -> None:
    history = _history(entry)
    steps = history.since(0)
    for name, label in (("J", "J (relaxed)"), ("L", "L (binary)")):
        ax.plot(steps["step"], smoothed(steps[name]), label=label, linewidth=1.2)
    for stage in history.stages[1:]:
        ax.axvline(stage["first_step"], color="grey", alpha=0.3, linewidth=0.8)
    ax.set(xlabel="step (grey: a new stage)", ylabel="loss")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)


def smoothed(values: np.ndarray, over: int = 21) -> np.ndarray:
    """Running mean over an odd number of steps, shorter at the ends; gaps stay gaps."""
    known = np.isfinite(values).astype(float)
    window = np.ones(min(over, max(1, len(values) // 2 * 2 - 1)))
    total = np.convolve(np.nan_to_num(values), window, "same")
    count = np.convolve(known, window, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _draw_histogram(ax: Axes, entry: Entry) -> None:
    counts = np.array(entry.records[0]["training"]["measured"]["histogram"], dtype=float)
    ax.bar(np.arange(100) / 100 + 0.005, np.sqrt(counts / counts.sum()), width=0.01)
    ax.set(xlabel="|g|", ylabel="sqrt(frequency)", xlim=(0, 1))


def _draw_tsne(ax: Axes, entry: Entry) -> None:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    where = storage.join(entry.records[0]["folder"], CODES)
    with np.load(io.BytesIO(storage.read_bytes(where)), allow_pickle=False) as arrays:
        codes, classes = arrays["database"], arrays["classes"]
    counts = np.bincount(classes[classes >= 0], minlength=1)
    largest = np.argsort(-counts, kind="stable")[:TSNE_CLASSES]
    rows = np.flatnonzero(np.isin(classes, largest))
    rows = np.random.default_rng(0).permutation(rows)[:TSNE_ROWS]
    signs = unpack_codes(codes[rows]).astype(np.float32)
    tsne = TSNE(perplexity=min(30, max(2, len(rows) // 4)), random_state=0, init="pca")
    with threadpool_limits(1):  # on a busy machine its threads wait for one another: ten times slower
        flat = tsne.fit_transform(signs)
    ax.scatter(flat[:, 0], flat[:, 1], c=np.searchsorted(np.sort(largest), classes[rows]), cmap="tab10", s=6)
    ax.set(xticks=[], yticks=[])
