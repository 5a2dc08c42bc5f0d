"""Evaluates a run on a Ray cluster: encodes the queries, counts them against every code shard, sums up.

Queries are encoded with the run's model into RUN/codes-query. One task counts one range of queries
against one group of code shards; the partial results of a range are merged, measured in blocks of fixed
size and kept under RUN/report, so that the same job started again continues there. Counts are whole
numbers and candidates are ordered by (distance, hash of the row id): the report is the same to the
last bit for any number of tasks, nodes and shards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cluster.encode import EncodeConfig, encode_database
from cluster.evaluate.tasks import Evaluation, query_ranges, run_ranges, shard_groups
from cluster.runtime import connection, telemetry
from hashnet.errors import DataError, LineageMismatch
from hashnet.io import REQUIRED, Progress, events, key, storage
from hashnet.metrics import (
    EvalReport,
    LabelSets,
    QueryMeasures,
    ReportArtefact,
    build_report,
    rank_limit,
    refuse_unlabelled,
)
from hashnet.models import BundleInfo
from hashnet.run import Run
from hashnet.store import CodeStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluateConfig:
    run: str = key(REQUIRED, "run folder, a path or a URI, with model/ and codes/", path=True)
    k: int | None = key(5000, "rank at which MAP and the curves by rank stop (none: whole database)", low=1)
    seed: int = key(0, "seed of the hash that orders ties, and of the bootstrap", low=0)
    model: str | None = key(None, "model bundle that encodes the queries (none: RUN/model)", path=True)
    codes: str | None = key(None, "code store to search (none: RUN/codes)", path=True)
    query_codes: str | None = key(
        None, "output folder of the queries' codes (none: RUN/codes-query)", path=True
    )
    out: str | None = key(None, "output folder (none: RUN/report)", path=True)
    rows_per_task: int = key(262_144, "database rows per task", low=1)
    device: str = key(
        "auto",
        "where distances are counted; queries are encoded as the database was",
        choices=("auto", "cpu", "cuda"),
    )
    max_bad_fraction: float = key(
        0.01, "fail if more than this share of the query pictures is bad", low=0, high=1
    )
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)
    beside: list[str] = key(
        [], "other runs of the same data, for the figure of precision by code length", path=True
    )
    figures: bool = key(True, "draw the figures and write report.html")

    @property
    def artefacts(self) -> Run:
        """The run, with the artefacts that were given by key at their own places."""
        elsewhere = {"codes": self.codes, "query_codes": self.query_codes, "report": self.out}
        return Run(self.run, model=self.model, **elsewhere)


def evaluate_run(config: EvaluateConfig) -> dict[str, Any]:
    """Writes the report of a run; returns the summary that the job prints."""
    started = time.monotonic()
    store = config.artefacts.codes.open()
    info = config.artefacts.model.info()
    queries = _queries(config, store, info)
    labels = _query_labels(queries)
    k = rank_limit(config.k, len(store))
    made_from = {"database": store.sha256, "queries": queries.sha256, "k": k, "seed": config.seed}
    artefact = config.artefacts.report
    report = _finished(artefact, made_from)
    if report is None:
        evaluation = Evaluation(store, queries.codes(), labels, k, config.seed, config.device)
        measures = _measure_all(config, evaluation, made_from)
        # The model may have been trained on another list of classes than this run's.
        names = info.class_names if len(info.class_names or ()) == labels.n_classes else None
        report = build_report(measures, labels, len(store), k, config.seed, names)
        artefact.write(report, made_from)
        _remove_parts(config.artefacts.report.uri)
    page = _draw(config, report) if config.figures else None
    return {
        "run": config.run,
        "report": artefact.header_uri,
        "page": page,
        "n_queries": report.n_queries,
        "n_database": report.n_database,
        "n_bits": report.n_bits,
        "k": report.k,
        "map": report.map,
        "map_interval": report.map_interval,
        "map_relevant": report.map_relevant,
        "map_tie_aware": report.map_tie_aware,
        "precision_within_2": report.precision_within(2),
        "empty_within_2": report.empty_within(2),
        "queries_without_hit": report.queries_without_hit,
        "chance": report.chance,
        "seconds": round(time.monotonic() - started, 3),
    }


def _queries(config: EvaluateConfig, store: CodeStore, info: BundleInfo) -> CodeStore:
    """The store of the queries' codes; encodes those that are missing."""
    made_by = store.lineage.get("model_sha256")
    if made_by is not None and made_by != info.sha256:
        raise LineageMismatch(
            f"{store.uri} was encoded with model {made_by[:12]}, but {config.artefacts.model.uri} is "
            f"{info.sha256[:12]}; encode the database with this model, or give the model that made the codes"
        )
    if store.n_classes is None:
        raise DataError(f"{store.uri} has no labels, and relevance needs them; add labels to the manifest")
    device, compile = _device_of(store)
    encode_database(
        EncodeConfig(
            run=config.run,
            model=config.artefacts.model.uri,
            out=config.artefacts.query_codes.uri,
            split="query",
            device=device,
            compile=compile,
            max_bad_fraction=config.max_bad_fraction,
            base_uri=config.base_uri,
        )
    )
    queries = config.artefacts.query_codes.open()
    if queries.n_bits != store.n_bits:
        raise LineageMismatch(f"{queries.uri} has {queries.n_bits} bits, {store.uri} {store.n_bits}")
    if queries.n_classes != store.n_classes:
        raise LineageMismatch(
            f"{queries.uri} has {queries.n_classes} classes, {store.uri} {store.n_classes}; "
            "queries and database must come from the same manifest"
        )
    return queries


