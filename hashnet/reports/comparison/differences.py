"""Who is better than whom: differences of MAP on the same queries, with a paired bootstrap interval.

Two questions about every method, HashNet's variants included: how far is it from HashNet, and how far from
the first at each code length?
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from hashnet.metrics import Difference, paired_difference
from hashnet.reports.comparison.methods import TITLES
from hashnet.reports.comparison.results import Table, main_entries

AGAINST = {
    "hashnet": "Difference of MAP to HashNet",
    "first": "Difference of MAP to the first at each code length",
}
OWN = {"hashnet": "0", "first": "first"}  # what stands where a method would be compared with itself
COLUMNS = ("against", "reference", "method", "n_bits", "difference", "low", "high", "clear")


@dataclass(frozen=True)
class Gap:
    """``difference`` is method - reference, over the average precisions of each query, mean over seeds."""

    against: str  # a key of AGAINST
    reference: str
    method: str
    n_bits: int
    difference: Difference

    @property
    def text(self) -> str:
        return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*self.difference)

    def row(self) -> dict[str, Any]:
        """The values named in COLUMNS."""
        found = self.difference
        values = (self.against, self.reference, self.method, self.n_bits, *found, found.clear)
        return dict(zip(COLUMNS, values, strict=True))


def gaps(tables: list[Table]) -> list[Gap]:
    """Every difference there are cells for, by question, code length and method in the paper's order."""
    entries = main_entries(tables)
    found = []
    for against in AGAINST:
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


def grids(found: list[Gap]) -> dict[str, list[list[str]]]:
    """Title → lines of cells, the head first: a line a method, a column a code length."""
    made = {}
    for against, title in AGAINST.items():
        mine = {(gap.method, gap.n_bits): gap for gap in found if gap.against == against}
        if not mine:
            continue
        references = {gap.n_bits: gap.reference for gap in mine.values()}
        shown = {method for method, _ in mine} | set(references.values())
        lines = [["method", *(f"{n_bits} bits" for n_bits in references)]]
        for method in TITLES:
            if method in shown:
                cells = [
                    OWN[against]
                    if method == reference
                    else gap.text
                    if (gap := mine.get((method, n)))
                    else "–"
                    for n, reference in references.items()
                ]
                lines.append([TITLES[method], *cells])
        made[title] = lines
    return made


def as_csv(found: list[Gap]) -> str:
    """The rows as comma-separated values."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(gap.row() for gap in found)
    return text.getvalue()
