"""Finds the near-duplicates of a run's codes: pairs, clusters, and a report of what would be removed.

The store is cut into blocks, and each pair of blocks is one task. A single task runs in this process on all
cores; more of them run as Ray tasks of one core each. Every task writes its own files, so that a
killed run resumes, and the files are the same for any number of workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.runtime import Need, capacity, connection, telemetry
from hashnet.dedup import (
    SCORES,
    VECTORS,
    BlockRecord,
    BlockTask,
    Duplicates,
    DuplicatesArtefact,
    DuplicatesInfo,
    confirmation,
    finish,
    paired_ids,
    plan_tasks,
    refuse_too_many,
    scores,
)
from hashnet.errors import ConfigError, FormatError, LineageMismatch
from hashnet.io import REQUIRED, Progress, events, key
from hashnet.run import Run
from hashnet.store import CodeStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DedupConfig:
    run: str = key(REQUIRED, "run folder, a path or a URI, with codes/", path=True)
    radius: int = key(
        2, "two items are near-duplicates when their codes differ in at most this many bits", low=0
    )
    keep: str = key(
        "first", "which item of a cluster stays: first (row id), largest (picture), or of a column"
    )
    against: str | None = key(
        None,
        "find what is near another store instead: query (RUN/codes-query), or a path to a code store",
        path=("query",),
    )
    max_pairs: int | None = key(
        None,
        "keep at most this many of the nearest pairs in the files; clusters stay whole (0: only they)",
        low=0,
    )
    confirm: str | None = key(
        None,
        "keep only pairs whose vectors agree (vectors: cosine), or whose float outputs agree with each "
        "other's bits (scores); none: all pairs within the radius",
        choices=(VECTORS, SCORES),
    )
    min_similarity: float | None = key(
        None, "what confirm asks for, at most 1; none: 0.9 for vectors, 0.95 for scores", low=-1, high=1
    )
    codes: str | None = key(None, "code store (none: RUN/codes)", path=True)
    out: str | None = key(None, "output folder (none: RUN/duplicates, with against RUN/leakage)", path=True)
    rows_per_block: int = key(1_000_000, "rows per block; a task joins two of them", low=1)
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)
    figures: bool = key(True, "write the report, with the largest clusters as pictures")

    def __post_init__(self) -> None:
        if self.confirm is not None and self.max_pairs is not None:
            raise ConfigError(["confirm looks at every pair; leave max_pairs out, or use a smaller radius"])
        if self.confirm is not None and self.against not in (None, "query"):
            raise ConfigError(["confirm needs the vectors of both sides; with against only query has them"])

    @property
    def artefacts(self) -> Run:
        """The run, with the artefacts that were given by key at their own places."""
        return Run(self.run, codes=self.codes, duplicates=self.out, leakage=self.out)

    @property
    def output(self) -> DuplicatesArtefact:
        return self.artefacts.duplicates if self.against is None else self.artefacts.leakage


def find_duplicates(config: DedupConfig) -> dict[str, Any]:
    """Writes the duplicates of a run; returns the summary that the job prints."""
    started = time.monotonic()
    store = config.artefacts.codes.open()
    other = _other_store(config, store)
    made_from = {
        "codes": store.sha256,
        "against": None if other is None else other.sha256,
        "radius": config.radius,
        "keep": config.keep,
        "max_pairs": config.max_pairs,
        "rows_per_block": config.rows_per_block,
    }
    if config.confirm is not None:
        made_from |= {"confirm": config.confirm, "min_similarity": config.min_similarity}
    found = _finished(config.output, made_from)
    if found is None:
        found = _find(config, store, other, made_from)
    page = _write_report(config, found) if config.figures else None
    info = found.info
    if info.warning is not None:
        log.warning("%s", info.warning)
    log.info("%s%s", info.sentence, "" if page is None else f"; look at {page}")
    return {
        "run": config.run,
        "duplicates": found.uri,
        "page": page,
        "n_rows": info.n_rows,
        "n_against": info.n_against,
        "radius": info.radius,
        "complete_radius": info.complete_radius,
        "n_pairs": info.n_pairs,
        **({} if info.n_candidates is None else {"n_candidates": info.n_candidates}),
        "n_clusters": info.n_clusters,
        "n_near": info.n_near,
        "n_removed": info.n_removed,
        "seconds": round(time.monotonic() - started, 3),
    }


def _other_store(config: DedupConfig, store: CodeStore) -> CodeStore | None:
    """The store to compare with, which must hold codes of the same model; None without ``against``."""
    if config.against is None:
        return None
    if config.against == "query":
        artefact = config.artefacts.query_codes
        if not artefact.exists():
            raise FormatError(f"{artefact.uri} is not there; {_queries_hint(config)}")
        other = artefact.open()
    else:
        other = CodeStore.open(config.against)
    if other.n_bits != store.n_bits:
        raise LineageMismatch(
            f"{store.uri} has {store.n_bits} bits, {other.uri} {other.n_bits}; encode both with one model"
        )
    models = [one.lineage.get("model_sha256", "") for one in (store, other)]
    if all(models) and models[0] != models[1]:
        raise LineageMismatch(
            f"{store.uri} was encoded with model {models[0][:12]}, {other.uri} with {models[1][:12]}; "
            "distances between codes of two models mean nothing: encode both with the same one"
        )
    return other


def _queries_hint(config: DedupConfig) -> str:
    """How the run gets codes of queries."""
    manifest, codes = config.artefacts.manifest, config.artefacts.query_codes
    if not manifest.exists():  # codes from elsewhere
        return f"import them with: hashnet dataset codes queries.parquet --out {codes.uri}"
    if not manifest.open(verify=False).count("query"):
        return f"{manifest.uri} has no queries, either: make one with --n-query of hashnet dataset"
    return f"jobs/evaluate.py run={config.run} encodes the queries"


def _finished(artefact: DuplicatesArtefact, made_from: dict[str, Any]) -> Duplicates | None:
    """What is there already if it was made from exactly this; else None."""
    if not artefact.exists():
        return None
    found = artefact.open()
    if found.lineage != made_from:
        return None
    log.info("%s is up to date", artefact.header_uri)
    return found


def _find(
    config: DedupConfig, store: CodeStore, other: CodeStore | None, made_from: dict[str, Any]
) -> Duplicates:
    tasks = plan_tasks(
        store, other, config.radius, config.max_pairs, config.rows_per_block, config.output.uri
    )
    records = {task.name: record for task in tasks if (record := task.record()) is not None}
    todo = [task for task in tasks if task.name not in records]
    if todo:
        refuse_too_many(store, other, tasks)
    tags = {"stage": "dedup", "run": telemetry.run_name(config.run)}
    with Progress(len(tasks), "pairs of blocks", "dedup", done=len(records)) as progress:
        for record in _run_tasks(todo):
            records[record.name] = record
            progress.update(1, pairs=sum(one.n_kept for one in records.values()))
            events.event("blocks joined", blocks=record.name, pairs=record.n_kept, **tags)
    info = DuplicatesInfo(
        radius=config.radius,
        complete_radius=config.radius,
        n_rows=len(store),
        n_against=None if other is None else len(other),
        n_bits=store.n_bits,
        keep=config.keep,
        confirm=config.confirm,
    )
    manifest = config.artefacts.manifest
    opened = manifest.open(verify=False) if manifest.exists() else None
    done = [records[task.name] for task in tasks]
    confirm = None
    if config.confirm is not None:
        left, right = paired_ids(config.output.uri, done)
        ids = (left, right) if other is not None else (np.union1d(left, right), None)
        confirm = confirmation(config.artefacts, config.confirm, *ids, config.min_similarity)
    return finish(
        config.output,
        info,
        done,
        config.max_pairs,
        made_from,
        lambda ids: scores(config.keep, opened, ids, config.base_uri),
        confirm,
    )


def _run_tasks(tasks: list[BlockTask]) -> Iterator[BlockRecord]:
    """The records of the tasks as they are done."""
    if len(tasks) <= 1:
        yield from (task.run() for task in tasks)
        return
    import ray

    size = {"CPU": 1.0}
    workers = min(len(tasks), capacity.workers_that_fit(size)) or 1
    capacity.require("dedup", [Need("join", workers, size, at_least=1)])
    capacity.require_shared(tasks[0].out)
    remote = ray.remote(_run_task).options(num_cpus=1, max_retries=3)
    waiting = list(tasks)
    running: list[Any] = []
    at_once = max(2, 2 * int(connection.resources().get("CPU", 1)))
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(remote.remote(waiting.pop(0)))
        done, running = ray.wait(running, num_returns=1)
        yield from ray.get(done)


def _run_task(task: BlockTask) -> BlockRecord:
    return task.run(threads=1)


def _write_report(config: DedupConfig, found: Duplicates) -> str:
    """The uri of the page."""
    from hashnet.reports import write_dedup_report

    return write_dedup_report(found, config.artefacts, config.base_uri)