def _device_of(store: CodeStore) -> tuple[str, bool | None]:
    """(device, compile) that encode queries as the database was, so that codes agree to the bit.

    Open where the database was encoded on a GPU, which the queries' machine may not have.
    """
    compile = {"cpu-eager": False, "cpu-compiled": True}.get(store.lineage.get("engine", ""))
    return ("auto", None) if compile is None else ("cpu", compile)


def _query_labels(queries: CodeStore) -> LabelSets:
    if not len(queries):
        raise DataError(
            f"{queries.uri} holds no queries; put some rows of the manifest into the split `query`"
        )
    lists = pa.concat_tables(queries.tables(["labels"]))["labels"]
    labels = LabelSets.from_arrow(lists, queries.n_classes or 0)
    refuse_unlabelled(labels)
    return labels


def _finished(artefact: ReportArtefact, made_from: dict[str, Any]) -> EvalReport | None:
    """The report that is there already if it was made from exactly this; else None."""
    if artefact.made_from() != made_from:
        return None
    log.info("%s is up to date", artefact.header_uri)
    return artefact.open()


def _measure_all(config: EvaluateConfig, evaluation: Evaluation, made_from: dict[str, Any]) -> QueryMeasures:
    """The measures of every query; finished ranges are read from disk."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    folder = storage.join(config.artefacts.report.uri, f"parts-{digest}")
    done = set(storage.list_names(folder))
    ranges = query_ranges(len(evaluation.codes), evaluation.k)
    names = {span: f"queries-{span[0]:08d}-{span[1]:08d}.npz" for span in ranges}
    todo = [span for span in ranges if names[span] not in done]
    if todo:
        groups = shard_groups(evaluation.store, config.rows_per_task)
        connection.connect()
        with Progress(len(ranges), "query ranges", "evaluate", done=len(ranges) - len(todo)) as progress:
            for span, blocks in run_ranges(evaluation, todo, groups):
                storage.write_bytes(storage.join(folder, names[span]), QueryMeasures.dump_blocks(blocks))
                progress.update(1, queries=span[1])
                tags = {"stage": "evaluate", "run": telemetry.run_name(config.run)}
                events.event("queries measured", first=span[0], stop=span[1], **tags)
                telemetry.gauge("shards_done", progress.done, **tags)
                telemetry.gauge("shards_total", len(ranges), **tags)
    kept = [
        QueryMeasures.load_blocks(storage.read_bytes(storage.join(folder, names[span]))) for span in ranges
    ]
    return QueryMeasures.concatenate([block for blocks in kept for block in blocks])


def _remove_parts(out: str) -> None:
    """Removes the measures of single ranges, which are needed until the report is written."""
    for name in storage.list_names(out):
        if name.startswith("parts-"):
            storage.delete(storage.join(out, name))


def _draw(config: EvaluateConfig, report: EvalReport) -> str:
    """The uri of the page; a task draws it, since the driver's node may have no CPU to spare."""
    import ray

    from hashnet.reports import RunSources, write_run_report

    connection.connect()
    draw = ray.remote(write_run_report).options(num_cpus=1, max_retries=3)
    sources = RunSources(config.artefacts, config.base_uri, tuple(config.beside))
    return ray.get(draw.remote(report.to_dict(), sources, config.artefacts.report.uri))
