"""The evaluation of a run by its vectors alone: neighbour recall of its codes, and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hashnet.io import storage
from hashnet.kernels import top_k
from hashnet.metrics import (
    NeighbourReport,
    VectorSample,
    exact_neighbours,
    neighbour_report,
)
from hashnet.reports.examples import TOP, Example, Neighbour, Pictures, make_examples, pick_queries
from hashnet.reports.style import (
    Card,
    MetricRow,
    Plot,
    interval_text,
    legend,
    line_style,
    new_axes,
    write_run_page,
)
from hashnet.run import Run

K, WITHIN = 10, 100
MAX_QUERIES = 1000  # drawn where there are more: the interval says what the draw is worth
SAMPLE = 1000  # rows whose distances are correlated

DEFINITIONS = {
    "recall": (
        "The share of a query's {k} nearest vectors (Euclidean) among the first {within} items by Hamming "
        "distance, mean over queries; where items tie at the last rank, the mean over every order of them."
    ),
    "asymmetric": (
        "The same among the first {within} items by asymmetric score: the query's float outputs against the "
        "items' bits."
    ),
    "rescored": (
        "The recall of the first {k} hits after the first {within} by Hamming distance were sorted by their "
        "vectors: equal to recall@{k} within {within}, as the true neighbours among them come first."
    ),
    "correlation": (
        "Spearman's correlation of the Hamming and the Euclidean distances of a query to random items, mean "
        "over queries; 1 is the same order."
    ),
    "interval": "95 % percentile bootstrap of the mean over queries (1,000 resamples, seeded).",
}


def write_neighbour_report(
    run: Run,
    made_from: Mapping[str, Any],
    seed: int = 0,
    page_name: str = "report.html",
    base_uri: str | None = None,
) -> str:
    """Measures the run's codes and writes neighbours.json and a page; returns the page's URI.

    ``base_uri`` is the folder that relative picture paths start from.
    """
    artefact = run.neighbours
    if artefact.exists() and artefact.header().lineage == made_from:
        report = artefact.open()
    else:
        report = measure_neighbours(run, seed)
        artefact.write(report, made_from)
    plot = Plot(
        "neighbour-recall",
        f"Recall of the {report.k} nearest vectors",
        "Mean over queries, over the number of items retrieved.",
        _recall_figure(report),
    )
    return write_run_page(
        storage.join(run.report.uri, page_name),
        "run_page.html",
        [plot],
        [("run", run.name), *((name, str(value)) for name, value in made_from.items())],
        title=f"Evaluation of {run.name}",
        subtitle=f"{report.n_queries:,} queries against {report.n_database:,} items, {report.n_bits}-bit "
        "codes, compared with the vectors they were made from; no labels are used.",
        cards=_cards(report),
        warnings=[],
        examples=_examples(run, report, seed, base_uri),
        examples_by=f"recall@{report.k} within {report.within:,}",
        relevant_means=f"is among the {TOP} nearest by the vectors themselves",
        rows=_rows(report),
    )


def measure_neighbours(run: Run, seed: int = 0) -> NeighbourReport:
    """Neighbour recall and distance correlation of the run's queries, MAX_QUERIES of them at most."""
    store, queries = run.codes.open(), run.query_codes.open()
    rng = np.random.default_rng(seed)
    some = _drawn(rng, len(queries))
    rows = np.sort(rng.choice(len(store), min(len(store), SAMPLE), replace=False))
    query_vectors = np.concatenate(list(run.vectors("query", queries.ids()[some])))
    ids = store.ids()
    truth = exact_neighbours(query_vectors, run.vectors("database", ids), min(K, len(store)))
    sample = VectorSample(query_vectors, rows, np.concatenate(list(run.vectors("database", ids[rows]))))
    return neighbour_report(
        queries.codes()[some],
        store.codes(),
        truth,
        WITHIN,
        logits=_logits(run, query_vectors),
        sample=sample,
        seed=seed,
    )


def _drawn(rng: np.random.Generator, n_queries: int) -> np.ndarray:
    """Rows of the queries that are measured, ascending."""
    return np.sort(rng.choice(n_queries, min(n_queries, MAX_QUERIES), replace=False))


