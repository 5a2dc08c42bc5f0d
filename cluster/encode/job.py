"""Encodes the database rows of a manifest into a code store, on all nodes of a Ray cluster.

Progress is on disk: the same job started again encodes only the shards that have no record, and does not
start Ray when none is missing. ``hashnet.store.commit`` has the protocol, ``cluster.encode.pipeline`` the
Ray Data pipelines.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from cluster.encode import pipeline, summary
from cluster.runtime import capacity, connection, reraise_hashnet_error, telemetry
from hashnet.data import Manifest
from hashnet.encoding import (
    BOTH,
    EncodeTask,
    RowReader,
    ShardCollector,
    Target,
    feature_tasks,
    picture_tasks,
    repair_tasks,
    shard_tasks,
)
from hashnet.errors import ClusterError, ConfigError, LineageMismatch, ModelError
from hashnet.io import REQUIRED, Progress, Renamed, counted, key, storage
from hashnet.models import BundleInfo
from hashnet.run import Run
from hashnet.store import (
    ROWS_PER_SHARD,
    CodesArtefact,
    PlannedPart,
    ShardRange,
    StorePlan,
    StoreWriter,
    check_plan,
    read_plan,
    read_quarantine,
    read_records,
)

if TYPE_CHECKING:
    from hashnet.encoding import LocalEncoder  # imports torch

log = logging.getLogger(__name__)

LOCAL_ROWS = 2048  # pictures that this process computes rather than start actors: half a minute on two cores
LOCAL_FEATURE_ROWS = 100_000
ATTEMPTS = 3  # at shards whose rows were lost with a committer's node
FEATURE_SHARD_BYTES = 64 << 20  # a shard of 4096-d features would otherwise be 134 MB


@dataclass(frozen=True)
class EncodeConfig:
    RENAMED: ClassVar = {
        "engine": Renamed("device", {"cpu-eager": "cpu compile=false", "cpu-compiled": "cpu compile=true"})
    }

    run: str = key(REQUIRED, "run folder, a path or a URI; its model/ encodes", path=True)
    manifest: str | None = key(
        None, "manifest to encode; it is copied into the run (none: RUN/manifest.parquet)", path=True
    )
    model: str | None = key(None, "model bundle (none: RUN/model)", path=True)
    out: str | None = key(None, "output folder (none: RUN/codes or RUN/features)", path=True)
    output: str = key(
        "codes",
        "packed codes, the backbone's features, or both from one pass, for rescoring",
        choices=("codes", "features", BOTH),
    )
    features_dtype: str = key(
        "float16", "how features are stored; int8 has a scale per row", choices=("float16", "int8", "float32")
    )
    split: str = key("database", "which rows to encode", choices=("database", "query", "train"))
    n_bits: int | None = key(None, "refuse a model with another code length", low=8)
    rows_per_shard: int | None = key(
        None, "rows per shard (none: as in the shards that are there, else 8192)", low=1
    )
    max_bad_fraction: float = key(
        0.01,
        "fail at the end if more than this share of the rows is bad; a single bad row is allowed unless 0",
        low=0,
        high=1,
    )
    only_failed: bool = key(False, "try the quarantined rows again; those that succeed become an extra shard")
    dry_run: bool = key(False, "print the plan and stop")
    device: str = key(
        "auto",
        "where the model runs; auto: on GPUs where the cluster has them",
        choices=("auto", "cpu", "cuda"),
    )
    compile: bool | None = key(
        None,
        "on the CPU: true compiles the model with torch, false runs it as it is (none: fused convolutions)",
    )
    decode: str | None = key(
        None,
        "nvjpeg: GPUs decode plain JPEGs, too; their pixels, and so some bits, are not those of training "
        "(none: as in the shards that are there, else the CPU)",
        choices=("nvjpeg",),
    )
    num_actors: int | None = key(None, "encoder actors (none: one per GPU, else one per CPU)", low=1)
    gpus_per_actor: float | None = key(
        None, "GPUs that one actor takes; 0.5 lets two share one, 0 means device=cpu (none: 1)", low=0
    )
    batch_rows: int | None = key(
        None,
        "rows of the model's fixed batch; fewer where a GPU runs out of memory (none: 256 pictures on a GPU, "
        "32 on a CPU)",
        low=1,
    )
    chunk_rows: int | None = key(
        None, "pictures per chunk sent from decoders to encoders (none: 32 MB of pixels)", low=1
    )
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)
    cache: str | None = key(None, "folder of kept backbone features (none: RUN/cache)", path=True)

    def __post_init__(self) -> None:
        mistakes = []
        if self.only_failed and self.dry_run:
            mistakes.append("only_failed and dry_run cannot be combined")
        if self.device == "cuda" and self.compile:
            mistakes.append("compile=true is for the CPU: leave it out with device=cuda")
        if self.decode and (self.engine_device == "cpu" or self.compile is not None):
            mistakes.append(
                "decode=nvjpeg is for GPUs: leave it out with device=cpu, compile or gpus_per_actor=0"
            )
        if self.device == "cuda" and self.gpus_per_actor == 0:
            mistakes.append("gpus_per_actor=0 contradicts device=cuda: leave one of them out")
        if self.device == "cpu" and self.gpus_per_actor:
            mistakes.append(
                f"gpus_per_actor={self.gpus_per_actor:g} has no meaning with device=cpu: leave it out"
            )
        if mistakes:
            raise ConfigError(mistakes)

    @property
    def artefacts(self) -> Run:
        """The run, with the model that was given by key at its own place."""
        return Run(self.run, model=self.model)

    @property
    def engine_device(self) -> str:
        """``device``, where actors that take no GPU mean the CPU."""
        return "cpu" if self.gpus_per_actor == 0 else self.device

    @property
    def cache_folder(self) -> str:
        return self.cache or Run(self.run).cache

    @property
    def target(self) -> CodesArtefact:
        """The store that is written; the one of codes, where both are."""
        output = self.output.partition(",")[0]
        return CodesArtefact(self.out, output) if self.out else Run(self.run).store(output, self.split)


def encode_database(config: EncodeConfig) -> dict[str, Any]:
    """Writes the code (or feature) store of ``config``; returns the summary that the job prints."""
    info = config.artefacts.model.info()
    if config.n_bits is not None and config.n_bits != info.n_bits:
        raise LineageMismatch(
            f"n_bits={config.n_bits} was requested, but {config.artefacts.model.uri} has {info.n_bits}"
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
    finished = [
        summary.finish(target.uri, target.plan, config.max_bad_fraction, job.rows_now, seconds, job.workers)
        for target in job.targets
    ]
    return finished[0] | ({"features": finished[1]} if len(finished) > 1 else {})


def requested_engine(device: str, compile: bool | None, begun: str | None) -> str:
    """The engine that the plan of a store names: where the request leaves it open, the one it was begun with.

    A device (auto, cpu) where neither decides: a worker then chooses. ``begun`` is the engine of a store
    that has shards already; a request that contradicts it is named exactly, and refused by the store.
    """
    on_cpu = {True: "cpu-compiled", False: "cpu-eager", None: "cpu"}[compile]
    if begun is None:
        return {"auto": "auto", "cpu": on_cpu, "cuda": "cuda"}[device]
    same_device = device in ("auto", begun.partition("-")[0])
    if same_device and (compile is None or begun in ("cuda", "cuda-nvjpeg", on_cpu)):
        return begun
    return "cuda" if device == "cuda" else on_cpu


def _manifest(config: EncodeConfig, info: BundleInfo) -> Manifest:
    copy, model = config.artefacts.manifest.uri, config.artefacts.model.uri
    if config.manifest is None:
        manifest = Manifest.open(copy)
    else:
        manifest = Manifest.open(config.manifest)
        if not config.dry_run:
            manifest = manifest.copy_to(copy)
    if manifest.modality != info.modality:
        raise LineageMismatch(
            f"{manifest.uri} holds {manifest.modality} rows, but {model} takes {info.modality}"
        )
    if info.modality == "features" and manifest.n_features != info.n_features:
        raise LineageMismatch(
            f"{manifest.uri} has features of {manifest.n_features} values, but {model} takes "
            f"{info.n_features}"
        )
    if manifest.count(config.split) == 0:
        there = ", ".join(f"{n:,} {split}" for split, n in manifest.splits.items()) or "none"
        flag = {"query": "--n-query", "train": "--n-train"}.get(config.split, "--all-in")
        raise ConfigError(
            f"{manifest.uri} has no {config.split} rows (its rows by split: {there}); "
            f"make a manifest that has some with {flag} of hashnet dataset"
        )
    return manifest


class _Job:
    """One run of the job: the plan of its store, the shards that are there, the shards that are missing."""

    def __init__(self, config: EncodeConfig, info: BundleInfo, manifest: Manifest) -> None:
        self.config, self.info, self.manifest = config, info, manifest
        self.uri, self.run = config.target.uri, telemetry.run_name(config.run)
        self.found = read_plan(self.uri)
        self._width: int | None = None  # of a feature
        self.plan = check_plan(self.uri, self._requested_plan())
        self.records = read_records(self.uri)
        there = [set(self.records), *(set(read_records(target.uri)) for target in self.targets[1:])]
        self.todo = [
            shard
            for shard in self.plan.ranges()
            if not all(
                target.own(shard).name in names for target, names in zip(self.targets, there, strict=True)
            )
        ]
        self.rows_now = 0
        self.workers: set[str] = set()
        self.committed: set[str] = set()  # shards, by this run

    @property
    def targets(self) -> list[Target]:
        """The stores that are written: one, or codes and their features, with the same ranges of rows."""
        targets = [Target(self.uri, self.plan)]
        if self.config.output == BOTH:
            uri = Run(self.config.run).store("features", self.config.split).uri
            width, dtype = self._feature_width(), self.config.features_dtype
            plan = replace(self.plan, output="features", width=width, dtype=dtype)
            targets.append(Target(uri, check_plan(uri, plan)))
        return targets

    def _requested_plan(self) -> StorePlan:
        """The plan of the configuration; what it leaves open is as in the plan that the folder has."""
        config, info, found = self.config, self.info, self.found
        begun = found.lineage.get("engine") if found is not None else None
        engine = requested_engine(config.engine_device, config.compile, begun)
        if config.decode:
            engine = "cuda-nvjpeg"
        width = info.n_bits if config.output != "features" else self._feature_width()
        begun_before = found is not None and found.dtype is None  # by a version that stored float32 lists
        rows = config.rows_per_shard or (found.rows_per_shard if found else None)
        if rows is None:
            rows = ROWS_PER_SHARD
            if config.output == "features":
                rows = min(rows, max(FEATURE_SHARD_BYTES // (4 * width), 256))
        return StorePlan(
            output=config.output.partition(",")[0],
            width=width,
            rows_per_shard=rows,
            parts=tuple(
                PlannedPart(part.name, part.sha256, part.splits.get(config.split, 0))
                for part in self.manifest.parts
            ),
            split=config.split,
            n_classes=self.manifest.n_classes,
            lineage=self._lineage(engine),
            columns=self.manifest.columns,
            dtype=None if config.output != "features" or begun_before else config.features_dtype,
        )

    def _lineage(self, engine: str) -> dict[str, Any]:
        from hashnet.encoding import code_lineage  # imports torch, which takes seconds

        rows = self.config.batch_rows
        if rows is None and self.found is not None and self.found.lineage.get("engine") == engine:
            rows = self.found.lineage.get("batch_rows")
        return code_lineage(self.info, engine, rows)

    def _feature_width(self) -> int:
        if self._width is None:
            found = self.found
            if found and found.output == "features" and found.lineage.get("model_sha256") == self.info.sha256:
                self._width = found.width
            else:
                self._width = self.config.artefacts.model.open()[0].spec.n_features
        return self._width

    def encode(self) -> None:
        """Encodes the shards that have no record yet."""
        if (local := self._local_encoder(whole := shard_tasks(self.todo))) is not None:
            self._begin()
            self._follow(self._local(local, whole, self.todo), self.todo)
            return
        settings = self._start(sum(map(len, self.todo)), repair=False)
        pipeline.verify_parts(self.manifest, {shard.part.name for shard in self.todo})
        self._begin()
        n_cpus = int(connection.resources().get("CPU", 1))

        def tasks_of(shards: list[ShardRange]) -> Iterator[EncodeTask]:
            if self.info.modality == "features":
                return feature_tasks(shards, self.manifest)
            return picture_tasks(shards, settings.chunk_rows, n_cpus)

        self._follow(self._on_actors(settings, tasks_of, self.todo), self.todo)

    def _begin(self) -> None:
        for target in self.targets:
            StoreWriter(target.uri, target.plan).begin()

    def retry(self) -> None:
        """Encodes the quarantined rows again; those that succeed become extra shards."""
        if self.todo:
            raise ConfigError(
                f"{len(self.todo)} of {self.plan.n_shards} shards of {self.uri} are not encoded yet; "
                "run without only_failed first"
            )
        row_ids = read_quarantine(self.uri, self.records)["row_id"].to_pylist()
        if not row_ids:
            log.info("the quarantine of %s is empty", self.uri)
            return
        repaired = [record.name for record in self.records.values() if record.repair]
        first = 1 + max((int(name.rpartition("-")[2]) for name in repaired), default=-1)
        tasks = repair_tasks(self.plan, row_ids, first, None)
        shards = [task.shards[0] for task in tasks]
        if (local := self._local_encoder(tasks)) is not None:
            self._follow(self._local(local, tasks, shards, repair=True), shards, repair=True)
            return
        settings = self._start(len(row_ids), repair=True)
        if self.info.modality == "image":
            tasks = repair_tasks(self.plan, row_ids, first, settings.chunk_rows)

        def tasks_of(some: list[ShardRange]) -> Iterator[EncodeTask]:
            names = {shard.name for shard in some}
            return (task for task in tasks if task.shards[0].name in names)

        self._follow(self._on_actors(settings, tasks_of, shards), shards, repair=True)

    def _local_encoder(self, tasks: list[EncodeTask]) -> LocalEncoder | None:
        """What encodes the tasks in this process; None where actors should.

        With few rows to compute, starting actors would take longer than encoding.
        """
        config, engine = self.config, self.plan.lineage["engine"]
        rows, features = sum(task.stop - task.start for task in tasks), self.info.modality == "features"
        most = LOCAL_FEATURE_ROWS if features else LOCAL_ROWS
        kept = not features and storage.exists(config.cache_folder)
        for_actors = config.num_actors or config.chunk_rows or config.batch_rows or config.gpus_per_actor
        if for_actors or not (kept or rows <= most):
            return None
        if os.environ.get("RAY_ADDRESS") and pipeline.gpus_of_an_actor(engine, None):
            return None
        from hashnet.encoding import LocalEncoder, choose_engine

        try:
            engine, _ = choose_engine(engine, self.info.modality, None if "-" in engine else config.compile)
        except ModelError:  # a worker may have what this machine lacks
            return None
        model, info = config.artefacts.model.open()
        summary.refuse_other_model(config.artefacts.model.uri, info.sha256, self.info.sha256)
        reader = RowReader(self.manifest, config.split, config.base_uri)
        local = LocalEncoder(reader, model, info, engine, config.cache_folder)
        if local.missing(tasks) > most:
            return None
        self.plan = check_plan(self.uri, replace(self.plan, lineage=self._lineage(engine)))
        return local

    def _local(
        self, local: LocalEncoder, tasks: list[EncodeTask], shards: list[ShardRange], repair: bool = False
    ) -> Iterator[tuple[int, dict[str, int]]]:
        self.workers.add(f"{socket.gethostname()}/{os.getpid()}")
        collector = ShardCollector(self.targets, shards, repair)
        for task in tasks:
            for table in local.encode(task, self.config.output):
                summary.report_bad_rows(self.run, table)
                yield self._collect(collector, table), summary.bad_reasons(table)

    def _start(self, rows: int, repair: bool) -> pipeline.PipelineSettings:
        """The pipeline's settings, with the cluster's capacity checked and the engine chosen on a worker."""
        connection.connect()
        config, engine = self.config, self.plan.lineage["engine"]
        gpus = pipeline.gpus_of_an_actor(engine, config.gpus_per_actor)
        n_actors = pipeline.reserve_actors(config.num_actors, gpus, rows)
        capacity.require_shared(self.uri)
        try:
            engine = pipeline.engine_of_workers(engine, config.compile, self.info.modality, gpus)
        except ModelError as error:
            if config.device != "auto" or config.compile is not None or config.decode:
                raise
            # With everything left open only the engine that the folder has can fail.
            raise LineageMismatch(f"{self.uri} was begun with engine {engine!r}: {error}") from error
        unusable = not engine.startswith("cuda") and config.gpus_per_actor is None  # torch cannot use them
        if gpus and unusable:
            gpus = 0
            n_actors = pipeline.reserve_actors(config.num_actors, gpus, rows)
        self.plan = check_plan(self.uri, replace(self.plan, lineage=self._lineage(engine)))
        batch_rows = self.plan.lineage["batch_rows"]
        return pipeline.PipelineSettings(
            reader=RowReader(self.manifest, config.split, config.base_uri),
            targets=tuple(self.targets),
            output=config.output,
            model_uri=config.artefacts.model.uri,
            run=self.run,
            repair=repair,
            preprocess=self.info.preprocess,
            chunk_rows=config.chunk_rows or pipeline.chunk_rows(self.info.preprocess, batch_rows),
            n_actors=n_actors,
            gpus_per_actor=gpus,
        )

    def _follow(
        self, encoding: Iterator[tuple[int, dict[str, int]]], shards: list[ShardRange], repair: bool = False
    ) -> None:
        """Follows the (rows, bad rows by reason) of each step of ``encoding``, which commits the shards."""
        rows = sum(len(shard) for shard in shards)
        done = 0 if repair else self.plan.n_rows - rows
        device = self.plan.lineage["engine"]
        unit = "rows" if self.info.modality == "features" else "images"
        with Progress(done + rows, unit, "encode", done=done) as progress:
            bad = 0
            try:
                for n, reasons in encoding:
                    self.rows_now += n
                    bad += sum(reasons.values())
                    progress.update(n, bad=bad, device=device)
                    self._count(n, reasons, progress.rate)
            except Exception as error:
                reraise_hashnet_error(error)

    def _count(self, n: int, reasons: dict[str, int], rate: float) -> None:
        tags = {"run": self.run, "stage": "encode"}
        telemetry.count("images", n - sum(reasons.values()), status="ok", **tags)
        for reason, count in reasons.items():
            telemetry.count("images", count, status=reason, **tags)
        telemetry.gauge("images_per_second", rate, **tags)
        telemetry.gauge("shards_total", self.plan.n_shards, **tags)
        telemetry.gauge("shards_done", len(self.records), **tags)

    def _on_actors(
        self,
        settings: pipeline.PipelineSettings,
        tasks_of: Callable[[list[ShardRange]], Iterator[EncodeTask]],
        shards: list[ShardRange],
    ) -> Iterator[tuple[int, dict[str, int]]]:
        if self.info.modality == "features":
            yield from self._progress(pipeline.run_features(settings, tasks_of(shards)))
            return
        left = shards
        for attempt in range(ATTEMPTS):
            n_committers = pipeline.n_committers(settings.n_actors)  # nodes may have come or gone
            committers = pipeline.start_committers(settings, left, n_committers)
            steps = self._progress(pipeline.run_pictures(settings, tasks_of(left), committers))
            for n, reasons in steps:
                yield (n, reasons) if attempt == 0 else (0, {})  # rows that were lost count once
            # A repair shard without a good row has no record, and is not written.
            left = [] if settings.repair else [shard for shard in left if shard.name not in self.committed]
            if not left:
                return
            log.info("rows of %s were lost with a worker; encoding them again", counted(len(left), "shard"))
        raise ClusterError(
            f"rows of {counted(len(left), 'shard')} did not arrive; run the same command again"
        )

    def _progress(self, steps: Iterator[pipeline.Progressed]) -> Iterator[tuple[int, dict[str, int]]]:
        for step in steps:
            self.workers.add(step.worker)
            self.records |= {record.name: record for record in step.records}
            self.committed |= {record.name for record in step.records}
            yield step.rows, step.reasons

    def _collect(self, collector: ShardCollector, table: pa.Table) -> int:
        """How many rows are new; the collector commits the shards that they complete."""
        before, started = len(collector.records), time.perf_counter()
        n = collector.add(table)
        for record in collector.records[before:]:
            self.records[record.name] = record
            summary.report_commit(self.run, record)
            seconds = time.perf_counter() - started
            telemetry.observe("commit_seconds", seconds, run=self.run, stage="encode")
        return n
