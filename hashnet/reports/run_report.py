"""The report of a run: collects what the run folder holds, draws it, writes the page and the figures.

OUT/report.html            the page, self-contained
OUT/figures/NAME.png .svg  every figure
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hashnet.errors import HashnetError
from hashnet.io import storage
from hashnet.metrics import DEFINITIONS, EvalReport
from hashnet.reports import examples, figures
from hashnet.reports.style import Card, MetricRow, Plot, interval_text, write_run_page
from hashnet.run import Run
from hashnet.store import CodeStore

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RunSources:
    """What a report is made from: a run, and the reports of others.

    ``beside`` are runs of other code lengths to draw in the same plots; ``base_uri`` is the folder that
    relative picture paths start from.
    """

    run: Run
    base_uri: str | None = None
    beside: tuple[str, ...] = ()


def write_run_report(values: dict[str, Any], sources: RunSources, out: str) -> str:
    """Writes the page and the figures into the folder ``out``; returns the page's URI.

    ``values`` is ``EvalReport.to_dict()``. What a run does not have (a history, pictures) is left out.
    """
    report = EvalReport.from_dict(values)
    run = sources.run
    store, queries = run.codes.open(), run.query_codes.open()
    summary = model_summary(run)
    manifest = _or_none(lambda: run.manifest.open())
    class_names = list(manifest.class_names) if manifest and manifest.class_names else None
    plots = evaluation_figures(report, reports_beside(report, sources.beside))
    plots += training_figures(run, summary)
    plots += code_figures(store, class_names, report.seed)
    pictures = examples.Pictures(manifest, class_names, sources.base_uri)
    return write_run_page(
        storage.join(out, "report.html"),
        "run_page.html",
        plots,
        [
            ("run", run.name),
            ("model", store.lineage.get("model_sha256", "unknown")),
            ("database codes", store.sha256),
            ("query codes", queries.sha256),
            ("ties and bootstrap", f"seed {report.seed}"),
        ],
        title=f"Evaluation of {run.name}",
        subtitle=f"{report.n_queries:,} queries against {report.n_database:,} items, {report.n_bits}-bit "
        f"codes, {report.n_classes:,} classes, ranked to k = {report.k:,}.",
        cards=cards(report),
        warnings=summary.get("warnings", []),
        examples=examples.gather(store, queries, report, pictures),
        examples_by="average precision",
        relevant_means="shares a label with the query",
        rows=metric_rows(report),
    )


def cards(report: EvalReport) -> list[Card]:
    """The numbers at the top."""
    times = f"MAP is {report.map / report.chance:.1f} times that" if report.chance else "nothing is relevant"
    empty = f"{report.empty_within(2):.1%} of queries have no such item and count 0"
    k = f"{report.k:,}"
    asymmetric = []
    if report.map_asymmetric is not None and report.map_asymmetric_interval is not None:
        gained = f"95 % interval {interval_text(report.map_asymmetric_interval)}"
        meaning = "MAP of items ordered by the query's real-valued outputs against their bits."
        asymmetric = [Card(f"asymmetric MAP@{k}", f"{report.map_asymmetric:.4f}", gained, meaning)]
    return [
        Card(
            f"MAP@{k}",
            f"{report.map:.4f}",
            f"95 % interval {interval_text(report.map_interval)}",
            f"Mean average precision: 1 when the relevant items among the first {k} come before all others.",
        ),
        *asymmetric,
        Card(
            "tie-aware MAP",
            f"{report.map_tie_aware:.4f}",
            "does not depend on the order of ties",
            f"MAP averaged over every order of items at equal distance; relevant items missing from the "
            f"first {k} count as well.",
        ),
        Card(
            "P@H≤2",
            f"{report.precision_within(2):.4f}",
            empty,
            "Precision within Hamming radius 2: the share of relevant items among those whose code differs "
            "from the query's in at most 2 bits.",
        ),
        Card(
            "chance",
            f"{report.chance:.4f}",
            times,
            "The precision of a random order: the share of the database that is relevant to a query.",
        ),
        Card(
            "without a hit",
            f"{report.queries_without_hit:,}",
            f"of {report.n_queries:,} queries",
            f"Queries with no relevant item among their first {k}.",
        ),
    ]


def metric_rows(report: EvalReport) -> list[MetricRow]:
    """Every metric with its value and its definition."""
    k = f"MAP@{report.k:,}"
    named = (
        (k, "map"),
        (f"{k}, hits only", "map_retrieved_hits_only"),
        (f"{k}, relevant", "map_relevant"),
        (f"{k}, tie-aware", "map_tie_aware"),
        (f"{k}, relevant last", "map_relevant_last"),
        (f"{k}, relevant first", "map_relevant_first"),
        ("queries without a hit", "queries_without_hit"),
        ("queries without a relevant item", "queries_without_relevant"),
        ("chance level", "chance"),
    )
    rows = [_metric_row(name, getattr(report, field), field, report) for name, field in named]
    if report.map_asymmetric is not None:
        rows.insert(1, _metric_row(f"{k}, asymmetric", report.map_asymmetric, "map_asymmetric", report))
    if report.ndcg is not None:
        rows.append(_metric_row(f"nDCG@{report.k:,}", report.ndcg, "ndcg"))
    for n in (10, 100, 1000):
        if n in report.by_rank.ranks:
            rows.append(_metric_row(f"precision@{n:,}", report.precision_at(n), "precision_at"))
            rows.append(_metric_row(f"recall@{n:,}", report.recall_at(n), "recall_at"))
    rows.append(_metric_row("P@H≤2", report.precision_within(2), "precision_within"))
    rows.append(_metric_row("recall, H≤2", report.recall_within(2), "recall_within"))
    rows.append(_metric_row("empty balls, H≤2", report.empty_within(2), "empty_within"))
    rows.append(MetricRow("intervals", "95 %", DEFINITIONS["interval"]))
    rows.append(MetricRow("per class", f"{len(report.per_class):,}", DEFINITIONS["per_class"]))
    return rows


def _metric_row(
    name: str, value: float | int, definition: str, report: EvalReport | None = None
) -> MetricRow:
    interval = getattr(report, f"{definition}_interval", None)
    return MetricRow(
        name,
        f"{value:,}" if isinstance(value, int) else f"{value:.4f}",
        DEFINITIONS[definition],
        interval_text(interval) if interval else "",
    )


def evaluation_figures(report: EvalReport, lengths: list[EvalReport]) -> list[Plot]:
    """The figures that follow from the evaluation alone; ``lengths`` are reports of other code lengths."""
    by_length = {
        f"{other.n_bits} bits": other for other in sorted([report, *lengths], key=lambda r: r.n_bits)
    }
    drawn = [
        Plot(
            "precision-recall",
            "Precision–recall by rank",
            f"Means over queries at ranks 1 to {report.k:,}.",
            figures.precision_recall(by_length),
        ),
        Plot(
            "precision-recall-radius",
            "Precision–recall by Hamming radius",
            "One point per radius; a query with an empty ball has precision 0.",
            figures.precision_recall(by_length, by="radius"),
        ),
        Plot(
            "precision-top-n", "Precision of the top N", "Mean over queries.", figures.precision_at(by_length)
        ),
        Plot("recall-top-n", "Recall of the top N", "Mean over queries.", figures.recall_at(by_length)),
    ]
    if len(by_length) > 1:
        drawn.append(
            Plot(
                "precision-h2-bits",
                "Precision within Hamming radius 2 over code lengths",
                "Longer codes leave more balls empty, which count 0.",
                figures.precision_over_bits({"this model": list(by_length.values())}),
            )
        )
    drawn += [
        Plot("radius", "Within a Hamming radius", "The thin line marks radius 2.", figures.radius(report)),
        Plot(
            "distances",
            "Distances of similar and dissimilar pairs",
            "Every query with every item: the less overlap, the better.",
            figures.distances(report),
        ),
        Plot(
            "per-class", "MAP by class", "A query counts for each of its labels.", figures.per_class(report)
        ),
    ]
    return drawn


def training_figures(run: Run, summary: dict[str, Any]) -> list[Plot]:
    """J and L through training and the histogram of |g|, where the model has them."""
    drawn = []
    from hashnet.training import read_history

    history = _or_none(lambda: read_history(run.model.uri))
    if history is not None and len(history):
        drawn.append(
            Plot(
                "losses",
                "J and L through training",
                "Thin: single batches; thick: running mean. Above: beta of each stage.",
                figures.losses(history),
            )
        )
    measured = summary.get("measured") or {}
    if measured.get("histogram"):
        drawn.append(
            Plot(
                "relaxed-histogram",
                "Histogram of |g| before binarisation",
                f"{measured['binary_share']:.1%} of the values lie above 0.99 (beta = {measured['beta']:g}).",
                figures.relaxed_histogram({"this model": measured["histogram"]}),
            )
        )
    return drawn


def code_figures(store: CodeStore, class_names: list[str] | None, seed: int) -> list[Plot]:
    """Bit balance and t-SNE of the database codes."""
    drawn = [
        Plot(
            "bit-balance",
            "Bit balance",
            "Share of ones of each bit in the database; red: a dead bit.",
            figures.bit_balance(store.statistics["bit_balance"]),
        )
    ]
    codes, labels = _some_rows(store)
    rows, classes = figures.tsne_rows(labels, seed)
    if len(rows) > 10:
        names = [class_names[c] if class_names else str(c) for c in classes]
        points = figures.tsne(codes[rows], seed)
        drawn.append(
            Plot(
                "tsne",
                f"t-SNE of {len(rows):,} codes of {len(set(names))} classes",
                "The most frequent classes, items with one label, equally many of each.",
                figures.embedding(points, names),
            )
        )
    return drawn


def _some_rows(store: CodeStore) -> tuple[np.ndarray, np.ndarray]:
    """Codes and labels of the first rows of the store, enough to pick from; memory stays small."""
    codes, labels = [], []
    for _, some_codes, some_labels in store.blocks(rows=65_536):
        assert some_labels is not None
        codes.append(some_codes)
        labels.append(some_labels)
        if sum(map(len, codes)) >= 200_000:
            break
    return np.concatenate(codes), np.concatenate(labels)


def reports_beside(report: EvalReport, runs: tuple[str, ...]) -> list[EvalReport]:
    """The reports of runs of other code lengths; the same length is left out, other data is refused."""
    found = []
    for run in runs:
        other = Run(run).report.open()
        if (other.n_queries, other.n_database, other.k) != (report.n_queries, report.n_database, report.k):
            raise HashnetError(
                f"{run} has {other.n_queries} queries, {other.n_database} items and k = {other.k}, this run "
                f"{report.n_queries}, {report.n_database} and {report.k}; give only runs on the same data "
                "with the same k as beside="
            )
        if other.n_bits != report.n_bits:
            found.append(other)
    return found


def model_summary(run: Run) -> dict[str, Any]:
    """What training wrote about the model, {} where there is no model."""
    info = _or_none(run.model.info)
    return dict(info.summary or {}) if info else {}


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except HashnetError as error:
        log.info("left out of the report: %s", error)
        return None
