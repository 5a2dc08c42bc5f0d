"""EncodeTask: the rows one worker encodes at once, and RowReader, which reads them from the manifest.

The driver plans row ranges and never reads a row; a worker opens the Parquet part and reads the row
groups that its range touches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from hashnet.data import Manifest
from hashnet.store import PlannedPart, ShardRange, StorePlan, repair_range

TASK_ROWS = 2048  # pictures of a decode task: seconds of decoding, a small loss when a node dies


@dataclass(frozen=True)
class EncodeTask:
    """Rows one worker encodes at once: [start, stop) of the split in one part, or the listed row ids.

    ``shards`` are the ranges it covers, in order; a task within one shard names that shard.
    """

    shards: tuple[ShardRange, ...]
    start: int
    stop: int
    row_ids: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EncodeTask:
        about = json.loads(text)
        shards = tuple(
            ShardRange(**shard | {"part": PlannedPart(**shard["part"])}) for shard in about["shards"]
        )
        return cls(shards, about["start"], about["stop"], tuple(about["row_ids"]))


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of tasks from a split of the manifest; small, and sent to every worker."""

    manifest: Manifest
    split: str
    base_uri: str | None = None

    def rows(self, task: EncodeTask) -> Iterator[pa.Table]:
        """The manifest rows of ``task`` in row_id order, a row group at a time."""
        columns = [name for name in self.manifest.schema.names if name != "splits"]
        if task.row_ids:
            return self.manifest.rows_by_id(np.array(task.row_ids, dtype=np.int64), columns)
        part = task.shards[0].part.name
        return self.manifest.part_rows(part, self.split, columns, task.start, task.stop)


def picture_tasks(shards: Sequence[ShardRange], chunk_rows: int, n_cpus: int) -> Iterator[EncodeTask]:
    """Tasks that cut the shards into whole chunks of pictures, with enough tasks for all CPUs."""
    rows = sum(map(len, shards))
    rows_per_task = min(TASK_ROWS, rows // (4 * n_cpus))
    step = max(rows_per_task // chunk_rows, 1) * chunk_rows
    for shard in shards:
        for start in range(shard.start, shard.stop, step):
            yield EncodeTask((shard,), start, min(start + step, shard.stop))


def feature_tasks(shards: Sequence[ShardRange], manifest: Manifest) -> Iterator[EncodeTask]:
    """Tasks of neighbouring shards that share a row group: each group is then read about once."""
    group_rows = {part.name: max(group.rows for group in part.groups) for part in manifest.parts if part.rows}
    run: list[ShardRange] = []
    for shard in shards:
        if run and (
            shard.part != run[0].part
            or shard.start != run[-1].stop
            or shard.stop - run[0].start > max(group_rows[shard.part.name], len(run[0]))
        ):
            yield EncodeTask(tuple(run), run[0].start, run[-1].stop)
            run = []
        run.append(shard)
    if run:
        yield EncodeTask(tuple(run), run[0].start, run[-1].stop)


def repair_tasks(plan: StorePlan, row_ids: Sequence[int], first: int, step: int | None) -> list[EncodeTask]:
    """Tasks over quarantined rows: repair shards from number ``first`` on, ``step`` rows per task."""
    tasks = []
    for start in range(0, len(row_ids), plan.rows_per_shard):
        ids = row_ids[start : start + plan.rows_per_shard]
        shard = repair_range(plan, first + start // plan.rows_per_shard, len(ids))
        for at in range(0, len(ids), step or len(ids)):
            piece = tuple(ids[at : at + (step or len(ids))])
            tasks.append(EncodeTask((shard,), at, at + len(piece), piece))
    return tasks
