"""Finished cells gathered into tables: mean and deviation over seeds, who is first, by how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hashnet.comparison import OWN, TABLE_METHODS, TITLES, CellResult, reported_map
from hashnet.metrics import Difference, EvalReport, paired_difference

TABLE_TITLES = {
    1: "Table 1: MAP of all methods",
    2: "Table 2: zero-shot MAP (query and database classes unseen in training)",
    3: "Table 3: MAP of HashNet's variants",
    4: "Beyond the paper: HashNet with a label term, DHN with HashNet's alpha",
}
PART_OF = {1: "main", 2: "zero-shot", 3: "main", 4: "main"}
REFERENCES = {  # what each method is compared with
    "hashnet": "Difference of MAP to HashNet",
    "first": "Difference of MAP to the first at each code length",
}


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

    def sd(self, name: str = "map") -> float | None:
        """The standard deviation over seeds (n - 1), None with a single seed."""
        values = [getattr(report, name) for report in self.reports]
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
    """``difference`` is method - reference, over the average precisions of each query, mean over seeds."""

    against: str  # a key of REFERENCES
    reference: str
    method: str
    n_bits: int
    difference: Difference


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
                    difference = paired_difference(entry.ap(), ap)
                    found.append(Gap(against, reference, method, n_bits, difference))
    return found
