"""The report of a comparison: tables as Markdown, CSV and JSON, figures, and one HTML page with all of it."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

import hashnet
from hashnet.comparison import FULL_NAMES, TITLES, CellResult
from hashnet.data import Manifest, ManifestArtefact
from hashnet.io import counted, storage
from hashnet.reports.comparison import tables
from hashnet.reports.comparison.figures import ComparisonFigure, draw
from hashnet.reports.comparison.tables import Entries, Entry, Table, gaps, gather, main_entries
from hashnet.reports.examples import (
    Example,
    Neighbour,
    Pictures,
    ap_text,
    make_examples,
    nearest_items,
    pick_queries,
)
from hashnet.reports.style import Card, render
from hashnet.run import Run

KIND, FORMAT_VERSION = "comparison", 1
PAGE = "comparison.html"
MOST_METHODS = 6  # those with the highest MAP
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


@dataclass(frozen=True)
class Contents:
    """What the page of a comparison shows."""

    title: str
    subtitle: str
    cards: list[Card]
    grids: list[tables.Grid]
    notes: list[str]
    figures: list[ComparisonFigure]
    examples: list[Example] = dataclasses.field(default_factory=list)


def write_comparison_report(uri: str, cells: list[CellResult], info: ComparisonInfo) -> dict[str, Any]:
    """Writes tables, figures and page into the folder ``uri``; returns the result that the job prints."""
    found = gather(cells, info.paper)
    differences = gaps(found)
    rows = tables.table_rows(found)
    shown = Contents(
        f"Comparison of hashing methods: {run_name(info.run)}",
        _subtitle(found),
        _cards(found),
        [*map(tables.table_grid, found), *tables.difference_grids(differences)],
        comparison_notes(found, info),
        draw(found),
        side_by_side(main_entries(found), info.manifest.get("uri"), info.config.get("base_uri")),
    )
    files = {
        "tables.csv": tables.as_csv(tables.TableRow, rows),
        "differences.csv": tables.as_csv(tables.Gap, differences),
    }
    saved = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "differences": [dataclasses.asdict(gap) for gap in differences],
    }
    write_contents(uri, shown, info, files, saved)
    return {
        "run": info.run,
        "report": storage.join(uri, PAGE),
        "cells": len(cells),
        "map": {table.name: _map_by_method(table) for table in found},
        "first": _first_by_length(found[0]) if found else {},
    }


def write_contents(
    uri: str,
    shown: Contents,
    info: ComparisonInfo,
    files: dict[str, str],
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    """Writes page, figures, tables.md, ``files`` (name → text) and tables.json with its ``rows``."""
    versions = package_versions()
    for figure in shown.figures:
        storage.write_bytes(storage.join(uri, "figures", f"{figure.name}.png"), figure.png)
    page = render(
        "comparison_page.html",
        made_from_title="Settings and versions",
        made_from=settings_of(info, versions),
        **vars(shown),
    )
    written = {"tables.md": tables.markdown(shown.grids, shown.notes), **files, PAGE: page}
    for name, text in written.items():
        storage.write_bytes(storage.join(uri, name), text.encode())
    header = {"kind": KIND, "format_version": FORMAT_VERSION}
    about = {"notes": shown.notes, "versions": versions, **dataclasses.asdict(info)}
    storage.write_json(storage.join(uri, "tables.json"), {**header, **rows, **about})


def _cards(found: list[Table]) -> list[Card]:
    """The method that is first at each code length of the first table."""
    if not found:
        return []
    table, cards = found[0], []
    for n in table.bits:
        if (first := table.first(n)) is not None:
            meaning = f"The highest MAP@{first.reports[0].k:,} of {len(table.methods)} methods."
            name = f"highest MAP at {n} bits"
            cards.append(Card(name, f"{first.mean():.4f}", TITLES[first.method], meaning))
    return cards


def run_name(uri: str) -> str:
    """The name of a comparison's run; of the demo's, which lies in RUN/compare, that of RUN."""
    parent, _, name = uri.rstrip("/").rpartition("/")
    return storage.name_of(parent if parent and Run(parent).comparison.name == name else uri)


def _subtitle(found: list[Table]) -> str:
    """What is compared, in a line: of the first table."""
    if not found:
        return ""
    table, report = found[0], next(iter(found[0].entries.values())).reports[0]
    lengths = ", ".join(map(str, table.bits))
    return (
        f"{counted(len(table.methods), 'method')} at {lengths} bits: {report.n_queries:,} queries against "
        f"{report.n_database:,} items, ranked to k = {report.k:,}."
    )


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
    if any(tables.trained_before(entry) for table in found for entry in table.entries.values()):
        notes.append(
            "(run): the network was trained before this comparison or by other processes; the seconds "
            "are those of its training, of which the CPU time is not known."
        )
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


def side_by_side(entries: Entries, manifest: str | None, base_uri: str | None = None) -> list[Example]:
    """For the best, median and worst query each method's nearest items, at the longest code, first seed.

    Empty where the manifest is gone, or where an older version made the cells, without row ids.
    """
    if not entries or manifest is None or not ManifestArtefact(manifest).exists():
        return []
    opened = Manifest.open(manifest, verify=False)
    longest = max(n_bits for _, n_bits in entries)
    shown = sorted((e for (_, n), e in entries.items() if n == longest), key=Entry.mean, reverse=True)
    found = [(TITLES[e.method], e.reports[0], e.cells[0].codes()) for e in shown[:MOST_METHODS]]
    if any("database_ids" not in arrays for *_, arrays in found):
        return []
    query_ids = found[0][2]["query_ids"]  # methods that could not read a picture have fewer queries
    found = [one for one in found if np.array_equal(one[2]["query_ids"], query_ids)]
    picked = pick_queries(np.mean([report.ap for _, report, _ in found], axis=0), each=1)
    rows = [row for _, row in picked]
    labels = _labels(opened, "query", query_ids[rows])
    asked = [Neighbour(int(i), 0, True, own) for i, own in zip(query_ids[rows], labels, strict=True)]
    names = list(opened.class_names) if opened.class_names else None
    pictures = Pictures(opened, names, base_uri)
    by_method = []
    for title, report, arrays in found:
        ids = arrays["database_ids"]
        block = (ids, arrays["database"], _labels(opened, "database", ids))
        near = nearest_items([block], arrays["query"][rows], labels, report.seed)
        kinds = [(f"{title}, {kind}", ap_text(report.ap[row])) for kind, row in picked]
        by_method.append(make_examples(kinds, asked, near, pictures))
    return [example for of_query in zip(*by_method, strict=True) for example in of_query]


def _labels(manifest: Manifest, split: str, ids: np.ndarray) -> np.ndarray:
    """Multi-hot labels of rows of a split, whose row ids ascend."""
    labels = manifest.labels(split)
    assert labels is not None
    return labels[np.searchsorted(manifest.row_ids(split), ids)]
