"""The paper's figures with every method in one plot, and HashNet beside DHN from the inside.

``draw`` returns name → (caption, PNG bytes): precision within Hamming radius 2 over code lengths,
precision-recall and precision of the top N at the longest code, J and L through training, the histogram
of |g|, t-SNE of the codes. The plots themselves are those of ``hashnet.reports``.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hashnet.io import storage
from hashnet.metrics import EvalReport, RadiusCurve, RankCurve
from hashnet.reports import figures
from hashnet.reports.comparison.cells import CODES
from hashnet.reports.comparison.methods import DEEP, TITLES
from hashnet.reports.comparison.results import Entry, Table, main_entries
from hashnet.reports.embedding import pick_rows, project
from hashnet.reports.style import new_axes, new_row, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSIDE = ("hashnet", "dhn")  # whose training is shown side by side; others where these are missing
SIZE = (7.2, 4.4)


def draw(tables: list[Table]) -> dict[str, tuple[str, bytes]]:
    """Every figure there are cells for."""
    entries = main_entries(tables)
    if not entries:
        return {}
    bits = sorted({n_bits for _, n_bits in entries})
    lengths = {TITLES[m]: [mean_report(entries[m, n]) for n in bits if (m, n) in entries] for m in TITLES}
    longest = {TITLES[m]: mean_report(entries[m, bits[-1]]) for m in TITLES if (m, bits[-1]) in entries}
    at = f"at {bits[-1]} bits"
    found: dict[str, tuple[str, Figure]] = {
        "precision_h2": (
            "Precision within Hamming radius 2 over code lengths (an empty ball counts 0)",
            _figure(
                figures.precision_over_bits({m: r for m, r in lengths.items() if r}, new_axes(size=SIZE))
            ),
        ),
        "precision_recall": (
            f"Precision and recall by rank {at}",
            _figure(figures.precision_recall(longest, new_axes(size=SIZE))),
        ),
        "precision_top_n": (
            f"Precision of the top N {at}",
            _figure(figures.precision_at(longest, new_axes(size=SIZE))),
        ),
    }
    deep = [m for m in DEEP if (m, bits[-1]) in entries]
    shown = [m for m in INSIDE if m in deep] or deep[:2]
    if shown:
        pair = {m: entries[m, bits[-1]] for m in shown}
        found |= {
            "losses": (f"J (relaxed codes) and L (binary codes) through training {at}", _row(pair, _losses)),
            "histogram": (f"|g| before binarisation {at}", _row(pair, _histogram)),
            "tsne": (f"t-SNE of database codes of ten classes {at}", _row(pair, _tsne)),
        }
    return {name: (caption, to_png(figure, dpi=110)) for name, (caption, figure) in found.items()}


def mean_report(entry: Entry) -> EvalReport:
    """The first seed's report with curves that are means over all seeds."""

    def mean(curve: str, name: str) -> tuple[float, ...]:
        values = [getattr(getattr(report, curve), name) for report in entry.reports]
        return tuple(np.mean(values, axis=0).tolist())

    first = entry.reports[0]
    rank = RankCurve(first.by_rank.ranks, mean("by_rank", "precision"), mean("by_rank", "recall"))
    radius = RadiusCurve(*(mean("by_radius", name) for name in ("precision", "recall", "empty")))
    return dataclasses.replace(first, by_rank=rank, by_radius=radius)


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def _row(pair: dict[str, Entry], draw_one: Callable[[Entry, Axes], object]) -> Figure:
    figure, axes = new_row(len(pair))
    for ax, (method, entry) in zip(axes, pair.items(), strict=True):
        draw_one(entry, ax)
        ax.set_title(TITLES[method], pad=16)
    return figure


def _losses(entry: Entry, ax: Axes) -> None:
    from hashnet.training import read_history

    figures.losses(read_history(storage.join(entry.records[0]["folder"], "model")), ax)


def _histogram(entry: Entry, ax: Axes) -> None:
    figures.relaxed_histogram({entry.method: entry.records[0]["training"]["measured"]["histogram"]}, ax)


def _tsne(entry: Entry, ax: Axes) -> None:
    where = storage.join(entry.records[0]["folder"], CODES)
    with np.load(io.BytesIO(storage.read_bytes(where)), allow_pickle=False) as arrays:
        codes, classes = arrays["database"], arrays["classes"]
    if classes.max(initial=-1) < 0:  # no row has exactly one label
        return
    rows, of_row = pick_rows(classes[:, None] == np.arange(classes.max() + 1))
    if len(rows) > 3:  # else there is nothing to lay out
        figures.embedding(project(codes[rows]), [f"class {c}" for c in of_row], ax)