def _examples(run: Run, report: NeighbourReport, seed: int, base_uri: str | None) -> list[Example]:
    """The best, median and worst queries by recall; none for a run of vectors, which has nothing to show."""
    manifest = run.manifest.open()
    if manifest.modality != "image":
        return []
    store, queries = run.codes.open(), run.query_codes.open()
    ids, query_ids, top = store.ids(), queries.ids(), min(TOP, len(store))
    drawn = _drawn(np.random.default_rng(seed), len(queries))
    picked = sorted(pick_queries(report.recalls), key=lambda pair: pair[1])  # vectors come in this order
    rows = drawn[[i for _, i in picked]]
    vectors = np.concatenate(list(run.vectors("query", query_ids[rows])))
    near = exact_neighbours(vectors, run.vectors("database", ids), top)
    positions, distances = top_k(store.codes(), queries.codes()[rows], top)
    nothing = np.zeros(0, dtype=bool)  # no labels
    asked = [Neighbour(int(query_ids[row]), 0, True, nothing) for row in rows]
    found = [
        [
            Neighbour(int(ids[at]), int(distance), bool(at in true), nothing)
            for at, distance in zip(places, far, strict=True)
        ]
        for places, far, true in zip(positions, distances, near, strict=True)
    ]
    score = f"recall@{report.k} within {report.within:,}"
    kinds = [(kind, f"{score} {report.recalls[i]:.2f}") for kind, i in picked]
    made = make_examples(kinds, asked, found, Pictures(manifest, base_uri=base_uri))
    order = ("best", "median", "worst")
    return sorted(made, key=lambda example: order.index(example.kind))


def _logits(run: Run, vectors: np.ndarray) -> np.ndarray | None:
    """The model's logits of the queries' vectors; None for a model that is not here."""
    if not run.model.exists():
        return None
    from hashnet.encoding import Encoder

    encoder = Encoder.load(run.model.uri)
    vectors_come_in = run.manifest.open(verify=False).modality == "features"
    return encoder.logits(vectors) if vectors_come_in else encoder.head(vectors)


def _recall_figure(report: NeighbourReport) -> Any:
    ax = new_axes()
    ax.plot(report.ranks, report.recall_within, marker="o", markersize=4, label="Hamming", **line_style(0))
    if report.asymmetric_within is not None:
        ax.plot(
            report.ranks, report.asymmetric_within, marker="o", markersize=4, label="asymmetric",
            **line_style(1),
        )  # fmt: skip
        legend(ax)
    ax.set_xscale("log")
    ax.set_xticks(report.ranks, [f"{n:,}" for n in report.ranks])
    ax.minorticks_off()
    ax.set(xlabel="N, items retrieved", ylabel=f"recall of the {report.k} nearest", ylim=(0, 1.02))
    return ax


def _cards(report: NeighbourReport) -> list[Card]:
    chance = report.within / report.n_database
    n, k, within = report.ranks[0], report.k, report.within
    cards = [
        Card(
            f"recall@{k} within {n:,}",
            f"{report.recall_within[0]:.4f}",
            "by Hamming distance",
            f"The share of a query's {k} nearest vectors that are among its first {n:,} items by code.",
        ),
        Card(
            f"recall@{k} within {within:,}",
            f"{report.recall:.4f}",
            f"95 % interval {interval_text(report.recall_interval)}",
            f"The same among the first {within:,} items: what sorting these by their vectors finds.",
        ),
    ]
    if report.asymmetric is not None and report.asymmetric_interval is not None:
        note = f"95 % interval {interval_text(report.asymmetric_interval)}"
        meaning = (
            f"Recall@{k} within {within:,} of items ordered by the query's real-valued outputs against their "
            "bits."
        )
        cards.append(Card("by asymmetric score", f"{report.asymmetric:.4f}", note, meaning))
    meaning = f"What a random order would find within {within:,} items."
    cards.append(Card("chance", f"{chance:.4f}", f"{within:,} of {report.n_database:,} items", meaning))
    if report.correlation is not None and report.correlation_interval is not None:
        note = f"95 % interval {interval_text(report.correlation_interval)}"
        meaning = "Spearman's rank correlation of Hamming and Euclidean distances: 1 is the same order."
        cards.append(Card("distance correlation", f"{report.correlation:.4f}", note, meaning))
    return cards


def _rows(report: NeighbourReport) -> list[MetricRow]:
    says = DEFINITIONS["recall"].format(k=report.k, within="N")
    rows = [
        MetricRow(f"recall@{report.k} within {n:,}", f"{value:.4f}", says)
        for n, value in zip(report.ranks, report.recall_within, strict=True)
    ]
    within = f"{report.within:,}"
    if report.asymmetric is not None and report.asymmetric_interval is not None:
        name, says = f"asymmetric recall@{report.k} within {within}", DEFINITIONS["asymmetric"]
        note = f"95 % {interval_text(report.asymmetric_interval)}"
        rows.append(MetricRow(name, f"{report.asymmetric:.4f}", says.format(within=within), note))
    rescored = DEFINITIONS["rescored"].format(k=report.k, within=within)
    rows.append(MetricRow(f"recall@{report.k}, {within} rescored", f"{report.recall:.4f}", rescored))
    if report.correlation is not None:
        rows.append(
            MetricRow("distance correlation", f"{report.correlation:.4f}", DEFINITIONS["correlation"])
        )
    return [*rows, MetricRow("intervals", "95 %", DEFINITIONS["interval"])]
