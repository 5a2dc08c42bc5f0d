"""Evaluates a run on a Ray cluster: encodes the queries, counts them against every code shard, sums up.

Queries are encoded with the run's model into RUN/codes-query; codes from elsewhere, which have no model, come
with their own there. One task counts one range of queries against one group of code shards:

    count(range, group) … → merge, eight at a time → finish: the measures of the range

The measures of a range, in blocks of fixed size, are kept under RUN/report, so that the same job started
again continues there. Counts are whole numbers and candidates are ordered by (distance, hash of the row
id): the report is the same to the last bit for any number of tasks, nodes and shards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.encode import EncodeConfig, encode_database
from cluster.runtime import Need, capacity, connection, telemetry
from hashnet.encoding import BOTH
from hashnet.errors import DataError, LineageMismatch
from hashnet.io import REQUIRED, Progress, binary_matrix, events, key, storage
from hashnet.labels import LabelSets
from hashnet.metrics import (
    EvalReport,
    QueryCounts,
    QueryMeasures,
    ReportArtefact,
    ScoreShard,
    build_report,
    build_shard,
    query_block_size,
    rank_limit,
    refuse_unlabelled,
    write_trec,
)
from hashnet.models import BundleInfo
from hashnet.run import Run
from hashnet.store import CodeStore

log = logging.getLogger(__name__)

RANGE_BYTES = 64 << 20  # candidate keys of one range of queries against one group of shards, whatever k is
FAN_IN = 8  # partial results merged by one task
LOCAL_PAIRS = 1 << 30  # of a query and a database row that this process compares: about a second
Span = tuple[int, int]  # queries [first, stop)


@dataclass(frozen=True)
class EvaluateConfig:
    run: str = key(REQUIRED, "run folder, a path or a URI, with model/ and codes/", path=True)
    k: int | None = key(5000, "rank at which MAP and the curves by rank stop (none: whole database)", low=1)
    seed: int = key(0, "seed of the hash that orders ties, and of the bootstrap", low=0)
    model: str | None = key(None, "model bundle that encodes the queries (none: RUN/model)", path=True)
    codes: str | None = key(None, "code store to search (none: RUN/codes)", path=True)
    query_codes: str | None = key(
        None, "folder of the queries' codes, encoded where missing (none: RUN/codes-query)", path=True
    )
    out: str | None = key(None, "output folder (none: RUN/report)", path=True)
    rows_per_task: int = key(262_144, "database rows per task", low=1)
    device: str = key(
        "auto",
        "where distances are counted; auto: on the CPU. Queries are encoded as the database was",
        choices=("auto", "cpu", "cuda"),
    )
    max_bad_fraction: float = key(
        0.01, "fail if more than this share of the query pictures is bad", low=0, high=1
    )
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)
    beside: list[str] = key(
        [], "other runs of the same data, for the figure of precision by code length", path=True
    )
    neighbours: bool = key(
        False,
        "also measure recall of the nearest vectors, as is done without labels: report/neighbours.html",
    )
    figures: bool = key(True, "draw the figures and write report.html")
    trec: bool = key(
        False,
        "also write the rankings and judgements for trec_eval or ir_measures: report/trec/{run,qrels}.txt",
    )

    @property
    def artefacts(self) -> Run:
        """The run, with the artefacts that were given by key at their own places."""
        elsewhere = {"codes": self.codes, "query_codes": self.query_codes, "report": self.out}
        return Run(self.run, model=self.model, **elsewhere)


def evaluate_run(config: EvaluateConfig) -> dict[str, Any]:
    """Writes the report of a run; returns the summary that the job prints."""
    started = time.monotonic()
    store = config.artefacts.codes.open()
    made_by = store.lineage.get("model_sha256")  # None: codes from elsewhere
    info = config.artefacts.model.info() if made_by else None
    queries = _encoded_queries(config, store, info) if info else _imported_queries(config)
    _refuse_other_queries(store, queries)
    if store.n_classes is None:
        found = _evaluate_neighbours(config, store, queries)
        return {**found, "seconds": round(time.monotonic() - started, 3)}
    labels = _query_labels(queries)
    k = rank_limit(config.k, len(store))
    made_from = {
        "database": store.sha256, "queries": queries.sha256, "k": k, "seed": config.seed,
        "rankings": "hamming,asymmetric" if info else "hamming",
    }  # fmt: skip
    artefact = config.artefacts.report
    report = _finished(artefact, made_from)
    if report is None:
        logits = _query_logits(config, queries) if info else None
        evaluation = Evaluation(store, queries.codes(), labels, k, config.seed, config.device, logits)
        measures = _measure_all(config, evaluation, made_from)
        # The model may have been trained on another list of classes than this run's.
        names = info.class_names if info and len(info.class_names or ()) == labels.n_classes else None
        report = build_report(measures, labels, len(store), k, config.seed, names)
        artefact.write(report, made_from)
        for name in storage.list_names(artefact.uri):  # measures of single ranges, needed until here
            if name.startswith("parts-"):
                storage.delete(storage.join(artefact.uri, name))
    beside = {}
    if config.neighbours:
        found = _evaluate_neighbours(config, store, queries, "neighbours.html")
        beside = {"neighbours": {name: found[name] for name in found if name != "run"}}
    if config.trec:
        _write_trec(config, store, queries)
    page = _draw(config, report) if config.figures else None
    told = (
        "n_queries", "n_database", "n_bits", "k", "map", "map_interval", "map_asymmetric",
        "map_asymmetric_interval", "map_relevant", "map_tie_aware", "queries_without_hit", "chance",
    )  # fmt: skip
    return {
        "run": config.run,
        "report": artefact.header_uri,
        "page": page,
        **{name: getattr(report, name) for name in told},
        "precision_within_2": report.precision_within(2),
        "empty_within_2": report.empty_within(2),
        **beside,
        "seconds": round(time.monotonic() - started, 3),
    }


def _encoded_queries(config: EvaluateConfig, store: CodeStore, info: BundleInfo) -> CodeStore:
    """The store of the queries' codes; encodes those that are missing."""
    made_by = store.lineage["model_sha256"]
    if made_by != info.sha256:
        raise LineageMismatch(
            f"{store.uri} was encoded with model {made_by[:12]}, but {config.artefacts.model.uri} is "
            f"{info.sha256[:12]}; encode the database with this model, or give the model that made the codes"
        )
    from hashnet.encoding import code_lineage  # imports torch

    device, compile = _device_of(store)
    default_rows = code_lineage(info, store.lineage.get("engine", ""))["batch_rows"]
    batch_rows = store.lineage.get("batch_rows", default_rows)
    encode_database(
        EncodeConfig(
            run=config.run,
            model=config.artefacts.model.uri,
            out=config.artefacts.query_codes.uri,
            output=BOTH,
            features_dtype="float32",
            split="query",
            device=device,
            compile=compile,
            batch_rows=batch_rows if batch_rows != default_rows else None,
            max_bad_fraction=config.max_bad_fraction,
            base_uri=config.base_uri,
        )
    )
    return config.artefacts.query_codes.open()


