"""Tables as Markdown, CSV and plain values for JSON; HTML is in ``page``."""

from __future__ import annotations

import csv
import io
from typing import Any

from hashnet.reports.comparison.methods import TITLES
from hashnet.reports.comparison.results import TABLE_TITLES, Entry, Table

COLUMNS = (
    "table", "method", "n_bits", "seeds", "map", "map_sd", "map_relevant", "map_tie_aware", "precision_h2",
    "fit_s", "fit_cpu_s", "encoded_per_s", "paper_map", "behind_first", "behind_low", "behind_high",
    "as_good_as_first",
)  # fmt: skip


def markdown(
    tables: list[Table], notes: list[str], differences: dict[str, list[list[str]]] | None = None
) -> str:
    """Every table, the differences (see ``differences.grids``) and the notes.

    Bold: first, or its 95 % interval to the first holds 0.
    """
    parts = []
    for table in tables:
        parts += [f"## {TABLE_TITLES[table.number]}", "", *_grid(table), ""]
    for title, (head, *lines) in (differences or {}).items():
        parts += [f"## {title}", "", _line(head), _rule(head), *map(_line, lines), ""]
    return "\n".join(parts + [f"- {note}" for note in notes]) + "\n"


def _grid(table: Table) -> list[str]:
    head = ["method", *(f"{n} bits" for n in table.bits), "fit s (CPU)", "encode rows/s"]
    lines = [_line(head), _rule(head)]
    for method in table.methods:
        present = [e for n in table.bits if (e := table.entry(method, n))]
        cells = [_cell(table, method, n) for n in table.bits]
        lines.append(_line([TITLES[method], *cells, fit_text(present), f"{present[-1].encoded_per_s:,.0f}"]))
    return lines


def fit_text(entries: list[Entry]) -> str:
    """Seconds and CPU seconds to fit, of the slowest code length."""
    slowest = max(entries, key=lambda entry: entry.seconds("fit_s"))
    return f"{slowest.seconds('fit_s'):.1f} ({slowest.seconds('fit_cpu_s'):.1f})"


def _line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def _rule(head: list[str]) -> str:
    return _line(["---"] + ["---:"] * (len(head) - 1))


def _cell(table: Table, method: str, n_bits: int) -> str:
    entry = table.entry(method, n_bits)
    if entry is None:
        return "–"
    text = value_text(entry)
    if table.as_good_as_first(method, n_bits):
        text = f"**{text}**"
    reported = table.reported(method, n_bits)
    return f"{text} ({reported:.4f})" if reported is not None else text


def value_text(entry: Entry) -> str:
    """MAP as printed: mean ± standard deviation over the seeds, or the one value."""
    sd = entry.sd()
    return f"{entry.mean():.4f}" if sd is None else f"{entry.mean():.4f} ± {sd:.4f}"


def rows(tables: list[Table]) -> list[dict[str, Any]]:
    """One dict a table, method and code length, with the names in COLUMNS."""
    found = []
    for table in tables:
        for method in table.methods:
            for n_bits in table.bits:
                entry = table.entry(method, n_bits)
                if entry is not None:
                    found.append(_row(table, entry))
    return found


def _row(table: Table, entry: Entry) -> dict[str, Any]:
    behind = table.behind(entry.method, entry.n_bits)
    return {
        "table": table.number,
        "method": entry.method,
        "n_bits": entry.n_bits,
        "seeds": list(entry.seeds),
        "map": entry.mean(),
        "map_sd": entry.sd(),
        "map_relevant": entry.mean("map_relevant"),
        "map_tie_aware": entry.mean("map_tie_aware"),
        "precision_h2": entry.precision_within(2),
        "fit_s": entry.seconds("fit_s"),
        "fit_cpu_s": entry.seconds("fit_cpu_s"),
        "encoded_per_s": entry.encoded_per_s,
        "paper_map": table.reported(entry.method, entry.n_bits),
        "behind_first": behind.mean if behind else None,
        "behind_low": behind.low if behind else None,
        "behind_high": behind.high if behind else None,
        "as_good_as_first": table.as_good_as_first(entry.method, entry.n_bits),
    }


def as_csv(tables: list[Table]) -> str:
    """The rows as comma-separated values; seeds are joined with spaces."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows(tables):
        writer.writerow({**row, "seeds": " ".join(map(str, row["seeds"]))})
    return text.getvalue()
