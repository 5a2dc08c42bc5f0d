"""The report of a comparison: tables as Markdown, CSV and JSON, figures, and one HTML page with all of it."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import hashnet
from hashnet.comparison import FULL_NAMES, TITLES, CellResult
from hashnet.io import storage
from hashnet.reports.comparison import tables
from hashnet.reports.comparison.examples import side_by_side
from hashnet.reports.comparison.figures import draw
from hashnet.reports.comparison.results import Table, gaps, gather, main_entries
from hashnet.reports.style import Card, render

KIND, FORMAT_VERSION = "comparison", 1
PACKAGES = ("numpy", "scipy", "scikit-learn", "torch", "ray", "numba", "faiss-cpu")


@dataclass(frozen=True)
class ComparisonInfo:
    """How a comparison was run: what is needed to repeat it, as written into tables.json.

    ``paper`` names the data set whose numbers of the paper are shown, ``settings`` those that were tuned.
    """

    run: str
    k: int
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    paper: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_comparison_report(uri: str, cells: list[CellResult], info: ComparisonInfo) -> dict[str, Any]:
    """Writes tables, figures and page into the folder ``uri``; returns the result that the job prints."""
    found = gather(cells, info.paper)
    notes = comparison_notes(found, info)
    differences = gaps(found)
    grids = [*map(tables.table_grid, found), *tables.difference_grids(differences)]
    rows, difference_rows = tables.table_rows(found), tables.difference_rows(differences)
    versions = package_versions()
    figures = draw(found)
    for figure in figures:
        storage.write_bytes(storage.join(uri, "figures", f"{figure.name}.png"), figure.png)
    for name, text in {
        "tables.md": tables.markdown(grids, notes),
        "tables.csv": tables.as_csv(tables.TableRow, rows),
        "differences.csv": tables.as_csv(tables.DifferenceRow, difference_rows),
        "comparison.html": render(
            "comparison_page.html",
            title="Comparison of hashing methods",
            subtitle=storage.name_of(info.run),
            cards=_cards(found),
            grids=grids,
            notes=notes,
            figures=figures,
            examples=side_by_side(main_entries(found), info.manifest.get("uri"), info.config.get("base_uri")),
            made_from_title="Settings and versions",
            made_from=settings_of(info, versions),
        ),
    }.items():
        storage.write_bytes(storage.join(uri, name), text.encode())
    storage.write_json(
        storage.join(uri, "tables.json"),
        {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "rows": [dataclasses.asdict(row) for row in rows],
            "differences": [dataclasses.asdict(row) for row in difference_rows],
            "notes": notes,
            "versions": versions,
            **dataclasses.asdict(info),
        },
    )
    return {
        "run": info.run,
        "report": storage.join(uri, "comparison.html"),
        "cells": len(cells),
        "map": {table.name: _map_by_method(table) for table in found},
        "first": _first_by_length(found[0]) if found else {},
    }


def _cards(found: list[Table]) -> list[Card]:
    """The method that is first at each code length of the first table."""
    if not found:
        return []
    table, cards = found[0], []
    for n in table.bits:
        if (first := table.first(n)) is not None:
            meaning = f"The highest MAP@{first.reports[0].k:,} of {len(table.methods)} methods."
            cards.append(Card(f"first at {n} bits", f"{first.mean():.4f}", TITLES[first.method], meaning))
    return cards


def _map_by_method(table: Table) -> dict[str, dict[str, float]]:
    return {
        method: {str(n): round(e.mean(), 4) for n in table.bits if (e := table.entry(method, n))}
        for method in table.methods
    }


def _first_by_length(table: Table) -> dict[str, str]:
    return {str(n): first.method for n in table.bits if (first := table.first(n))}


def package_versions() -> dict[str, str]:
    """What computed the numbers: versions of this project, Python, and the packages that compute."""
    found = {"hashnet": hashnet.__version__, "python": sys.version.split()[0], "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def settings_of(info: ComparisonInfo, versions: dict[str, str]) -> list[tuple[str, str]]:
    """What the end of the page lists."""
    config = " ".join(f"{name}={_word(value)}" for name, value in info.config.items() if value is not None)
    tuned = [
        (f"tuned settings of {TITLES.get(method, method)}", f"{n_bits} bits: {settings}")
        for method, by_bits in info.settings.items()
        for n_bits, settings in by_bits.items()
    ]
    manifest = [(f"manifest {name}", str(value)) for name, value in info.manifest.items()]
    return [("configuration", config), *tuned, *manifest, *versions.items()]


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def comparison_notes(found: list[Table], info: ComparisonInfo) -> list[str]:
    """What the numbers mean, in sentences."""
    seeds = sorted({seed for table in found for entry in table.entries.values() for seed in entry.seeds})
    conditions = _conditions(found)
    depths = {one.k for one in conditions} or {info.k}
    k = depths.pop() if len(depths) == 1 else "k"
    methods = dict.fromkeys(method for table in found for method in table.methods)
    notes = [
        f"MAP@{k}, mean average precision: the denominator is the relevant items among the top {k}, a query "
        "without a hit counts 0, ties in Hamming distance are broken by a seeded hash of the item's row id.",
        *full_names(methods),
        f"Seeds {', '.join(map(str, seeds))}; ± is the standard deviation over them."
        if len(seeds) > 1
        else f"One repetition, seed {', '.join(map(str, seeds))}.",
        "Bold: the highest mean, and every method whose difference to it has a 95 % interval (paired "
        "bootstrap over queries) that contains 0.",
        "Differences: method minus reference, in brackets the 95 % interval of a paired bootstrap over "
        "queries (a query's average precision is the mean over seeds).",
        "fit s: seconds (and CPU seconds) to fit, at the slowest code length of the row; encode rows/s: rows "
        "that it encodes per second.",
    ]
    if info.paper:
        notes.append("In brackets: the paper's number (AlexNet, its own splits).")
    if info.settings:
        notes.append(
            "The settings of each method were chosen on a fifth of the training rows, never on queries; they "
            "are in tables.json."
        )
    for one, names in conditions.items():
        which = f"{', '.join(names)}: MAP@{one.k}, " if len(conditions) > 1 else ""
        counts = f"{one.n_queries:,} queries, {one.n_database:,} database rows"
        notes.append(f"{which}{counts}, chance level {one.chance:.4f}.")
    return notes + _rows_seen(found, info) + sorted(set(_warnings(found)))


def full_names(methods: Iterable[str]) -> list[str]:
    """What the titles of the methods stand for."""
    return [f"{TITLES[method]}: {FULL_NAMES[method]}." for method in methods]


def _rows_seen(found: list[Table], info: ComparisonInfo) -> list[str]:
    """Which methods learned from a sample of the training rows, as their papers do."""
    n_train = info.manifest.get("splits", {}).get("train", 0)
    seen = {
        f"{TITLES[method]} {rows:,}"
        for table in found
        for (method, _), entry in table.entries.items()
        for cell in entry.cells
        if method in ("ksh", "bre")
        and (rows := cell.params.get("n_labelled") or cell.params.get("n_rows") or n_train) < n_train
    }
    return [f"Rows learned from: {', '.join(sorted(seen))} of {n_train:,}; all others all."] if seen else []


@dataclass(frozen=True)
class Conditions:
    """What a table was measured on; ``k`` is never more than the database has rows."""

    k: int
    n_queries: int
    n_database: int
    chance: float


def _conditions(found: list[Table]) -> dict[Conditions, list[str]]:
    """Conditions → the names of the tables measured under them."""
    names: dict[Conditions, list[str]] = {}
    for table in found:
        report = next(iter(table.entries.values())).reports[0]
        conditions = Conditions(report.k, report.n_queries, report.n_database, report.chance)
        names.setdefault(conditions, []).append(table.name)
    return names


def _warnings(found: list[Table]) -> Iterator[str]:
    """Warnings that methods gave while learning; of a network the first one, as it may have collapsed."""
    for table in found:
        for (method, n_bits), entry in table.entries.items():
            for cell in entry.cells:
                yield from cell.warnings
                if cell.training and cell.training.warnings:
                    text = cell.training.warnings[0]
                    yield f"{TITLES[method]}, {n_bits} bits, seed {cell.made_from.seed}: {text}."
