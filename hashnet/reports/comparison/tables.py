"""Finished cells gathered into tables, and their differences; as grids of text (Markdown, HTML) and as rows
(CSV, JSON)."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hashnet.comparison import OWN, TABLE_METHODS, TITLES, CellResult, reported_map
from hashnet.metrics import Difference, EvalReport, paired_difference

TABLE_TITLES = {
    1: "Table 1: MAP of all methods",
    2: "Table 2: zero-shot MAP (query and database classes unseen in training)",
    3: "Table 3: MAP of HashNet's variants",
    4: "Beyond the paper: variants of this project",
}
PART_OF = {1: "main", 2: "zero-shot", 3: "main", 4: "main"}
REFERENCES = {  # what each method is compared with
    "hashnet": "Difference of MAP to HashNet",
    "first": "Difference of MAP to the first at each code length",
}
MIN_CPU_SHARE = 0.05  # of the seconds: with less, a network was not trained by the process that measured it
SELF = {"hashnet": "0", "first": "first"}  # shown where a method would be compared with itself


@dataclass(frozen=True)
class Entry:
    """One method at one code length: its cells and their reports, in the order of ``seeds``."""

    method: str
    n_bits: int
    seeds: tuple[int, ...]
    cells: tuple[CellResult, ...]
    reports: tuple[EvalReport, ...]

    def mean(self, name: str = "map") -> float:
        return float(np.mean([getattr(report, name) for report in self.reports]))

    def sd(self) -> float | None:
        """The standard deviation of MAP over seeds (n - 1), None with a single seed."""
        values = [report.map for report in self.reports]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def precision_within(self, radius: int = 2) -> float:
        """Mean precision within a Hamming radius."""
        return float(np.mean([report.precision_within(radius) for report in self.reports]))

    def seconds(self, name: str) -> float:
        """Mean ``fit_s``, ``fit_cpu_s`` or ``encode_s``."""
        return float(np.mean([getattr(cell, name) for cell in self.cells]))

    @property
    def encoded_per_s(self) -> float:
        return self.cells[0].encoded_rows / max(self.seconds("encode_s"), 1e-3)  # cells keep milliseconds

    def ap(self) -> np.ndarray:
        """Average precision of each query, mean over seeds, float64 (q,)."""
        return np.mean([report.ap for report in self.reports], axis=0)


Entries = dict[tuple[str, int], Entry]  # by (method, n_bits)


@dataclass(frozen=True)
class Table:
    """Rows of methods, columns of code lengths; ``paper`` names the data set whose numbers are shown too."""

    number: int
    bits: tuple[int, ...]
    entries: Entries
    paper: str | None

    @property
    def name(self) -> str:
        return TABLE_TITLES[self.number].partition(":")[0]

    @property
    def methods(self) -> list[str]:
        present = {method for method, _ in self.entries}
        rows = [*TABLE_METHODS[self.number], *TITLES]  # further methods follow those of the paper's table
        return [name for name in dict.fromkeys(rows) if name in present]

    def entry(self, method: str, n_bits: int) -> Entry | None:
        return self.entries.get((method, n_bits))

    def reported(self, method: str, n_bits: int) -> float | None:
        """The paper's MAP, None where it has no number."""
        return reported_map(self.number, method, self.paper, n_bits)

    def first(self, n_bits: int) -> Entry | None:
        """The method with the highest mean MAP."""
        column = [e for (_, bits), e in self.entries.items() if bits == n_bits]
        return max(column, key=Entry.mean, default=None)

    def behind_first(self, method: str, n_bits: int) -> Difference | None:
        """By how much the first is better than this method, with its interval.

        None for the first itself, and where the two were measured on different numbers of queries.
        """
        entry, first = self.entry(method, n_bits), self.first(n_bits)
        if entry is None or first is None or entry is first or len(entry.ap()) != len(first.ap()):
            return None
        return paired_difference(first.ap(), entry.ap())

    def as_good_as_first(self, method: str, n_bits: int) -> bool:
        """Whether the method is the first, or the interval of its difference to the first contains 0."""
        entry = self.entry(method, n_bits)
        if entry is None:
            return False
        behind = self.behind_first(method, n_bits)
        return entry is self.first(n_bits) or (behind is not None and not behind.clear)


