"""Encode the database rows of a manifest into a code store, on all of a Ray cluster.

What is done is on disk: a run that is started again encodes only the shards without a record, and
none when all are there (Ray is not even started). See ``hashnet.store.commit`` for the protocol and
``cluster.encode.stages`` for the pipelines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.compute as pc

from cluster.encode import setup as setup
from cluster.encode import stages as stages
from cluster.encode import summary as summary
from cluster.runtime import connection, reraise_hashnet_error, telemetry
from hashnet.data import Manifest
from hashnet.encoding import (
    EncodeTask,
    RowReader,
    ShardCollector,
    code_lineage,
    feature_tasks,
    picture_tasks,
    reasons_of,
    repair_tasks,
)
from hashnet.errors import ConfigError, LineageMismatch, ModelError, StoreError
from hashnet.io import REQUIRED, Progress, key, storage
from hashnet.models import BundleInfo, bundle_info, load_bundle
from hashnet.store import ROWS_PER_SHARD, PlannedPart, ShardRange, StorePlan, commit
from hashnet.store import plan as plans

log = logging.getLogger(__name__)

FEATURE_SHARD_BYTES = 64 << 20  # a shard of 4096-d features would otherwise be 134 MB


ENGINES = (
    "auto",
    "cuda",
    "cpu-compiled",
    "cpu-eager",
)  # those of hashnet.encoding.engines, which loads torch


@dataclass(frozen=True)
class EncodeConfig:
    run: str = key(REQUIRED, "run folder: an absolute path or a URI; its model/ encodes", path=True)
    manifest: str | None = key(
        None, "manifest to encode, copied into the run (default: RUN/manifest.parquet)", path=True
    )
    model: str | None = key(None, "model bundle (default: RUN/model)", path=True)
    out: str | None = key(None, "output folder (default: RUN/codes or RUN/features)", path=True)
    output: str = key("codes", "packed codes, or the backbone's features", choices=("codes", "features"))
    split: str = key("database", "which rows", choices=("database", "query", "train"))
    n_bits: int | None = key(None, "refuse a model with another code length", low=8)
    rows_per_shard: int | None = key(None, "rows of a shard (default: as begun, else 8192)", low=1)
    max_bad_fraction: float = key(
        0.01,
        "share of bad rows above which the job fails at its end; one is put up with unless 0",
        low=0,
        high=1,
    )
    only_failed: bool = key(False, "retry the quarantine; rows that can be encoded now become an extra shard")
    dry_run: bool = key(False, "print the plan and stop")
    engine: str = key("auto", "how the model runs", choices=ENGINES)
    num_actors: int | None = key(None, "encoder actors (default: one a GPU, else one a CPU)", low=1)
    gpus_per_actor: float | None = key(
        None, "GPUs of an actor, 0.5 lets two share one (default: 1 where there are any)", low=0
    )
    chunk_rows: int | None = key(None, "pictures that move together (default: 32 MB of pixels)", low=1)
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)

    @property
    def model_uri(self) -> str:
        return self.model or storage.join(self.run, "model")

    @property
    def out_uri(self) -> str:
        name = self.output if self.split == "database" else f"{self.output}-{self.split}"
        return self.out or storage.join(self.run, name)


def encode_database(config: EncodeConfig) -> dict[str, Any]:
    """Makes the code (or feature) store of ``config``; returns the summary that the job prints."""
    if config.only_failed and config.dry_run:
        raise ConfigError("only_failed and dry_run cannot be combined")
    info = bundle_info(config.model_uri)
    if config.n_bits is not None and config.n_bits != info.n_bits:
        raise LineageMismatch(
            f"n_bits={config.n_bits} was asked for, but {config.model_uri} has {info.n_bits}"
        )
    job = _Job(config, info, _manifest(config, info))
    if config.dry_run:
        return summary.describe(job.uri, job.plan, job.records, info)
    started = time.monotonic()
    if config.only_failed:
        job.retry()
    elif job.todo:
        job.encode()
    seconds = time.monotonic() - started
    return summary.finish(job.uri, job.plan, config.max_bad_fraction, job.rows_now, seconds, job.workers)


def _manifest(config: EncodeConfig, info: BundleInfo) -> Manifest:
    copy = storage.join(config.run, "manifest.parquet")
    if config.manifest is None:
        manifest = Manifest.open(copy)
    else:
        manifest = Manifest.open(config.manifest)
        if not config.dry_run:
            manifest = manifest.copy_to(copy)
    if manifest.modality != info.modality:
        raise LineageMismatch(
            f"{manifest.uri} holds {manifest.modality} rows, but {config.model_uri} takes {info.modality}"
        )
    if info.modality == "features" and manifest.n_features != info.n_features:
        raise LineageMismatch(
            f"{manifest.uri} has features of {manifest.n_features} values, but {config.model_uri} takes "
            f"{info.n_features}"
        )
    if manifest.count(config.split) == 0:
        raise ConfigError(f"{manifest.uri} has no {config.split} rows; its splits are {manifest.splits}")
    return manifest


class _Job:
    """One run of encoding: what is planned, what is there, what is missing."""

    def __init__(self, config: EncodeConfig, info: BundleInfo, manifest: Manifest) -> None:
        self.config, self.info, self.manifest = config, info, manifest
        self.uri, self.run = config.out_uri, telemetry.run_name(config.run)
        self.found = plans.read_plan(self.uri)
        self.plan = plans.check_plan(self.uri, self._wanted())
        self.records = commit.read_records(self.uri)
        self.todo = [shard for shard in self.plan.ranges() if shard.name not in self.records]
        self.rows_now = 0
        self.workers: set[str] = set()

    def _wanted(self) -> StorePlan:
        """The plan as asked for; what was left open is taken from what the folder was begun with."""
        config, info, found = self.config, self.info, self.found
        engine = config.engine
        if engine == "auto" and found is not None:
            engine = found.lineage.get("engine", engine)
        width = info.n_bits if config.output == "codes" else self._feature_width()
        rows = config.rows_per_shard or (found.rows_per_shard if found else None)
        if rows is None:
            rows = ROWS_PER_SHARD
            if config.output == "features":
                rows = min(rows, max(FEATURE_SHARD_BYTES // (4 * width), 256))
        return StorePlan(
            output=config.output,
            width=width,
            rows_per_shard=rows,
            parts=tuple(
                PlannedPart(part.name, part.sha256, part.splits.get(config.split, 0))
                for part in self.manifest.parts
            ),
            split=config.split,
            n_classes=self.manifest.n_classes,
            lineage=code_lineage(info, engine),
        )

    def _feature_width(self) -> int:
        if self.found and self.found.lineage.get("model_sha256") == self.info.sha256:
            return self.found.width
        return load_bundle(self.config.model_uri)[0].spec.n_features

    def encode(self) -> None:
        """Encodes the shards that have no record yet."""
        stage = self._start(sum(map(len, self.todo)), repair=False)
        setup.verify_parts(self.manifest, {shard.part.name for shard in self.todo})
        plans.begin(self.uri, self.plan)
        if self.info.modality == "features":
            works = feature_tasks(self.todo, self.manifest)
        else:
            works = picture_tasks(self.todo, stage.chunk_rows, int(connection.resources().get("CPU", 1)))
        self._run(stage, works, self.todo)

    def retry(self) -> None:
        """Encodes what is in quarantine once more; rows that can be encoded now become extra shards."""
        if self.todo:
            raise StoreError(
                f"{len(self.todo)} of {self.plan.n_shards} shards of {self.uri} are not encoded yet; "
                "run without only_failed first"
            )
        row_ids = commit.read_quarantine(self.uri, self.records)["row_id"].to_pylist()
        if not row_ids:
            log.info("the quarantine of %s is empty", self.uri)
            return
        stage = self._start(len(row_ids), repair=True)
        repaired = [record.name for record in self.records.values() if record.repair]
        first = 1 + max((int(name.rpartition("-")[2]) for name in repaired), default=-1)
        step = None if self.info.modality == "features" else stage.chunk_rows
        works = repair_tasks(self.plan, row_ids, first, step)
        self._run(stage, iter(works), list(dict.fromkeys(work.shards[0] for work in works)))

    def _start(self, rows: int, repair: bool) -> stages.Stage:
        """Connects, settles the engine on a worker's machine, and says what goes where."""
        connection.connect()
        config = self.config
        gpus = setup.gpus_wanted(self.plan.lineage["engine"], config.gpus_per_actor)
        n_actors = setup.place(config.num_actors, gpus, rows)
        try:
            engine = setup.settle_engine(
                self.plan.lineage["engine"], config.model_uri, self.info.modality, gpus
            )
        except ModelError as error:
            if config.engine != "auto":
                raise
            begun = self.plan.lineage["engine"]  # "auto" alone never fails: it came with the folder
            raise LineageMismatch(f"{self.uri} was begun with engine {begun!r}: {error}") from error
        if gpus and engine != "cuda" and config.gpus_per_actor is None:  # GPUs that torch cannot use
            gpus = 0
            n_actors = setup.place(config.num_actors, gpus, rows)
        self.plan = plans.check_plan(self.uri, replace(self.plan, lineage=code_lineage(self.info, engine)))
        batch_rows = self.plan.lineage["batch_rows"]
        return stages.Stage(
            source=RowReader(self.manifest, config.split, config.base_uri),
            plan=self.plan,
            uri=self.uri,
            model_uri=config.model_uri,
            run=self.run,
            repair=repair,
            preprocess=self.info.preprocess,
            chunk_rows=config.chunk_rows or stages.chunk_rows(self.info.preprocess, batch_rows),
            n_actors=n_actors,
            gpus=gpus,
        )

    def _run(self, stage: stages.Stage, works: Iterator[EncodeTask], shards: list[ShardRange]) -> None:
        rows = sum(len(shard) for shard in shards)
        done = 0 if stage.repair else self.plan.n_rows - rows
        device = self.plan.lineage["engine"]
        pipeline = self._features if self.info.modality == "features" else self._pictures
        unit = "rows" if self.info.modality == "features" else "images"
        with Progress(done + rows, unit, "encode", done=done) as progress:
            bad = 0
            try:
                for n, reasons in pipeline(stage, works, shards):
                    self.rows_now += n
                    bad += sum(reasons.values())
                    progress.update(n, bad=bad, device=device)
                    self._count(n, reasons, progress.rate)
            except Exception as error:
                reraise_hashnet_error(error)

    def _count(self, n: int, reasons: dict[str, int], rate: float) -> None:
        about = {"run": self.run, "stage": "encode"}
        telemetry.count("images", n - sum(reasons.values()), status="ok", **about)
        for reason, count in reasons.items():
            telemetry.count("images", count, status=reason, **about)
        telemetry.gauge("images_per_second", rate, **about)
        telemetry.gauge("shards_total", self.plan.n_shards, **about)
        telemetry.gauge("shards_done", len(self.records), **about)

    def _pictures(
        self, stage: stages.Stage, works: Iterator[EncodeTask], shards: list[ShardRange]
    ) -> Iterator[tuple[int, dict[str, int]]]:
        collector = ShardCollector(self.uri, self.plan, shards, stage.repair)
        for table in stages.run_pictures(stage, works):
            self.workers.update(pc.unique(table["worker"]).to_pylist())
            before, started = len(collector.records), time.perf_counter()
            n = collector.add(table.drop_columns(["worker"]))
            if len(collector.records) > before:
                seconds = time.perf_counter() - started
                telemetry.observe("commit_seconds", seconds, run=self.run, stage="encode")
            for record in collector.records[before:]:
                self.records[record.name] = record
                stages.tell_commit(self.run, record)
            yield n, stages.bad_reasons(table)
        if collector.unfinished:
            raise StoreError(f"rows of {len(collector.unfinished)} shards did not arrive; run again")

    def _features(
        self, stage: stages.Stage, works: Iterator[EncodeTask], shards: list[ShardRange]
    ) -> Iterator[tuple[int, dict[str, int]]]:
        for records, n, worker in stages.run_features(stage, works):
            self.workers.add(worker)
            self.records |= {record.name: record for record in records}
            yield n, reasons_of(records)
