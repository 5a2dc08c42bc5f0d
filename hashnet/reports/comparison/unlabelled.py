"""The report of a comparison without labels: neighbour recall of every method at the same number of bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.comparison import FROM_NEIGHBOURS, PQ, TITLES, CellResult
from hashnet.io import counted, storage
from hashnet.metrics import NeighbourReport
from hashnet.reports.comparison import tables
from hashnet.reports.comparison.figures import SIZE, ComparisonFigure, drawn
from hashnet.reports.comparison.report import (
    PAGE,
    ComparisonInfo,
    Contents,
    full_names,
    run_name,
    write_contents,
)
from hashnet.reports.comparison.tables import Grid, GridCell
from hashnet.reports.style import Card, legend, line_style, new_axes


@dataclass(frozen=True)
class NeighbourRow:
    """One method at one code length: means over seeds, and the widest interval of a seed."""

    method: str
    n_bits: int
    seeds: list[int]
    recall: float
    recall_low: float
    recall_high: float
    asymmetric: float | None
    correlation: float | None
    fit_s: float
    reports: list[NeighbourReport]

    def values(self) -> dict[str, Any]:
        """What tables.csv and tables.json hold."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "reports"}


def write_neighbour_comparison(uri: str, cells: list[CellResult], info: ComparisonInfo) -> dict[str, Any]:
    """Writes tables, figures and page into the folder ``uri``; returns the result that the job prints."""
    rows = gather_rows(cells)
    title = f"Comparison without labels: {run_name(info.run)}"
    shown = Contents(title, _subtitle(rows), _cards(rows), _grids(rows), _notes(rows), _figures(rows))
    values = [row.values() for row in rows]
    write_contents(
        uri, shown, info, {"tables.csv": tables.csv_text(list(values[0]), values)}, {"rows": values}
    )
    return {
        "run": info.run,
        "report": storage.join(uri, PAGE),
        "cells": len(cells),
        "recall": {
            method: {str(r.n_bits): r.recall for r in rows if r.method == method} for method in _methods(rows)
        },
        "first": {str(n): max(_of(rows, n), key=lambda row: row.recall).method for n in _bits(rows)},
    }


def gather_rows(cells: Iterable[CellResult]) -> list[NeighbourRow]:
    """One row per method and code length, in the order of TITLES."""
    found: dict[tuple[str, int], list[CellResult]] = {}
    for cell in cells:
        if cell.neighbours is not None:
            found.setdefault((cell.made_from.method, cell.made_from.n_bits), []).append(cell)
    rows = []
    for method in TITLES:
        for n_bits in sorted({n for name, n in found if name == method}):
            here = found[method, n_bits]
            reports = [cell.neighbours for cell in here if cell.neighbours is not None]
            rows.append(
                NeighbourRow(
                    method,
                    n_bits,
                    [cell.made_from.seed for cell in here],
                    round(float(np.mean([r.recall for r in reports])), 4),
                    round(min(r.recall_interval[0] for r in reports), 4),
                    round(max(r.recall_interval[1] for r in reports), 4),
                    _mean([r.asymmetric for r in reports]),
                    _mean([r.correlation for r in reports]),
                    round(max(cell.fit_s for cell in here), 3),
                    reports,
                )
            )
    return rows


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 4) if known else None


def _bits(rows: list[NeighbourRow]) -> list[int]:
    return sorted({row.n_bits for row in rows})


def _of(rows: list[NeighbourRow], n_bits: int) -> list[NeighbourRow]:
    return [row for row in rows if row.n_bits == n_bits]


def _methods(rows: list[NeighbourRow]) -> list[str]:
    return list(dict.fromkeys(row.method for row in rows))


def _title(row: NeighbourRow) -> str:
    return FROM_NEIGHBOURS if row.method == "hashnet" else TITLES[row.method]


def _cards(rows: list[NeighbourRow]) -> list[Card]:
    """The best binary codes at each length."""
    cards = []
    for n_bits in _bits(rows):
        binary = [row for row in _of(rows, n_bits) if row.method != PQ]
        if binary:
            best = max(binary, key=lambda row: row.recall)
            one = best.reports[0]
            meaning = f"The highest share of {one.k} nearest vectors among the first {one.within} by code."
            name = f"highest recall at {n_bits} bits"
            cards.append(Card(name, f"{best.recall:.4f}", _title(best), meaning))
    return cards


