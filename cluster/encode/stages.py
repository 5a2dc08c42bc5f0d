"""The Ray Data pipelines of encoding: each stage is one call into ``hashnet.encoding.pipeline``.

    pictures   work → fetch + decode (tasks) → encoder actors → rows to the driver, which commits shards
    features   work → encoder actors that read, encode and commit whole shards → records to the driver

A decode task is a generator: it hands out ``chunk_rows`` decoded pictures at a time and waits while
those behind it are busy. Besides the rows in flight, which Ray Data bounds by the object store, only
codes wait anywhere. Several actors and decode tasks may share a core: the operating system then keeps
all cores busy whichever of the two is the slower half.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cluster.runtime import capacity, ray_internals, telemetry
from hashnet.data import Preprocess
from hashnet.encoding import EncodeTask, RowReader, commit_table, encode_features, encode_rows, picture_rows
from hashnet.errors import HashnetError, LineageMismatch
from hashnet.io import events
from hashnet.store import ShardRecord, StorePlan

if TYPE_CHECKING:
    from hashnet.encoding import Encoder

WAVE = 4096  # units of work planned into Ray Data at once: the plan of any database fits in memory
CHUNK_BYTES = 32 << 20  # pixels that move at once …
CHUNK_ROWS = (64, 512)  # … within these bounds
# An actor claims next to no CPU, so that decoding is never locked out: not even on a node with one CPU that
# takes in the actors of every node that was lost. More than 0 keeps it off a head without CPUs.
ACTOR_CPUS, DECODE_CPUS = 0.001, 0.95


@dataclass(frozen=True)
class Stage:
    """What every worker of one run needs to know; small, and sent to all of them."""

    source: RowReader
    plan: StorePlan
    uri: str
    model_uri: str
    run: str
    repair: bool
    preprocess: Preprocess | None
    chunk_rows: int
    n_actors: int
    gpus: float  # of an actor; a share lets several use one


def chunk_rows(preprocess: Preprocess | None, batch_rows: int) -> int:
    """Pictures that move together: a few hundred, whole inference batches, about 32 MB of pixels."""
    if preprocess is None:
        return batch_rows
    low, high = CHUNK_ROWS
    rows = min(max(CHUNK_BYTES // (3 * preprocess.crop**2), low), high)
    return max(rows // batch_rows, 1) * batch_rows


class EncoderActor:
    """Holds one model: on its GPU, or on one thread of a CPU."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.name = stage, worker_name()
        self.refused: HashnetError | None = None
        try:
            self.encoder = self._load()
        except HashnetError as error:  # Ray would show the driver a text; from a call it gets the error
            self.refused = error

    def _load(self) -> Encoder:
        from hashnet.encoding import Encoder

        stage, lineage = self.stage, self.stage.plan.lineage
        if lineage["engine"] != "cuda":
            on_one_thread()
        encoder = Encoder.load(stage.model_uri, engine=lineage["engine"])
        if encoder.model_sha256 != lineage["model_sha256"]:
            raise LineageMismatch(
                f"{stage.model_uri} changed while encoding: it was {lineage['model_sha256'][:12]}, "
                f"now it is {encoder.model_sha256[:12]}; run again"
            )
        return encoder

    def check(self) -> None:
        """Raises what kept the model from loading."""
        if self.refused is not None:
            raise self.refused


