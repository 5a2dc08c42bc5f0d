"""Cells gathered: mean and deviation over seeds, who is first, who is as good as the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.metrics import Difference, EvalReport, paired_difference
from hashnet.reports.comparison.cells import report_of
from hashnet.reports.comparison.methods import ROWS, TITLES
from hashnet.reports.comparison.paper import reported_map

TABLE_TITLES = {
    1: "Table 1: MAP of all methods",
    2: "Table 2: zero-shot MAP (query and database classes unseen in training)",
    3: "Table 3: MAP of HashNet's variants",
}
PART_OF = {1: "main", 2: "zero-shot", 3: "main"}


@dataclass(frozen=True)
class Entry:
    """One method at one code length: ``records`` and ``reports`` by seed, in the order of ``seeds``."""

    method: str
    n_bits: int
    seeds: tuple[int, ...]
    records: tuple[dict[str, Any], ...]
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
        return float(np.mean([record[name] for record in self.records]))

    @property
    def encoded_per_s(self) -> float:
        return self.records[0]["encoded_rows"] / max(self.seconds("encode_s"), 1e-9)

    def ap(self) -> np.ndarray:
        """Average precision of each query, mean over seeds, float64 (q,)."""
        return np.mean([report.ap for report in self.reports], axis=0)


@dataclass(frozen=True)
class Table:
    """Rows of methods, columns of code lengths; ``paper`` names the data set whose numbers stand beside."""

    number: int
    bits: tuple[int, ...]
    entries: dict[tuple[str, int], Entry]
    paper: str | None

    @property
    def methods(self) -> list[str]:
        present = {method for method, _ in self.entries}
        rows = [*ROWS[self.number], *TITLES]  # further methods follow those of the paper's table
        return [name for name in dict.fromkeys(rows) if name in present]

    def entry(self, method: str, n_bits: int) -> Entry | None:
        return self.entries.get((method, n_bits))

    def reported(self, method: str, n_bits: int) -> float | None:
        return reported_map(self.number, method, self.paper, n_bits)

    def first(self, n_bits: int) -> Entry | None:
        """The method with the highest mean MAP."""
        column = [e for (_, bits), e in self.entries.items() if bits == n_bits]
        return max(column, key=Entry.mean, default=None)

    def behind(self, method: str, n_bits: int) -> Difference | None:
        """By how much the first is better than this method, with its interval.

        None for the first itself, and where the two were not asked the same number of queries.
        """
        entry, first = self.entry(method, n_bits), self.first(n_bits)
        if entry is None or first is None or entry is first or len(entry.ap()) != len(first.ap()):
            return None
        return paired_difference(first.ap(), entry.ap())

    def as_good_as_first(self, method: str, n_bits: int) -> bool:
        """Whether the method is the first, or the interval of the difference to it holds 0."""
        entry = self.entry(method, n_bits)
        if entry is None:
            return False
        behind = self.behind(method, n_bits)
        return entry is self.first(n_bits) or (behind is not None and not behind.clear)


def gather(records: Iterable[dict[str, Any]], paper: str | None = None) -> list[Table]:
    """The tables for which there are cells: 1, 2 and 3, those of the paper."""
    parts: dict[str, dict[tuple[str, int], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        made = record["made_from"]
        parts[record["part"]][made["method"], made["n_bits"]].append(record)
    tables = []
    for number in TABLE_TITLES:
        cells = parts.get(PART_OF[number], {})
        wanted = {key: found for key, found in cells.items() if _belongs(key[0], number)}
        methods = {method for method, _ in wanted}
        if methods and not (number == 3 and methods == {"hashnet"}):  # which is in Table 1 already
            bits = tuple(sorted({n_bits for _, n_bits in wanted}))
            entries = {key: _entry(*key, found) for key, found in wanted.items()}
            tables.append(Table(number, bits, entries, paper))
    return tables


def _belongs(method: str, number: int) -> bool:
    """Whether a table has this method: Table 3 HashNet's variants, Table 1 all others and HashNet itself."""
    return {1: method in ROWS[1] or method not in ROWS[3], 2: True, 3: method in ROWS[3]}[number]


def main_entries(tables: Iterable[Table]) -> dict[tuple[str, int], Entry]:
    """Every method on the data set as it is, by (method, n_bits): Table 1 and HashNet's variants."""
    return {key: entry for table in tables if table.number in (1, 3) for key, entry in table.entries.items()}


def _entry(method: str, n_bits: int, records: list[dict[str, Any]]) -> Entry:
    records = sorted(records, key=lambda record: record["made_from"]["seed"])
    seeds = tuple(record["made_from"]["seed"] for record in records)
    return Entry(method, n_bits, seeds, tuple(records), tuple(report_of(record) for record in records))