def _subtitle(rows: list[NeighbourRow]) -> str:
    """What is compared, in a line."""
    report, lengths = rows[0].reports[0], ", ".join(map(str, _bits(rows)))
    return (
        f"{counted(len(_methods(rows)), 'method')} at {lengths} bits: {report.n_queries:,} queries against "
        f"{report.n_database:,} items."
    )


def _grids(rows: list[NeighbourRow]) -> list[Grid]:
    report = rows[0].reports[0]
    what = f"recall@{report.k} within the first {report.within}"
    return [
        _grid(f"Neighbour recall by Hamming distance: {what}", rows, "recall", interval=True),
        _grid(f"By asymmetric score: {what}", rows, "asymmetric"),
        _grid("Correlation of Hamming and Euclidean distances (Spearman)", rows, "correlation"),
    ]


def _grid(title: str, rows: list[NeighbourRow], name: str, interval: bool = False) -> Grid:
    bits = _bits(rows)
    best = {n: max((getattr(r, name) or 0 for r in _of(rows, n)), default=0) for n in bits}
    lines = []
    for method in _methods(rows):
        cells = []
        for n_bits in bits:
            found = [row for row in _of(rows, n_bits) if row.method == method]
            value = getattr(found[0], name) if found else None
            if value is None:
                cells.append(GridCell("–"))
                continue
            note = f"{found[0].recall_low:.3f} – {found[0].recall_high:.3f}" if interval else ""
            cells.append(GridCell(f"{value:.4f}", bold=value == best[n_bits], note=note))
        if any(cell.text != "–" for cell in cells):
            first = next(row for row in rows if row.method == method)
            lines.append((GridCell(_title(first)), *cells))
    return Grid(title, ("method", *(f"{n} bits" for n in bits)), tuple(lines))


def _notes(rows: list[NeighbourRow]) -> list[str]:
    report = rows[0].reports[0]
    seeds = sorted({seed for row in rows for seed in row.seeds})
    return [
        f"Recall: the share of a query's {report.k} nearest vectors (Euclidean) among the first "
        f"{report.within} items of the ranking, mean over queries; where items tie at the last rank, the "
        "mean over every order of them. In brackets the 95 % interval over queries (bootstrap), the widest "
        "of the seeds.",
        f"The same number is the recall of the first {report.k} hits after the first {report.within} were "
        "rescored with the vectors.",
        "Asymmetric score: the query's float outputs against the items' bits, which needs no more storage.",
        f"{FROM_NEIGHBOURS}: trained on pairs from the training vectors alone, starting at ITQ.",
        *full_names(_methods(rows)),
        f"{report.n_queries:,} queries, {report.n_database:,} items, seeds {', '.join(map(str, seeds))}.",
    ]


def _figures(rows: list[NeighbourRow]) -> list[ComparisonFigure]:
    bits, report = _bits(rows), rows[0].reports[0]
    lengths = new_axes(size=SIZE)
    for place, method in enumerate(_methods(rows)):
        mine = [row for row in rows if row.method == method]
        lengths.plot(
            [r.n_bits for r in mine], [r.recall for r in mine], marker="o", label=_title(mine[0]),
            **line_style(place),
        )  # fmt: skip
    lengths.set_xscale("log", base=2)
    lengths.set_xticks(bits, [str(n) for n in bits])
    lengths.minorticks_off()
    lengths.set(xlabel="bits", ylabel=f"recall@{report.k} within {report.within}")
    legend(lengths)
    depth = new_axes(size=SIZE)
    for place, method in enumerate(_methods(rows)):
        longest = [row for row in rows if row.method == method and row.n_bits == bits[-1]]
        if longest:
            one = longest[0].reports[0]
            curve = np.mean([r.recall_within for r in longest[0].reports], axis=0)
            depth.plot(one.ranks, curve, marker="o", label=_title(longest[0]), **line_style(place))
    depth.set_xscale("log")
    depth.set_xticks(report.ranks, [f"{n:,}" for n in report.ranks])
    depth.minorticks_off()
    depth.set(xlabel="N, items retrieved", ylabel=f"recall of the {report.k} nearest", ylim=(0, 1.02))
    legend(depth)
    shown = [drawn("recall_depth", f"Recall over the number of items retrieved at {bits[-1]} bits", depth)]
    if len(bits) > 1:
        caption = f"Recall of the {report.k} nearest within {report.within} over code lengths"
        shown.insert(0, drawn("recall_bits", caption, lengths))
    return shown
