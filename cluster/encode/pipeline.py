"""The Ray Data pipelines of encoding, with their engine and their actors: each step is one call into
``hashnet.encoding``.

    pictures   EncodeTask → decode tasks (fetch, decode) → encoder actors → committers → records to the driver
    features   EncodeTask → encoder actors that read, encode and commit whole shards → records to the driver

A decode task is a generator: it yields ``chunk_rows`` decoded pictures at a time and pauses while the
encoders are busy. Ray Data bounds the pixels in flight by the object store; only codes wait elsewhere. Actors
and decode tasks may share a core: the operating system keeps all cores busy whichever of the two is slower.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cluster.encode.summary import bad_reasons, refuse_other_model, report_bad_rows, report_commit
from cluster.runtime import Need, capacity, connection, ray_internals, reraise_hashnet_error, telemetry
from hashnet.data import OUT_OF_REACH, Manifest, Preprocess
from hashnet.encoding import (
    EncodeTask,
    RowReader,
    ShardCollector,
    Target,
    commit_table,
    encode_features,
    encode_rows,
    picture_rows,
    reasons_of,
)
from hashnet.errors import HashnetError
from hashnet.store import ShardRange, ShardRecord

if TYPE_CHECKING:
    from hashnet.encoding import Encoder

log = logging.getLogger(__name__)

TASKS_AT_ONCE = 4096  # given to Ray Data at once, so that a database of any size fits in the driver's memory
RETRIES = 12  # of a task whose worker cannot connect to the storage: about four minutes
CHUNK_BYTES = 32 << 20  # of pixels in one chunk …
CHUNK_ROWS = (64, 512)  # … and the fewest and most pictures in it
# An actor books next to no CPU, so that decoding always finds room: even on a node with one CPU to which the
# actors of all lost nodes have moved. More than 0 keeps it off a head without CPUs.
ACTOR_CPUS, DECODE_CPUS = 0.001, 0.95
ROWS_PER_NEW_ACTOR = 65_536  # about a minute of GPU time, as long as its node takes to start
MAX_NEW_ACTORS = 256  # on pools without a maximum; num_actors may request more


def gpus_of_an_actor(engine: str, gpus_per_actor: float | None) -> float:
    """What one encoder actor takes of a GPU: 0 on the CPU, or where no node has a GPU or may get one."""
    on_gpus = engine == "auto" or engine.startswith("cuda")
    if not on_gpus or not capacity.workers_that_fit({"GPU": 1}, include_addable=True):
        return 0
    return gpus_per_actor or 1


def engine_of_workers(engine: str, compile: bool | None, modality: str, gpus: float) -> str:
    """The name of the engine that ``engine`` comes to on the workers; on GPUs one of them is asked."""
    from hashnet.encoding import choose_engine  # imports torch

    if not gpus:
        return choose_engine("cpu" if engine == "auto" else engine, modality, compile)[0]
    import ray

    # No more CPU than an actor's, which is known to fit.
    choose = ray.remote(num_cpus=ACTOR_CPUS, num_gpus=gpus, max_retries=3)(choose_engine)
    choice = choose.remote(engine, modality, compile)
    while not ray.wait([choice], timeout=capacity.LINE_EVERY_S)[0]:
        log.info("waiting for room: a worker of %s, to choose the engine", capacity.describe({"GPU": gpus}))
    try:
        name, why = ray.get(choice)
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
    log.info("engine: %s (%s)", name, why)
    return name


def reserve_actors(num_actors: int | None, gpus: float, rows: int) -> int:
    """How many actors encode ``rows``: ``num_actors``, else as many as the GPUs hold, else one per CPU.

    Checks the cluster's capacity, and waits for the first GPU where the autoscaler must add it; actors for
    GPUs that come later join the pool then. No more new GPUs are requested than the rows keep busy.
    """
    n_cpus = capacity.workers_that_fit({"CPU": 1}) or 1
    n_actors = num_actors or n_cpus
    if gpus and num_actors is None:
        here = capacity.workers_that_fit({"GPU": gpus})
        possible = capacity.workers_that_fit({"GPU": gpus}, include_addable=True)
        n_actors = max(here, min(possible, -(-rows // ROWS_PER_NEW_ACTOR), MAX_NEW_ACTORS), 1)
    per_actor = {"GPU": gpus, "CPU": ACTOR_CPUS} if gpus else {"CPU": ACTOR_CPUS}
    needs = [
        Need("decode", n_cpus, {"CPU": DECODE_CPUS}, at_least=1),
        Need(
            "encoder", n_actors, per_actor, at_least=1, fix="use device=cpu" if gpus else "lower num_actors"
        ),
    ]
    capacity.require("encode", needs)
    return n_actors


def n_committers(n_actors: int) -> int:
    """How many actors gather and commit codes: one per node beside the head, but no more than encode."""
    return max(1, min(n_actors, len(connection.node_names()) - 1))


def verify_parts(manifest: Manifest, names: set[str]) -> None:
    """Compares the manifest parts that will be read with their sha256, one task per part."""
    import ray

    check = ray.remote(num_cpus=1)(Manifest.verify)
    parts = [part for part in manifest.parts if part.name in names]
    try:
        ray.get([check.remote(replace(manifest, parts=(part,))) for part in parts])
        manifest.trust(names)
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)


@dataclass(frozen=True)
class PipelineSettings:
    """What every worker of one run needs to know; small, and sent to all of them."""

    reader: RowReader
    targets: tuple[Target, ...]
    output: str  # codes, features or both
    model_uri: str
    run: str
    repair: bool
    preprocess: Preprocess | None
    chunk_rows: int
    n_actors: int
    gpus_per_actor: float  # 0 on the CPU; a fraction lets several actors share a GPU


def chunk_rows(preprocess: Preprocess | None, batch_rows: int) -> int:
    """How many pictures form a chunk: a few hundred, whole inference batches, about 32 MB of pixels."""
    if preprocess is None:
        return batch_rows
    low, high = CHUNK_ROWS
    rows = min(max(CHUNK_BYTES // (3 * preprocess.crop**2), low), high)
    return max(rows // batch_rows, 1) * batch_rows


@dataclass(frozen=True)
class Progressed:
    """What a step of the pipeline did: rows that are new, bad rows by reason, committed shards, by whom."""

    rows: int
    reasons: dict[str, int]
    records: list[ShardRecord]
    worker: str

    def to_table(self) -> pa.Table:
        """One row, as an actor sends it to the driver."""
        values = asdict(self) | {"records": [record.to_dict() for record in self.records]}
        return pa.table({"step": [json.dumps(values)]})

    @classmethod
    def from_json(cls, text: str) -> Progressed:
        values = json.loads(text)
        return cls(**values | {"records": [ShardRecord.from_dict(record) for record in values["records"]]})


class EncoderActor:
    """Holds one model: on its GPU, or on one thread of a CPU."""

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings, self.name = settings, worker_name()
        self.refused: HashnetError | None = None
        try:
            self.encoder = self._load()
        except HashnetError as error:  # raised here, the driver would get a text; raised by a call, the error
            self.refused = error

    def _load(self) -> Encoder:
        from hashnet.encoding import Encoder

        settings, lineage = self.settings, self.settings.targets[0].plan.lineage
        # On a CPU one thread computes and compiles: by default each starts a pool.
        if not lineage["engine"].startswith("cuda"):
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
            import torch

            torch.set_num_threads(1)
        encoder = Encoder.load(settings.model_uri, engine=lineage["engine"], batch_rows=lineage["batch_rows"])
        refuse_other_model(settings.model_uri, encoder.model_sha256, lineage["model_sha256"])
        return encoder

    def check(self) -> None:
        """Raises the error that kept the model from loading."""
        if self.refused is not None:
            raise self.refused


class Committer:
    """An actor that gathers the encoded rows of its shards and commits each when it is complete.

    What it holds is lost with its node: the shards concerned stay without a record, and are encoded again.
    """

    def __init__(self, settings: PipelineSettings, shards: list[ShardRange]) -> None:
        self.run = settings.run
        self.collector = ShardCollector(settings.targets, shards, settings.repair)

    def add(self, table: pa.Table) -> tuple[int, list[ShardRecord]]:
        """(rows that are new, records of the shards that they completed)."""
        before = len(self.collector.records)
        with telemetry.timed("commit_seconds", run=self.run, stage="encode"):
            new = self.collector.add(table)
        records = self.collector.records[before:]
        for record in records:
            report_commit(self.run, record)
        return new, records


def start_committers(settings: PipelineSettings, shards: list[ShardRange], n: int) -> dict[str, Any]:
    """``n`` Committers by name; shard number i is committed by number i % n.

    Encoders find them by name: an actor that is made from handles has its arguments in the object store.
    """
    import ray

    # Spread: so small, they would otherwise all be put on one node, whose network all codes would pass.
    options = {"num_cpus": ACTOR_CPUS, "max_restarts": -1, "max_task_retries": -1}
    actor = ray.remote(scheduling_strategy="SPREAD", **options)(Committer)
    committers = {}
    for i in range(n):
        own = [shard for shard in shards if _number(shard.name) % n == i]
        name = f"committer-{uuid.uuid4().hex}"
        committers[name] = actor.options(name=name).remote(settings, own)
    return committers


def _number(shard: str) -> int:
    return int(shard.rpartition("-")[2])


class PictureEncoder(EncoderActor):
    """Decoded pictures → codes or features, handed to the committers; returns what was committed."""

    def __init__(self, settings: PipelineSettings, committers: list[str]) -> None:
        import ray

        super().__init__(settings)
        self.committers = [ray.get_actor(name) for name in committers]

    def __call__(self, table: pa.Table) -> pa.Table:
        import ray

        self.check()
        with telemetry.timed("forward_seconds", run=self.settings.run, stage="encode"):
            encoded = encode_rows(self.encoder, self.settings.output, table)
        waiting = []
        for name in pc.unique(encoded["shard"]).to_pylist():
            rows = encoded.filter(pc.equal(encoded["shard"], name))
            committer = self.committers[_number(name) % len(self.committers)]
            waiting.append(committer.add.remote(rows))
        results = ray.get(waiting)
        records = [record for _, committed in results for record in committed]
        rows = sum(new for new, _ in results)
        return Progressed(rows, bad_reasons(encoded), records, self.name).to_table()


class FeatureEncoder(EncoderActor):
    """Tasks over feature rows → committed shards; returns their records."""

    def __call__(self, table: pa.Table) -> pa.Table:
        self.check()
        settings = self.settings
        tasks = [EncodeTask.from_json(text) for text in table["task"].to_pylist()]
        records: list[ShardRecord] = []
        for task in tasks:
            for shard, rows in encode_features(settings.reader, task, self.encoder, settings.output):
                with telemetry.timed("commit_seconds", run=settings.run, stage="encode"):
                    record = commit_table(settings.targets, shard, rows, settings.repair)
                if record is not None:
                    records.append(record)
                    report_commit(settings.run, record)
        n = sum(task.stop - task.start for task in tasks)
        return Progressed(n, reasons_of(records), records, self.name).to_table()


def run_pictures(
    settings: PipelineSettings, tasks: Iterator[EncodeTask], committers: dict[str, Any]
) -> Iterator[Progressed]:
    """What each chunk of pictures came to, in the order in which they are done."""
    assert settings.preprocess is not None
    reader, preprocess, rows, run = settings.reader, settings.preprocess, settings.chunk_rows, settings.run
    nvjpeg = settings.targets[0].plan.lineage["engine"] == "cuda-nvjpeg"

    def decode(table: pa.Table) -> Iterator[pa.Table]:
        for text in table["task"].to_pylist():
            tables = picture_rows(reader, EncodeTask.from_json(text), preprocess, rows, nvjpeg)
            while True:
                with telemetry.timed("decode_seconds", run=run, stage="encode"):
                    decoded = next(tables, None)
                if decoded is None:
                    break
                report_bad_rows(run, decoded)
                yield decoded

    chunk_bytes = rows * 3 * preprocess.crop**2
    for batch in _batches_of_tasks(tasks):
        with _data_context(target_max_block_size=int(chunk_bytes * 0.9)):  # one block per chunk, never merged
            data = _dataset(batch).map_batches(
                decode,
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=DECODE_CPUS,
                **capacity.on_cpu_nodes(),
            )
            n_chunks = sum(-(-(task.stop - task.start) // rows) for task in batch)
            yield from _encoded(settings, data, PictureEncoder, n_chunks, rows, committers=list(committers))


def run_features(settings: PipelineSettings, tasks: Iterator[EncodeTask]) -> Iterator[Progressed]:
    """What each task over feature rows came to, as it is committed."""
    for batch in _batches_of_tasks(tasks):
        with _data_context():
            yield from _encoded(settings, _dataset(batch), FeatureEncoder, len(batch), 1)


def _encoded(
    settings: PipelineSettings, data: Any, actor: type[EncoderActor], n_tasks: int, rows: int, **more: Any
) -> Iterator[Progressed]:
    """What ``actor``, made from the settings and ``more``, does with each block of a dataset."""
    results = data.map_batches(
        actor,
        fn_constructor_kwargs={"settings": settings, **more},
        batch_size=rows if settings.gpus_per_actor else None,  # Ray needs a number with GPUs
        batch_format="pyarrow",
        compute=_actor_pool(settings, n_tasks),
        num_cpus=ACTOR_CPUS,
        num_gpus=settings.gpus_per_actor or None,
    )
    for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from map(Progressed.from_json, table["step"].to_pylist())


def _batches_of_tasks(tasks: Iterator[EncodeTask]) -> Iterator[list[EncodeTask]]:
    while batch := list(islice(tasks, TASKS_AT_ONCE)):
        yield batch


def _dataset(tasks: list[EncodeTask]) -> Any:
    import ray.data

    ray_internals.quiet_data_on_the_terminal()
    ray_internals.send_arguments_with_actors()
    items = [{"task": task.to_json()} for task in tasks]
    return ray.data.from_items(items, override_num_blocks=len(items))


def _actor_pool(settings: PipelineSettings, n_tasks: int) -> Any:
    """The actors; two tasks in flight per call, so that the next input is there when one ends."""
    from ray.data import ActorPoolStrategy

    # On a GPU two calls run at once: one copies its pixels while the other's are computed.
    calls = 2 if settings.gpus_per_actor else 1
    return ActorPoolStrategy(
        size=min(settings.n_actors, n_tasks),
        max_tasks_in_flight_per_actor=2 * calls,
        max_concurrent_calls_per_actor=calls,
        enable_true_multi_threading=calls > 1,
    )


@contextmanager
def _data_context(**changes: Any) -> Iterator[None]:
    """Datasets created inside have these settings of Ray Data, and raise the original error of a worker.

    A worker that cannot connect to the storage tries again: its host may be off the network for a while, and
    Ray takes its error for an answer even after it has given up on the host.
    """
    from ray.data import DataContext

    context = DataContext.get_current()
    changes["raise_original_map_exception"] = True
    changes |= {"retried_map_errors": [OUT_OF_REACH], "max_map_retries": RETRIES}
    before = {name: getattr(context, name) for name in changes}
    for name, value in changes.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)


def worker_name() -> str:
    """Node and process, to count the workers that took part."""
    import ray

    return f"{ray.get_runtime_context().get_node_id()[:8]}/{os.getpid()}"
