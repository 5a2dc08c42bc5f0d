"""Tables and differences as grids of text (for Markdown and HTML) and as rows (for CSV and JSON)."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hashnet.comparison import TITLES
from hashnet.reports.comparison.results import REFERENCES, TABLE_TITLES, Entry, Gap, Table

SELF = {"hashnet": "0", "first": "first"}  # shown where a method would be compared with itself


@dataclass(frozen=True)
class GridCell:
    text: str
    bold: bool = False
    note: str = ""  # in brackets after the text


@dataclass(frozen=True)
class Grid:
    """A table for people; the first cell of a row names it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[GridCell, ...], ...]


@dataclass(frozen=True)
class TableRow:
    """One method at one code length in one table, as in tables.csv and tables.json."""

    table: int
    method: str
    n_bits: int
    seeds: list[int]
    map: float
    map_sd: float | None
    map_relevant: float
    map_tie_aware: float
    precision_h2: float
    fit_s: float
    fit_cpu_s: float
    encoded_per_s: float
    paper_map: float | None
    behind_first: float | None
    behind_low: float | None
    behind_high: float | None
    as_good_as_first: bool


@dataclass(frozen=True)
class DifferenceRow:
    """One difference of MAP with its 95 % interval, as in differences.csv and tables.json."""

    against: str
    reference: str
    method: str
    n_bits: int
    difference: float
    low: float
    high: float
    clear: bool  # whether the interval leaves 0 out


def table_grid(table: Table) -> Grid:
    """MAP of every method and length; bold: first, or its 95 % interval to the first contains 0."""
    rows = []
    for method in table.methods:
        present = [e for n in table.bits if (e := table.entry(method, n))]
        cells = [_map_cell(table, method, n) for n in table.bits]
        speed = GridCell(f"{present[-1].encoded_per_s:,.0f}")
        rows.append((GridCell(TITLES[method]), *cells, GridCell(_fit_text(present)), speed))
    head = ("method", *(f"{n} bits" for n in table.bits), "fit s (CPU)", "encode rows/s")
    return Grid(TABLE_TITLES[table.number], head, tuple(rows))


def _map_cell(table: Table, method: str, n_bits: int) -> GridCell:
    entry = table.entry(method, n_bits)
    if entry is None:
        return GridCell("–")
    sd, reported = entry.sd(), table.reported(method, n_bits)
    text = f"{entry.mean():.4f}" if sd is None else f"{entry.mean():.4f} ± {sd:.4f}"
    note = "" if reported is None else f"{reported:.4f}"
    return GridCell(text, table.as_good_as_first(method, n_bits), note)


def _fit_text(entries: list[Entry]) -> str:
    """Seconds and CPU seconds to fit, of the slowest code length."""
    slowest = max(entries, key=lambda entry: entry.seconds("fit_s"))
    wall, cpu = slowest.seconds("fit_s"), slowest.seconds("fit_cpu_s")
    # A network that was trained before the comparison, by a job or by several workers, has no CPU time.
    return f"{wall:.1f} (–)" if cpu < 0.1 < wall else f"{wall:.1f} ({cpu:.1f})"


def difference_grids(gaps: Iterable[Gap]) -> list[Grid]:
    """One grid per reference: one row per method, one column per code length."""
    gaps = list(gaps)
    grids: list[Grid] = []
    for against, title in REFERENCES.items():
        mine = {(gap.method, gap.n_bits): gap for gap in gaps if gap.against == against}
        references = {gap.n_bits: gap.reference for gap in mine.values()}
        if against == "first" and grids and set(references.values()) == {"hashnet"}:
            continue  # the grid before says the same
        shown = {method for method, _ in mine} | set(references.values())
        rows = []
        for method in (name for name in TITLES if name in shown):
            cells = [
                GridCell(SELF[against]) if method == reference else _gap_cell(mine.get((method, n)))
                for n, reference in references.items()
            ]
            rows.append((GridCell(TITLES[method]), *cells))
        if rows:
            grids.append(Grid(title, ("method", *(f"{n} bits" for n in references)), tuple(rows)))
    return grids


def _gap_cell(gap: Gap | None) -> GridCell:
    if gap is None:
        return GridCell("–")
    return GridCell("{:+.4f} [{:+.4f}, {:+.4f}]".format(*gap.difference))


def markdown(grids: Iterable[Grid], notes: Iterable[str]) -> str:
    """The grids and the notes as Markdown."""
    parts = []
    for grid in grids:
        rule = ["---"] + ["---:"] * (len(grid.head) - 1)
        rows = [[_markdown_cell(cell) for cell in row] for row in grid.rows]
        lines = [f"| {' | '.join(words)} |" for words in (grid.head, rule, *rows)]
        parts += [f"## {grid.title}", "", *lines, ""]
    return "\n".join(parts + [f"- {note}" for note in notes]) + "\n"


def _markdown_cell(cell: GridCell) -> str:
    text = f"**{cell.text}**" if cell.bold else cell.text
    return f"{text} ({cell.note})" if cell.note else text


def table_rows(tables: Iterable[Table]) -> list[TableRow]:
    """One row per table, method and code length."""
    return [
        _row(table, entry)
        for table in tables
        for method in table.methods
        for n_bits in table.bits
        if (entry := table.entry(method, n_bits)) is not None
    ]


def _row(table: Table, entry: Entry) -> TableRow:
    behind = table.behind_first(entry.method, entry.n_bits)
    return TableRow(
        table=table.number,
        method=entry.method,
        n_bits=entry.n_bits,
        seeds=list(entry.seeds),
        map=entry.mean(),
        map_sd=entry.sd(),
        map_relevant=entry.mean("map_relevant"),
        map_tie_aware=entry.mean("map_tie_aware"),
        precision_h2=entry.precision_within(2),
        fit_s=entry.seconds("fit_s"),
        fit_cpu_s=entry.seconds("fit_cpu_s"),
        encoded_per_s=entry.encoded_per_s,
        paper_map=table.reported(entry.method, entry.n_bits),
        behind_first=behind.mean if behind else None,
        behind_low=behind.low if behind else None,
        behind_high=behind.high if behind else None,
        as_good_as_first=table.as_good_as_first(entry.method, entry.n_bits),
    )


def difference_rows(gaps: Iterable[Gap]) -> list[DifferenceRow]:
    """One row per difference."""
    return [
        DifferenceRow(
            gap.against, gap.reference, gap.method, gap.n_bits, *gap.difference, gap.difference.clear
        )
        for gap in gaps
    ]


def as_csv(kind: type[TableRow] | type[DifferenceRow], rows: Sequence[TableRow | DifferenceRow]) -> str:
    """The rows as comma-separated values under the names of their fields; lists are joined with spaces."""
    text = io.StringIO()
    columns = [field.name for field in dataclasses.fields(kind)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_values(dataclasses.asdict(row)) for row in rows)
    return text.getvalue()


def _csv_values(values: Mapping[str, object]) -> dict[str, object]:
    return {
        name: " ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in values.items()
    }