def on_one_thread() -> None:
    """This process computes on one thread, and compiles with one; by default each forks a pool for it."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(1)


class PictureEncoder(EncoderActor):
    """Decoded pictures → codes or features."""

    def __call__(self, table: pa.Table) -> pa.Table:
        self.check()
        with telemetry.timed("forward_seconds", run=self.stage.run, stage="encode"):
            encoded = encode_rows(self.encoder, self.stage.plan.output, table)
        return encoded.append_column("worker", pa.array([self.name] * len(table), pa.string()))


class FeatureEncoder(EncoderActor):
    """Work over feature rows → committed shards; gives one row a shard."""

    def __call__(self, table: pa.Table) -> pa.Table:
        self.check()
        stage = self.stage
        works = [EncodeTask.from_json(text) for text in table["work"].to_pylist()]
        records: list[ShardRecord] = []
        for work in works:
            for shard, rows in encode_features(stage.source, work, self.encoder, stage.plan.output):
                with telemetry.timed("commit_seconds", run=stage.run, stage="encode"):
                    record = commit_table(stage.uri, stage.plan, shard, rows, stage.repair)
                if record is not None:
                    records.append(record)
                    tell_commit(stage.run, record)
        n = sum(work.stop - work.start for work in works)
        listed = json.dumps([asdict(record) for record in records])
        return pa.table({"records": [listed], "rows": [n], "worker": [self.name]})


def tell_commit(run: str, record: ShardRecord) -> None:
    """The event of a shard, from whoever committed it."""
    events.event(
        "shard committed", run=run, stage="encode", shard=record.name, rows=record.rows, bad=record.bad_rows
    )


def tell_bad(run: str, decoded: pa.Table) -> None:
    """The event of pictures that could not be used, from whoever decoded them."""
    reasons = bad_reasons(decoded)
    if reasons:
        shard = decoded["shard"][0].as_py()  # a decode task's rows are of one
        events.event("bad rows", run=run, stage="encode", shard=shard, reasons=reasons)


def bad_reasons(table: pa.Table) -> dict[str, int]:
    """The bad rows of a table, counted by reason."""
    counts = table["reason"].drop_null().value_counts().to_pylist()
    return {count["values"]: count["counts"] for count in counts}


def run_pictures(stage: Stage, works: Iterator[EncodeTask]) -> Iterator[pa.Table]:
    """Encoded rows of pictures in any order, as they come."""
    assert stage.preprocess is not None
    source, preprocess, rows, run = stage.source, stage.preprocess, stage.chunk_rows, stage.run

    def decode(table: pa.Table) -> Iterator[pa.Table]:
        for text in table["work"].to_pylist():
            tables = picture_rows(source, EncodeTask.from_json(text), preprocess, rows)
            while True:
                with telemetry.timed("decode_seconds", run=run, stage="encode"):
                    decoded = next(tables, None)
                if decoded is None:
                    break
                tell_bad(run, decoded)
                yield decoded

    chunk_bytes = rows * 3 * preprocess.crop**2
    for wave in _waves(works):
        with _settings(target_max_block_size=int(chunk_bytes * 0.9)):  # a chunk is a block, never joined
            data = _items(wave).map_batches(
                decode,
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=DECODE_CPUS,
                **capacity.on_cpu_nodes(),
            )
            data = data.map_batches(
                PictureEncoder,
                fn_constructor_kwargs={"stage": stage},
                batch_size=rows if stage.gpus else None,  # Ray wants a number with GPUs
                batch_format="pyarrow",
                compute=_pool(stage, sum(-(-(work.stop - work.start) // rows) for work in wave)),
                num_cpus=ACTOR_CPUS,
                num_gpus=stage.gpus or None,
            )
            yield from data.iter_batches(batch_size=None, batch_format="pyarrow")


def run_features(stage: Stage, works: Iterator[EncodeTask]) -> Iterator[tuple[list[ShardRecord], int, str]]:
    """(records, rows, worker) of each unit of work over feature rows, as it is committed."""
    for wave in _waves(works):
        with _settings():
            data = _items(wave).map_batches(
                FeatureEncoder,
                fn_constructor_kwargs={"stage": stage},
                batch_size=1 if stage.gpus else None,
                batch_format="pyarrow",
                compute=_pool(stage, len(wave)),
                num_cpus=ACTOR_CPUS,
                num_gpus=stage.gpus or None,
            )
            for table in data.iter_batches(batch_size=None, batch_format="pyarrow"):
                for row in table.to_pylist():
                    records = [ShardRecord.from_dict(about) for about in json.loads(row["records"])]
                    yield records, row["rows"], row["worker"]


def _waves(works: Iterator[EncodeTask]) -> Iterator[list[EncodeTask]]:
    while wave := list(islice(works, WAVE)):
        yield wave


def _items(works: list[EncodeTask]) -> Any:
    import ray.data

    ray_internals.quiet_data_on_the_terminal()
    items = [{"work": work.to_json()} for work in works]
    return ray.data.from_items(items, override_num_blocks=len(items))


def _pool(stage: Stage, n_tasks: int) -> Any:
    """The actors; two tasks each, so that the next one's input is there when the last one ends."""
    from ray.data import ActorPoolStrategy

    return ActorPoolStrategy(size=min(stage.n_actors, n_tasks), max_tasks_in_flight_per_actor=2)


@contextmanager
def _settings(**changes: Any) -> Iterator[None]:
    """Data sets made inside have these settings of Ray Data, and pass on errors as they were raised."""
    from ray.data import DataContext

    context = DataContext.get_current()
    changes["raise_original_map_exception"] = True
    before = {name: getattr(context, name) for name in changes}
    for name, value in changes.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)


def worker_name() -> str:
    """Node and process, to count who took part."""
    import ray

    return f"{ray.get_runtime_context().get_node_id()[:8]}/{os.getpid()}"
