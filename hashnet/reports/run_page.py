"""One HTML page that needs nothing but itself: styles, figures and pictures are inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hashnet.metrics import DEFINITIONS, EvalReport
from hashnet.reports.examples import Example

TEMPLATE = Path(__file__).with_name("run_page.html")


def render(
    report: EvalReport,
    figures: Sequence[Mapping[str, str]],
    examples: Sequence[Example] = (),
    *,
    title: str,
    warnings: Sequence[str] = (),
    made_from: Mapping[str, Any] | None = None,
) -> str:
    """The page's text. ``figures`` have ``name``, ``title``, ``note`` and ``svg``."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        subtitle=f"{report.n_queries:,} queries against {report.n_database:,} items, {report.n_bits}-bit "
        f"codes, {report.n_classes:,} classes, ranked to k = {report.k:,}.",
        cards=cards(report),
        warnings=warnings,
        figures=figures,
        examples=examples,
        rows=rows(report),
        made_from=list((made_from or {}).items()),
    )


def cards(report: EvalReport) -> list[dict[str, str]]:
    """The numbers at the top."""
    low, high = report.map_interval
    chance = report.chance
    return [
        _card(f"MAP@{report.k:,}", f"{report.map:.4f}", f"95 % interval {low:.4f} – {high:.4f}"),
        _card("tie-aware MAP", f"{report.map_tie_aware:.4f}", "relevant denominator, all tie orders"),
        _card(
            "P@H≤2", f"{report.precision_within(2):.4f}", f"{report.empty_within(2):.1%} of balls are empty"
        ),
        _card(
            "chance",
            f"{chance:.4f}",
            f"MAP is {report.map / chance:.1f} times that" if chance else "nothing is relevant",
        ),
        _card("without a hit", f"{report.queries_without_hit:,}", f"of {report.n_queries:,} queries"),
    ]


def _card(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def rows(report: EvalReport) -> list[dict[str, str]]:
    """The table: every metric, its value, its definition."""
    found = []

    def add(name: str, value: float | int, says: str, interval: tuple[float, float] | None = None) -> None:
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        note = f"{interval[0]:.4f} – {interval[1]:.4f}" if interval else ""
        found.append({"name": name, "value": shown, "note": note, "says": DEFINITIONS[says]})

    k = f"@{report.k:,}"
    add(f"MAP{k}", report.map, "map", report.map_interval)
    add(f"MAP{k}, hits only", report.map_retrieved_hits_only, "map_retrieved_hits_only")
    add(f"MAP{k}, relevant", report.map_relevant, "map_relevant", report.map_relevant_interval)
    add(f"MAP{k}, tie-aware", report.map_tie_aware, "map_tie_aware", report.map_tie_aware_interval)
    add(f"MAP{k}, relevant last", report.map_relevant_last, "map_relevant_last")
    add(f"MAP{k}, relevant first", report.map_relevant_first, "map_relevant_first")
    add("queries without a hit", report.queries_without_hit, "queries_without_hit")
    add("queries without a relevant item", report.queries_without_relevant, "queries_without_relevant")
    add("chance level", report.chance, "chance")
    for n in (10, 100, 1000):
        if n in report.by_rank.ranks:
            add(f"precision@{n:,}", report.precision_at(n), "precision_at")
            add(f"recall@{n:,}", report.recall_at(n), "recall_at")
    add("P@H≤2", report.precision_within(2), "precision_within")
    add("recall, H≤2", report.recall_within(2), "recall_within")
    add("empty balls, H≤2", report.empty_within(2), "empty_within")
    found.append({"name": "intervals", "value": "95 %", "note": "", "says": DEFINITIONS["interval"]})
    found.append(
        {
            "name": "per class",
            "value": f"{len(report.per_class):,}",
            "note": "",
            "says": DEFINITIONS["per_class"],
        }
    )
    return found