def _imported_queries(config: EvaluateConfig) -> CodeStore:
    """The store of the queries' codes that was imported, as the database's: no model here makes them."""
    artefact = config.artefacts.query_codes
    if not artefact.exists():
        raise DataError(
            f"{config.artefacts.codes.uri} holds codes without a model, and {artefact.uri} no codes of "
            f"queries; import them with: hashnet dataset codes queries.parquet --out {artefact.uri}"
        )
    return artefact.open()


def _refuse_other_queries(store: CodeStore, queries: CodeStore) -> None:
    if queries.n_bits != store.n_bits:
        raise LineageMismatch(
            f"{queries.uri} has {queries.n_bits} bits, {store.uri} {store.n_bits}; make both with one model"
        )
    if queries.n_classes != store.n_classes:
        raise LineageMismatch(
            f"{queries.uri} has {queries.n_classes} classes, {store.uri} {store.n_classes}; queries and "
            "database must come from one manifest, or be imported with the same --class-names or --n-classes"
        )
    if not len(queries):
        raise DataError(
            f"{queries.uri} holds no queries; put some rows of the manifest into the split `query`"
        )


def _query_logits(config: EvaluateConfig, queries: CodeStore) -> np.ndarray:
    """The queries' logits, float32 (q, n_bits), from the features that were stored with their codes."""
    from hashnet.encoding import Encoder  # imports torch

    features = Run(config.run).store("features", "query").open()
    if features.ids().tolist() != queries.ids().tolist():
        raise LineageMismatch(
            f"{features.uri} and {queries.uri} are of other rows; delete both and run again"
        )
    # The driver's machine need not have the GPU that encoded them; a head is a product or two.
    return Encoder.load(config.artefacts.model.uri, engine="cpu-eager").head(features.features())


