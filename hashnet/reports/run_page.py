"""What the page of a run shows: the numbers at the top, the table of metrics with their definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hashnet.metrics import DEFINITIONS, EvalReport
from hashnet.reports.examples import Example
from hashnet.reports.style import render


@dataclass(frozen=True)
class PageFigure:
    name: str
    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class Card:
    """One of the numbers at the top."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class MetricRow:
    """One line of the table of metrics; ``note`` is the interval, where there is one."""

    name: str
    value: str
    definition: str
    note: str = ""


@dataclass(frozen=True)
class RunPage:
    """Everything on the page besides the report itself."""

    title: str
    figures: Sequence[PageFigure]
    examples: Sequence[Example] = ()
    warnings: Sequence[str] = ()
    made_from: Mapping[str, str] | None = None


def run_page(report: EvalReport, page: RunPage) -> str:
    """The page's HTML."""
    return render(
        "run_page.html",
        title=page.title,
        subtitle=f"{report.n_queries:,} queries against {report.n_database:,} items, {report.n_bits}-bit "
        f"codes, {report.n_classes:,} classes, ranked to k = {report.k:,}.",
        cards=cards(report),
        warnings=page.warnings,
        figures=page.figures,
        examples=page.examples,
        rows=metric_rows(report),
        made_from_title="Made from",
        made_from=list((page.made_from or {}).items()),
    )


def cards(report: EvalReport) -> list[Card]:
    """The numbers at the top."""
    low, high = report.map_interval
    chance = report.chance
    return [
        Card(f"MAP@{report.k:,}", f"{report.map:.4f}", f"95 % interval {low:.4f} – {high:.4f}"),
        Card("tie-aware MAP", f"{report.map_tie_aware:.4f}", "relevant denominator, all tie orders"),
        Card(
            "P@H≤2", f"{report.precision_within(2):.4f}", f"{report.empty_within(2):.1%} of balls are empty"
        ),
        Card(
            "chance",
            f"{chance:.4f}",
            f"MAP is {report.map / chance:.1f} times that" if chance else "nothing is relevant",
        ),
        Card("without a hit", f"{report.queries_without_hit:,}", f"of {report.n_queries:,} queries"),
    ]


def metric_rows(report: EvalReport) -> list[MetricRow]:
    """Every metric with its value and its definition."""
    found = []

    def add(name: str, value: float | int, key: str, interval: tuple[float, float] | None = None) -> None:
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        note = f"{interval[0]:.4f} – {interval[1]:.4f}" if interval else ""
        found.append(MetricRow(name, shown, DEFINITIONS[key], note))

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
    found.append(MetricRow("intervals", "95 %", DEFINITIONS["interval"]))
    found.append(MetricRow("per class", f"{len(report.per_class):,}", DEFINITIONS["per_class"]))
    return found
