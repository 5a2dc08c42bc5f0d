"""The report of a comparison: tables as Markdown, CSV and JSON, figures, and one HTML page with all."""

from __future__ import annotations

import base64
import html
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import hashnet
from hashnet.io import storage
from hashnet.reports.comparison import differences, figures, tables
from hashnet.reports.comparison.methods import TITLES
from hashnet.reports.comparison.results import TABLE_TITLES, Table, gather

KIND, FORMAT_VERSION = "comparison", 1
PACKAGES = ("numpy", "scipy", "scikit-learn", "torch", "ray", "numba", "faiss-cpu")


def write_report(uri: str, records: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """Writes tables, figures and page into the folder ``uri``; returns the short result of the job.

    ``records`` are the finished cells; ``about`` has ``run``, ``config``, ``k``, ``paper``, ``settings`` and
    ``manifest``: what is needed to repeat it.
    """
    found = gather(records, about.get("paper"))
    notes = _notes(found, about)
    gaps = differences.gaps(found)
    grids = differences.grids(gaps)
    text = tables.markdown(found, notes, grids)
    storage.write_bytes(storage.join(uri, "tables.md"), text.encode())
    storage.write_bytes(storage.join(uri, "tables.csv"), tables.as_csv(found).encode())
    storage.write_bytes(storage.join(uri, "differences.csv"), differences.as_csv(gaps).encode())
    made = versions()
    storage.write_json(
        storage.join(uri, "tables.json"),
        {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "rows": tables.rows(found),
            "differences": [gap.row() for gap in gaps],
            "notes": notes,
            "versions": made,
            **about,
        },
    )
    pictures = figures.draw(found)
    for name, (_, data) in pictures.items():
        storage.write_bytes(storage.join(uri, "figures", f"{name}.png"), data)
    page = _page(found, grids, notes, pictures, about, made)
    storage.write_bytes(storage.join(uri, "comparison.html"), page.encode())
    return {
        "run": about["run"],
        "report": storage.join(uri, "comparison.html"),
        "cells": len(records),
        "map": {
            _name(table): {
                method: {str(n): round(e.mean(), 4) for n in table.bits if (e := table.entry(method, n))}
                for method in table.methods
            }
            for table in found
        },
        "first": {str(n): first.method for n in found[0].bits if (first := found[0].first(n))}
        if found
        else {},
    }


def versions() -> dict[str, str]:
    """What made the numbers: this project, Python, and the packages that compute."""
    found = {"hashnet": hashnet.__version__, "python": sys.version.split()[0], "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _notes(found: list[Table], about: dict[str, Any]) -> list[str]:
    """What the numbers mean, in sentences."""
    seeds = sorted({seed for table in found for entry in table.entries.values() for seed in entry.seeds})
    measured = _measured(found)
    depths = {conditions[0] for conditions in measured} or {about["k"]}
    k = depths.pop() if len(depths) == 1 else "k"
    notes = [
        f"MAP@{k}: denominator is the relevant items among the top {k}, a query without a hit counts 0, "
        "ties in Hamming distance are broken by a seeded hash of the item's position among the database "
        "rows, the same for every method.",
        f"Seeds {', '.join(map(str, seeds))}"
        + ("; ± is the standard deviation over them." if len(seeds) > 1 else ": one repetition."),
        "Bold: the highest mean, and every method whose difference to it has a 95 % interval (paired "
        "bootstrap over queries) that holds 0.",
        "Differences: method minus reference, in brackets the 95 % interval of a paired bootstrap over "
        "queries (a query's average precision is the mean over seeds).",
        "fit s (and CPU seconds) is that of the slowest code length of the row.",
    ]
    if about.get("paper"):
        notes.append("In brackets: the paper's number (AlexNet, its own splits).")
    if about.get("settings"):
        notes.append(
            "Settings of each method were chosen on a fifth of the training rows, never on queries; they are "
            "in tables.json."
        )
    for (depth, n_queries, n_database, chance), names in measured.items():
        which = f"{', '.join(names)}: MAP@{depth}, " if len(measured) > 1 else ""
        notes.append(
            f"{which}{n_queries:,} queries, {n_database:,} database rows, chance level {chance:.4f}."
        )
    return notes + sorted(set(_warnings(found)))


def _measured(found: list[Table]) -> dict[tuple[int, int, int, float], list[str]]:
    """(k, queries, database rows, chance level) → the tables measured so; k is never more than the rows."""
    tables_of: dict[tuple[int, int, int, float], list[str]] = {}
    for table in found:
        report = next(iter(table.entries.values())).reports[0]
        conditions = (report.k, report.n_queries, report.n_database, report.chance)
        tables_of.setdefault(conditions, []).append(_name(table))
    return tables_of


def _name(table: Table) -> str:
    return TABLE_TITLES[table.number].partition(":")[0]


def _warnings(found: list[Table]) -> Iterator[str]:
    """What methods said while they learnt; of a network the first thing, as it may have collapsed."""
    for table in found:
        for (method, n_bits), entry in table.entries.items():
            for record in entry.records:
                yield from record["warnings"]
                for text in record.get("training", {}).get("warnings", [])[:1]:
                    seed = record["made_from"]["seed"]
                    yield f"{TITLES[method]}, {n_bits} bits, seed {seed}: {text}."


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left; font-weight: 600 }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } .paper { color: #666; font-size: .85em }
figure { margin: 2rem 0 } img { max-width: 100% } pre { background: #f6f6f6; padding: 1rem; overflow: auto }
"""


def _page(
    found: list[Table],
    grids: dict[str, list[list[str]]],
    notes: list[str],
    pictures: dict[str, tuple[str, bytes]],
    about: dict[str, Any],
    made: dict[str, str],
) -> str:
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Comparison</title><style>{STYLE}</style>"
    ]
    parts.append("<h1>Comparison of hashing methods</h1>")
    parts += [_table(table) for table in found]
    parts += [_grid(title, lines) for title, lines in grids.items()]
    parts.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes) + "</ul>")
    for caption, data in pictures.values():
        image = base64.b64encode(data).decode()
        parts.append(
            f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{image}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    repeat = {"config": about["config"], "settings": about["settings"], "manifest": about["manifest"], **made}
    lines = "\n".join(f"{name}: {value}" for name, value in repeat.items())
    parts.append(f"<h2>To repeat it</h2><pre>{html.escape(lines)}</pre></html>")
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{n} bits</th>" for n in table.bits)
    lines = [f"<tr><th>method</th>{head}<th>fit s (CPU)</th><th>encode rows/s</th></tr>"]
    for method in table.methods:
        cells = "".join(_cell(table, method, n) for n in table.bits)
        present = [e for n in table.bits if (e := table.entry(method, n))]
        lines.append(
            f"<tr><td>{TITLES[method]}</td>{cells}<td>{tables.fit_text(present)}</td>"
            f"<td>{present[-1].encoded_per_s:,.0f}</td></tr>"
        )
    return f"<table><caption>{TABLE_TITLES[table.number]}</caption>{''.join(lines)}</table>"


def _grid(title: str, lines: list[list[str]]) -> str:
    tags = ["th"] + ["td"] * (len(lines) - 1)
    rows = ["".join(f"<{tag}>{cell}</{tag}>" for cell in line) for tag, line in zip(tags, lines, strict=True)]
    return f"<table><caption>{title}</caption><tr>{'</tr><tr>'.join(rows)}</tr></table>"


def _cell(table: Table, method: str, n_bits: int) -> str:
    entry = table.entry(method, n_bits)
    if entry is None:
        return "<td>–</td>"
    text = tables.value_text(entry)
    if table.as_good_as_first(method, n_bits):
        text = f"<b>{text}</b>"
    reported = table.reported(method, n_bits)
    if reported is not None:
        text += f" <span class=paper>({reported:.4f})</span>"
    return f"<td>{text}</td>"
