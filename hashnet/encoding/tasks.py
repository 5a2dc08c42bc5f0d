"""Work: which rows one worker takes at once, and how it reads them from the manifest.

The driver plans row ranges and never reads a row; a worker opens the Parquet part and reads the row
groups its range touches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from hashnet.data import Manifest, read_groups
from hashnet.store import PlannedPart, ShardRange, StorePlan, repair_range

WORK_ROWS = 2048  # pictures one decode task takes: seconds of decoding, a small loss when a node dies


@dataclass(frozen=True)
class Work:
    """Rows one worker takes at once: [start, stop) of the split in one part, or the listed row ids.

    ``shards`` are the ranges it covers, in order; a piece of a shard covers one.
    """

    shards: tuple[ShardRange, ...]
    start: int
    stop: int
    row_ids: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        about = json.loads(text)
        shards = tuple(
            ShardRange(**shard | {"part": PlannedPart(**shard["part"])}) for shard in about["shards"]
        )
        return cls(shards, about["start"], about["stop"], tuple(about["row_ids"]))


@dataclass(frozen=True)
class Source:
    """Where rows come from; small, and sent to every worker."""

    manifest: Manifest
    split: str
    base_uri: str | None = None

    def rows(self, work: Work) -> Iterator[pa.Table]:
        """The manifest rows of ``work`` in row_id order, a row group at a time."""
        if work.row_ids:
            yield from self._by_id(np.array(work.row_ids, dtype=np.int64))
            return
        name = work.shards[0].part.name
        part = next(part for part in self.manifest.parts if part.name == name)
        yield from read_groups(self.manifest.uri, part, self.split, self._columns, work.start, work.stop)

    def _by_id(self, row_ids: np.ndarray) -> Iterator[pa.Table]:
        for part in self.manifest.parts:
            first = 0
            for group in part.groups:
                start = part.first_row_id + first
                inside = row_ids[(row_ids >= start) & (row_ids < start + group.rows)]
                if len(inside):
                    tables = read_groups(
                        self.manifest.uri, part, None, self._columns, first, first + group.rows
                    )
                    yield pa.concat_tables(tables).take(pa.array(inside - start))
                first += group.rows

    @property
    def _columns(self) -> list[str]:
        return [name for name in self.manifest.schema.names if name != "splits"]


def pieces(tables: Iterator[pa.Table], lengths: Iterator[int] | list[int]) -> Iterator[pa.Table]:
    """The same rows, cut into tables of the given lengths; whatever is left at the end comes last."""
    waiting: list[pa.Table] = []
    lengths = iter(lengths)
    wanted = next(lengths, None)
    for table in tables:
        waiting.append(table)
        while wanted is not None and sum(map(len, waiting)) >= wanted:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, wanted)
            waiting, wanted = [whole.slice(wanted)], next(lengths, None)
    if sum(map(len, waiting)):
        yield pa.concat_tables(waiting)


def picture_works(shards: Sequence[ShardRange], chunk_rows: int, n_cpus: int) -> Iterator[Work]:
    """The shards cut into pieces for decode tasks: whole chunks, and enough of them for all CPUs."""
    rows = sum(map(len, shards))
    wanted = min(WORK_ROWS, rows // (4 * n_cpus))
    step = max(wanted // chunk_rows, 1) * chunk_rows
    for shard in shards:
        for start in range(shard.start, shard.stop, step):
            yield Work((shard,), start, min(start + step, shard.stop))


def feature_works(shards: Sequence[ShardRange], manifest: Manifest) -> Iterator[Work]:
    """Neighbouring shards together while they share a row group: each group is then read about once."""
    group_rows = {part.name: max(group.rows for group in part.groups) for part in manifest.parts if part.rows}
    run: list[ShardRange] = []
    for shard in shards:
        if run and (
            shard.part != run[0].part
            or shard.start != run[-1].stop
            or shard.stop - run[0].start > max(group_rows[shard.part.name], len(run[0]))
        ):
            yield Work(tuple(run), run[0].start, run[-1].stop)
            run = []
        run.append(shard)
    if run:
        yield Work(tuple(run), run[0].start, run[-1].stop)


def repair_works(plan: StorePlan, row_ids: Sequence[int], first: int, step: int | None) -> list[Work]:
    """Work over the rows of a quarantine: repair shards from number ``first`` on, ``step`` rows a piece."""
    works = []
    for start in range(0, len(row_ids), plan.rows_per_shard):
        ids = row_ids[start : start + plan.rows_per_shard]
        shard = repair_range(plan, first + start // plan.rows_per_shard, len(ids))
        for at in range(0, len(ids), step or len(ids)):
            piece = tuple(ids[at : at + (step or len(ids))])
            works.append(Work((shard,), at, at + len(piece), piece))
    return works
