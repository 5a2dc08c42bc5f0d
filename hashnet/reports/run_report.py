"""The report of a run: gathers what the run holds, draws it, writes page and figures.

OUT/report.html            the page, self-contained
OUT/figures/NAME.png .svg  every figure
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet import __version__
from hashnet.data import Manifest
from hashnet.errors import HashnetError
from hashnet.io import storage
from hashnet.metrics import EvalReport
from hashnet.reports import embedding, examples, figures
from hashnet.reports.run_page import render
from hashnet.reports.style import inline_svg, to_png, to_svg
from hashnet.store import CodeStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

Drawn = list[tuple[str, str, str, "Axes"]]  # name, title, note, axes


def write_run_report(values: dict[str, Any], sources: dict[str, Any], out: str) -> str:
    """Writes the page and the figures into the folder ``out``; the page's URI.

    ``values`` is ``EvalReport.to_dict()``. ``sources`` has ``run`` and may have ``model``, ``codes``,
    ``query_codes``, ``base_uri`` and ``beside`` (runs of other code lengths). What a run does not hold
    (a history, pictures, labels) is left out.
    """
    report = EvalReport.from_dict(values)
    run = str(sources["run"])
    store = CodeStore.open(sources.get("codes") or storage.join(run, "codes"))
    queries = CodeStore.open(sources.get("query_codes") or storage.join(run, "codes-query"))
    summary = model_summary(sources.get("model") or storage.join(run, "model"))
    manifest = _or_none(_open_manifest, storage.join(run, "manifest.parquet"))
    class_names = list(manifest.class_names) if manifest and manifest.class_names else None
    drawn = evaluation_figures(report, siblings(report, sources.get("beside") or []))
    drawn += training_figures(sources.get("model") or storage.join(run, "model"), summary)
    drawn += code_figures(store, class_names, report.seed)
    shown = examples.gather(
        store, queries, report.ap, class_names, manifest, report.seed, sources.get("base_uri")
    )
    made_from = {
        "run": storage.name_of(run),
        "model": store.lineage.get("model_sha256", "unknown"),
        "database codes": store.sha256,
        "query codes": queries.sha256,
        "ties and bootstrap": f"seed {report.seed}",
        "hashnet": __version__,
    }
    title = f"Evaluation of {storage.name_of(run)}"
    return write_page(report, drawn, shown, out, title, summary.get("warnings", []), made_from)


def write_page(
    report: EvalReport,
    drawn: Drawn,
    shown: list[examples.Example],
    out: str,
    title: str,
    warnings: list[str],
    made_from: dict[str, Any],
) -> str:
    """Writes OUT/figures and OUT/report.html."""
    entries = []
    for name, heading, note, ax in drawn:
        figure = ax.get_figure(root=True)
        assert figure is not None
        svg = to_svg(figure)
        storage.write_bytes(storage.join(out, "figures", f"{name}.svg"), svg.encode())
        storage.write_bytes(storage.join(out, "figures", f"{name}.png"), to_png(figure))
        entries.append({"name": name, "title": heading, "note": note, "svg": inline_svg(svg, name, heading)})
    text = render(report, entries, shown, title=title, warnings=warnings, made_from=made_from)
    uri = storage.join(out, "report.html")
    storage.write_bytes(uri, text.encode())
    return uri


def evaluation_figures(report: EvalReport, lengths: list[EvalReport]) -> Drawn:
    """The figures that follow from the evaluation alone; ``lengths`` are reports of other code lengths."""
    by_length = {
        f"{other.n_bits} bits": other for other in sorted([report, *lengths], key=lambda r: r.n_bits)
    }
    drawn: Drawn = [
        (
            "precision-recall",
            "Precision–recall by rank",
            f"Means over queries at ranks 1 to {report.k:,}.",
            figures.precision_recall(by_length),
        ),
        (
            "precision-recall-radius",
            "Precision–recall by Hamming radius",
            "One point a radius; a query with an empty ball has precision 0.",
            figures.precision_recall(by_length, by="radius"),
        ),
        ("precision-top-n", "Precision of the top N", "Mean over queries.", figures.precision_at(by_length)),
        ("recall-top-n", "Recall of the top N", "Mean over queries.", figures.recall_at(by_length)),
    ]
    if len(by_length) > 1:
        drawn.append(
            (
                "precision-h2-bits",
                "Precision within Hamming radius 2 over code lengths",
                "Longer codes leave more balls empty, which count 0.",
                figures.precision_over_bits({"this model": list(by_length.values())}),
            )
        )
    drawn += [
        ("radius", "Within a Hamming radius", "The thin line marks radius 2.", figures.radius(report)),
        (
            "distances",
            "Distances of similar and dissimilar pairs",
            "Every query with every item; the less overlap, the better.",
            figures.distances(report),
        ),
        ("per-class", "MAP by class", "A query counts for each of its labels.", figures.per_class(report)),
    ]
    return drawn


def training_figures(model: str, summary: dict[str, Any]) -> Drawn:
    """J and L through training and the histogram of |g|, where the model has them."""
    drawn: Drawn = []
    history = _or_none(_read_history, model)
    if history is not None and len(history):
        drawn.append(
            (
                "losses",
                "J and L through training",
                "Thin: single batches; thick: running mean. Above: beta of each stage.",
                figures.losses(history),
            )
        )
    measured = summary.get("measured") or {}
    if measured.get("histogram"):
        drawn.append(
            (
                "relaxed-histogram",
                "Histogram of |g| before binarisation",
                f"{measured['binary_share']:.1%} of the values lie above 0.99 (beta = {measured['beta']:g}).",
                figures.relaxed_histogram({"this model": measured["histogram"]}),
            )
        )
    return drawn


def code_figures(store: CodeStore, class_names: list[str] | None, seed: int) -> Drawn:
    """Bit balance and t-SNE of the database codes."""
    drawn: Drawn = [
        (
            "bit-balance",
            "Bit balance",
            "Share of ones of each bit in the database; red: a dead bit.",
            figures.bit_balance(store.statistics["bit_balance"]),
        )
    ]
    codes, labels = _some_rows(store)
    rows, classes = embedding.pick_rows(labels, seed)
    if len(rows) > 10:
        names = [class_names[c] if class_names else str(c) for c in classes]
        points = embedding.project(codes[rows], seed)
        drawn.append(
            (
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


def siblings(report: EvalReport, runs: list[str]) -> list[EvalReport]:
    """The reports of runs of other code lengths; one of the same is left out, one of other data refused."""
    found = []
    for run in runs:
        other = EvalReport.load(storage.join(run, "report", "report.json"))
        if (other.n_queries, other.n_database, other.k) != (report.n_queries, report.n_database, report.k):
            raise HashnetError(
                f"{run} has {other.n_queries} queries, {other.n_database} items and k = {other.k}, this run "
                f"{report.n_queries}, {report.n_database} and {report.k}; only the same data can stand beside"
            )
        if other.n_bits != report.n_bits:
            found.append(other)
    return found


def model_summary(model: str) -> dict[str, Any]:
    """What training said about the model, {} where nothing is kept."""
    from hashnet.models import bundle_info

    info = _or_none(bundle_info, model)
    return dict(info.summary or {}) if info else {}


def _open_manifest(uri: str) -> Manifest:
    return Manifest.open(uri, check=False)  # a few pictures are not worth hashing every part


def _read_history(model: str) -> Any:
    from hashnet.training import read_history

    return read_history(model)


def _or_none(read: Any, uri: str) -> Any:
    try:
        return read(uri)
    except HashnetError as error:
        log.info("the report does without %s: %s", uri, error)
        return None
