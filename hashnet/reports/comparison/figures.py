"""The paper's figures with every method in one plot, and HashNet's training beside DHN's.

Precision within Hamming radius 2 over code lengths; precision-recall and precision of the top N at the
longest code; J and L through training, the histogram of |g| and t-SNE of the codes. The plots themselves are
those of ``hashnet.reports.figures``.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hashnet.comparison import DEEP, TITLES
from hashnet.metrics import EvalReport, RadiusCurve, RankCurve
from hashnet.reports import figures
from hashnet.reports.comparison.tables import Entries, Entry, Table, main_entries
from hashnet.reports.style import figure_of, new_axes, new_row, to_png
from hashnet.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE_BY_SIDE = ("hashnet", "dhn")  # whose training is shown; others where both are missing
SIZE = (6.4, 4.2)


@dataclass(frozen=True)
class ComparisonFigure:
    name: str  # of its file
    caption: str
    png: bytes
    wide: bool = False  # two plots side by side

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode()


def draw(tables: list[Table]) -> list[ComparisonFigure]:
    """Every figure there are cells for."""
    entries = main_entries(tables)
    if not entries:
        return []
    longest = max(n_bits for _, n_bits in entries)
    return curves(entries, longest) + training_figures(entries, longest)


def curves(entries: Entries, n_bits: int) -> list[ComparisonFigure]:
    """Every method in one plot: over code lengths, and at ``n_bits``, the longest of them."""
    lengths = {TITLES[m]: [mean_report(e) for (name, _), e in entries.items() if name == m] for m in TITLES}
    longest = {TITLES[m]: mean_report(entries[m, n_bits]) for m in TITLES if (m, n_bits) in entries}
    over_bits = [
        drawn(
            "precision_h2",
            "Precision within Hamming radius 2 over code lengths (an empty ball counts 0)",
            figures.precision_over_bits({m: r for m, r in lengths.items() if r}, new_axes(size=SIZE)),
        )
    ]
    return [
        *(over_bits if len({bits for _, bits in entries}) > 1 else []),
        drawn(
            "precision_recall",
            f"Precision and recall by rank at {n_bits} bits",
            figures.precision_recall(longest, new_axes(size=SIZE)),
        ),
        drawn(
            "precision_recall_radius",
            f"Precision over the full range of recall at {n_bits} bits, by Hamming radius 0 … {n_bits}",
            figures.precision_recall(longest, new_axes(size=SIZE), by="radius"),
        ),
        drawn(
            "precision_top_n",
            f"Precision of the top N at {n_bits} bits",
            figures.precision_at(longest, new_axes(size=SIZE)),
        ),
    ]


def training_figures(entries: Entries, n_bits: int) -> list[ComparisonFigure]:
    """Two networks side by side: their losses, their histogram of |g|, t-SNE of their codes."""
    deep = [m for m in DEEP if (m, n_bits) in entries]
    shown = [entries[m, n_bits] for m in ([m for m in SIDE_BY_SIDE if m in deep] or deep[:2])]
    if not shown:
        return []
    return [
        _side_by_side("losses", f"J (relaxed codes) and L (binary codes) through training at {n_bits} bits, "
                      "by HashNet's loss", shown, _losses, one_scale=True),
        _side_by_side("histogram", f"|g| before binarisation at {n_bits} bits", shown, _histogram),
        _side_by_side("tsne", f"t-SNE of database codes of ten classes at {n_bits} bits", shown, _tsne),
    ]  # fmt: skip


def mean_report(entry: Entry) -> EvalReport:
    """The first seed's report with curves that are means over all seeds."""

    def mean(curve: str, name: str) -> tuple[float, ...]:
        values = [getattr(getattr(report, curve), name) for report in entry.reports]
        return tuple(np.mean(values, axis=0).tolist())

    first = entry.reports[0]
    rank = RankCurve(first.by_rank.ranks, mean("by_rank", "precision"), mean("by_rank", "recall"))
    radius = RadiusCurve(*(mean("by_radius", name) for name in ("precision", "recall", "empty")))
    return dataclasses.replace(first, by_rank=rank, by_radius=radius)


def drawn(name: str, caption: str, ax: Axes) -> ComparisonFigure:
    """The axes' figure as a PNG."""
    return ComparisonFigure(name, caption, to_png(figure_of(ax), dpi=110))


def _side_by_side(
    name: str,
    caption: str,
    entries: list[Entry],
    draw_one: Callable[[Entry, Axes], object],
    one_scale: bool = False,
) -> ComparisonFigure:
    figure, axes = new_row(len(entries))
    for ax, entry in zip(axes, entries, strict=True):
        draw_one(entry, ax)
        ax.set_title(TITLES[entry.method], pad=16)
    if one_scale:
        top = max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(top=top)
    return ComparisonFigure(name, caption, to_png(figure, dpi=110), wide=len(entries) > 1)


def _losses(entry: Entry, ax: Axes) -> None:
    from hashnet.training import read_history

    figures.losses(read_history(Run(entry.cells[0].folder).model.uri), ax, common=True)


def _histogram(entry: Entry, ax: Axes) -> None:
    training = entry.cells[0].training
    assert training is not None
    assert training.measured is not None
    figures.relaxed_histogram({entry.method: training.measured["histogram"]}, ax)


def _tsne(entry: Entry, ax: Axes) -> None:
    arrays = entry.cells[0].codes()
    codes, classes = arrays["database"], arrays["classes"]
    if classes.max(initial=-1) < 0:  # no row has exactly one label
        return
    rows, of_row = figures.tsne_rows(classes[:, None] == np.arange(classes.max() + 1))
    if len(rows) > 3:  # t-SNE needs a few points
        figures.embedding(figures.tsne(codes[rows]), [f"class {c}" for c in of_row], ax)