@dataclass(frozen=True)
class Gap:
    """MAP of a method - that of a reference, with its 95 % interval: differences.csv and tables.json."""

    against: str  # a key of REFERENCES
    reference: str
    method: str
    n_bits: int
    difference: float
    low: float
    high: float
    clear: bool  # whether the interval leaves 0 out


def gather(cells: Iterable[CellResult], paper: str | None = None) -> list[Table]:
    """The tables for which there are cells: 1, 2 and 3, as in the paper."""
    parts: dict[str, dict[tuple[str, int], list[CellResult]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        parts[cell.part][cell.made_from.method, cell.made_from.n_bits].append(cell)
    tables = []
    for number in TABLE_TITLES:
        found = {key: some for key, some in parts[PART_OF[number]].items() if _belongs(key[0], number)}
        methods = {method for method, _ in found}
        if number == 3 and methods == {"hashnet"}:  # which is in Table 1 already
            continue
        if number == 4 and not methods & set(OWN):
            continue
        if methods:
            bits = tuple(sorted({n_bits for _, n_bits in found}))
            entries = {key: _entry(*key, some) for key, some in found.items()}
            tables.append(Table(number, bits, entries, paper))
    return tables


def _belongs(method: str, number: int) -> bool:
    """Whether a table shows this method: the paper's are 1 to 3, our own variants have the last one."""
    if number == 1:  # with methods that the paper does not have
        return method in TABLE_METHODS[1] or method not in (*TABLE_METHODS[3], *OWN)
    return number == 2 or method in TABLE_METHODS[number]


def _entry(method: str, n_bits: int, cells: list[CellResult]) -> Entry:
    cells = sorted(cells, key=lambda cell: cell.made_from.seed)
    seeds = tuple(cell.made_from.seed for cell in cells)
    return Entry(method, n_bits, seeds, tuple(cells), tuple(cell.report for cell in cells if cell.report))


def main_entries(tables: Iterable[Table]) -> Entries:
    """Every method on the data set as it is: Table 1, HashNet's variants and our own."""
    return {key: entry for table in tables if table.number != 2 for key, entry in table.entries.items()}


def gaps(tables: list[Table]) -> list[Gap]:
    """Every difference there are cells for, by reference, code length and method in the paper's order.

    HashNet's variants are included. The interval is that of a paired bootstrap over queries.
    """
    entries = main_entries(tables)
    found = []
    for against in REFERENCES:
        for n_bits in sorted({bits for _, bits in entries}):
            column = {m: entry for m in TITLES if (entry := entries.get((m, n_bits)))}
            reference = max(column, key=lambda m: column[m].mean()) if against == "first" else against
            if reference not in column:
                continue
            ap = column[reference].ap()
            for method, entry in column.items():
                if method != reference and len(entry.ap()) == len(ap):
                    gap = paired_difference(entry.ap(), ap)
                    found.append(Gap(against, reference, method, n_bits, *gap, gap.clear))
    return found


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
    return f"{wall:.1f} (run)" if trained_before(slowest) else f"{wall:.1f} ({cpu:.1f})"


def trained_before(entry: Entry) -> bool:
    """Whether a network was trained before the comparison, by a job, or in other processes by its workers."""
    trained = any(cell.training is not None for cell in entry.cells)
    return trained and entry.seconds("fit_cpu_s") < MIN_CPU_SHARE * entry.seconds("fit_s")


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
    return GridCell(f"{gap.difference:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]")


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


def as_csv(kind: type[TableRow] | type[Gap], rows: Sequence[TableRow | Gap]) -> str:
    """The rows as comma-separated values under the names of their fields; lists are joined with spaces."""
    values = [dataclasses.asdict(row) for row in rows]
    for row in values:
        row.update({name: " ".join(map(str, v)) for name, v in row.items() if isinstance(v, list)})
    return csv_text([field.name for field in dataclasses.fields(kind)], values)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Comma-separated values under a line of names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