def _evaluate_neighbours(
    config: EvaluateConfig, store: CodeStore, queries: CodeStore, page_name: str = "report.html"
) -> dict[str, Any]:
    """Measures and draws, by vectors alone, whether the nearest codes are the nearest vectors."""
    from hashnet.reports import write_neighbour_report

    made_from = {"database": store.sha256, "queries": queries.sha256, "seed": config.seed}
    if not config.artefacts.manifest.exists():
        raise DataError(
            f"{config.run} has no manifest with the vectors of its codes, which recall is measured by; "
            "add it, or give labels to the codes of database and queries (hashnet dataset codes --label)"
        )
    if config.artefacts.manifest.open(verify=False).modality == "image":  # the vectors are the backbone's
        _encode_database_features(config)  # the queries' were written with their codes
    page = _in_a_task(
        write_neighbour_report, config.artefacts, made_from, config.seed, page_name, config.base_uri
    )
    artefact = config.artefacts.neighbours
    report = artefact.open()
    told = (
        "n_queries", "n_database", "n_bits", "k", "within", "recall", "recall_interval", "asymmetric",
        "correlation",
    )  # fmt: skip
    return {
        "run": config.run,
        "report": artefact.header_uri,
        "page": page,
        **{name: getattr(report, name) for name in told},
    }


def _encode_database_features(config: EvaluateConfig) -> None:
    """Writes RUN/features, or what is missing there, in the type it was begun with."""
    stored = Run(config.run).store("features", "database")
    encode = EncodeConfig(
        run=config.run, model=config.artefacts.model.uri, output="features", base_uri=config.base_uri
    )
    encode_database(replace(encode, features_dtype=stored.open().dtype) if stored.exists() else encode)


def _device_of(store: CodeStore) -> tuple[str, bool | None]:
    """(device, compile) that encode queries as the database was, so that codes agree to the bit.

    Open where the database was encoded on a GPU, which the queries' machine may not have.
    """
    made_by = store.lineage.get("engine", "")
    compile = {"cpu-eager": False, "cpu-compiled": True}.get(made_by)
    return "cpu" if made_by.startswith("cpu") else "auto", compile


def _query_labels(queries: CodeStore) -> LabelSets:
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
        few = len(evaluation.codes) * len(evaluation.store) < LOCAL_PAIRS and config.device != "cuda"
        run = count_here if few else run_ranges
        with Progress(len(ranges), "query ranges", "evaluate", done=len(ranges) - len(todo)) as progress:
            for span, blocks in run(evaluation, todo, groups):
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


def _write_trec(config: EvaluateConfig, store: CodeStore, queries: CodeStore) -> None:
    """The first k items of every query, and every relevant item, in the text format of TREC."""
    folder = storage.join(config.artefacts.report.uri, "trec")
    log.info("writing the rankings of %s queries to %s", f"{len(queries):,}", folder)
    arrays = (queries.codes(), queries.labels(), store.codes(), store.labels(), config.k)
    write_trec(folder, *arrays, query_ids=queries.ids(), database_ids=store.ids(), seed=config.seed)


def _draw(config: EvaluateConfig, report: EvalReport) -> str:
    """Draws the report; returns the uri of its page."""
    from hashnet.reports import RunSources, write_run_report

    sources = RunSources(config.artefacts, config.base_uri, tuple(config.beside))
    page = _in_a_task(write_run_report, report.to_dict(), sources, config.artefacts.report.uri)
    config.artefacts.report.list_page()
    return page


def _in_a_task(function: Callable[..., str], *arguments: Any) -> str:
    """Calls the function. In a cluster a task does: the driver's node may have no CPU to spare."""
    if not os.environ.get("RAY_ADDRESS"):
        return function(*arguments)
    import ray

    connection.connect()
    return ray.get(capacity.task(function).remote(*arguments))


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated: queries against a code store, and how; ``device`` counts the distances."""

    store: CodeStore
    codes: np.ndarray  # uint8 (q, n_bits // 8), of the queries
    labels: LabelSets  # of the queries
    k: int
    seed: int
    device: str
    logits: np.ndarray | None = None  # float32 (q, n_bits), of the queries, for the asymmetric ranking

    def queries(self, span: Span) -> tuple[np.ndarray, LabelSets, np.ndarray | None]:
        """Codes, labels and logits of a range of queries."""
        some = slice(*span)
        logits = None if self.logits is None else self.logits[some]
        return self.codes[some], self.labels.rows(*span), logits


def query_ranges(n_queries: int, k: int) -> list[Span]:
    """Whole blocks of queries whose candidate keys fill about RANGE_BYTES; they depend on k alone."""
    block = query_block_size(k)
    step = max(1, RANGE_BYTES // (8 * k * block)) * block
    return [(first, min(first + step, n_queries)) for first in range(0, n_queries, step)]


def shard_groups(store: CodeStore, rows: int) -> list[tuple[int, ...]]:
    """Groups of neighbouring shards with about ``rows`` rows together."""
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    total = 0
    for place, shard in enumerate(store.shards):
        if group and total + shard.rows > rows:
            groups.append(tuple(group))
            group, total = [], 0
        group.append(place)
        total += shard.rows
    return [*groups, tuple(group)] if group else groups


def count_here(
    evaluation: Evaluation, ranges: list[Span], groups: list[tuple[int, ...]]
) -> Iterator[tuple[Span, list[QueryMeasures]]]:
    """What ``run_ranges`` yields, computed by this process: for so few that starting tasks takes longer."""
    store, k, seed = evaluation.store, evaluation.k, evaluation.seed
    for span in ranges:
        queries = evaluation.queries(span)
        parts = [_count(store.uri, store.sha256, group, seed, "cpu", queries, k) for group in groups]
        yield span, _finish(k, *parts)


def run_ranges(
    evaluation: Evaluation, ranges: list[Span], groups: list[tuple[int, ...]]
) -> Iterator[tuple[Span, list[QueryMeasures]]]:
    """(range, its blocks of measures) as they are done, with a few ranges in flight at a time."""
    import ray

    connection.connect()
    store, k, seed, device = evaluation.store, evaluation.k, evaluation.seed, evaluation.device
    gpu = device == "cuda"
    size = {"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0}
    counters = min(len(ranges) * len(groups), capacity.workers_that_fit(size)) or 1
    capacity.require("evaluate", [Need("counter", counters, size, at_least=1, fix="use device=cpu")])
    capacity.require_shared(storage.parent_folder(store.uri))
    count = capacity.task(_count, gpu=gpu)
    merge_some, finish = capacity.task(_merge), capacity.task(_finish)

    def start(span: Span) -> Any:
        queries = ray.put(evaluation.queries(span))
        parts = [count.remote(store.uri, store.sha256, group, seed, device, queries, k) for group in groups]
        while len(parts) > FAN_IN:
            parts = [merge_some.remote(k, *parts[i : i + FAN_IN]) for i in range(0, len(parts), FAN_IN)]
        return finish.remote(k, *parts)

    at_once = max(2, int(2 * connection.resources().get("CPU", 1)) // len(groups))
    waiting = list(ranges)
    running: dict[Any, Span] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            span = waiting.pop(0)
            running[start(span)] = span
        for done in ray.wait(list(running), num_returns=1)[0]:
            yield running.pop(done), ray.get(done)


def _count(
    uri: str, sha256: str, group: tuple[int, ...], seed: int, device: str, queries: Any, k: int
) -> QueryCounts:
    """Task: counts and candidate keys of a range of queries against a group of shards."""
    codes, labels, logits = queries
    shard, scored = _load_group(uri, sha256, group, seed, device)
    counts: QueryCounts = shard.count(codes, labels, k, threads=1)
    if logits is None:
        return counts
    return replace(counts, ranking=scored.rank(logits, labels, k, threads=1))


@lru_cache(maxsize=2)  # tasks of successive ranges on one worker share what was read
def _load_group(uri: str, sha256: str, group: tuple[int, ...], seed: int, device: str) -> Any:
    store = CodeStore.open(uri)
    if store.sha256 != sha256:
        raise LineageMismatch(f"{uri} changed while it was being evaluated; run the same command again")
    table = pa.concat_tables(store.tables(["row_id", "code", "labels"], group))
    labels = LabelSets.from_arrow(table["labels"], store.n_classes or 0)
    codes = binary_matrix(table["code"], store.n_bits // 8)
    ids = table["row_id"].to_numpy()
    return build_shard(codes, labels, ids, seed, device), ScoreShard.build(codes, labels, ids, seed)


def _merge(k: int, *parts: QueryCounts) -> QueryCounts:
    """Task: partial results of the same queries, merged into one."""
    return QueryCounts.merge(parts, k)


def _finish(k: int, *parts: QueryCounts) -> list[QueryMeasures]:
    """Task: the measures of a range of queries, in blocks of fixed size."""
    found = QueryCounts.merge(parts, k)
    step = query_block_size(k)
    starts = range(0, len(found.keys), step)
    return [QueryMeasures.from_counts(found.rows(first, first + step), k) for first in starts]
