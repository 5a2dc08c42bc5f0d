"""What a worker does: reads the rows of an EncodeTask, decodes and encodes them, commits the shard.

    pictures   EncodeTask → picture_rows (fetch, decode) → encode_rows (forward) → ShardCollector (commit)
    nvJPEG     the same, but picture_rows leaves plain JPEGs as they are, and encode_rows decodes them
    features   EncodeTask → encode_features → commit_table, all in one worker
    few rows   EncodeTask → LocalEncoder → ShardCollector, in one process

A table on its way has the columns shard, row_id, uri, labels, reason (null for a good row), the manifest's
further columns, and ``pixels`` (uint8, fixed size) or then ``code``, ``feature`` or both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.codes import pack_signs
from hashnet.data import Manifest, Preprocess, feature_rows, fetch_images, is_plain_jpeg
from hashnet.errors import BadImage
from hashnet.io import binary_column, binary_matrix, rechunk
from hashnet.store import PlannedPart, ShardRange, ShardRecord, StorePlan, StoreWriter, repair_range

if TYPE_CHECKING:
    from hashnet.encoding.encoder import Encoder  # imports torch, which workers that decode do without

BOTH = "codes,features"  # an output of codes and of features, from one pass of the model
TASK_ROWS = 2048  # pictures of a decode task: seconds of decoding, a small loss when a node dies
# bool (n,) good rows → their logits, features, or both: {"codes": …, "features": …}
Outputs = Callable[[np.ndarray], dict[str, np.ndarray]]


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

    def rows(self, task: EncodeTask, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The manifest rows of ``task`` in row_id order, a row group at a time."""
        columns = columns or [name for name in self.manifest.schema.names if name != "splits"]
        if task.row_ids:
            return self.manifest.rows_by_id(np.array(task.row_ids, dtype=np.int64), columns)
        part = task.shards[0].part.name
        return self.manifest.part_rows(part, self.split, columns, task.start, task.stop)


def shard_tasks(shards: Sequence[ShardRange]) -> list[EncodeTask]:
    """One task per shard."""
    return [EncodeTask((shard,), shard.start, shard.stop) for shard in shards]


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


ON_GPU = BadImage("later", "decoded by the engine")  # never stored
FETCH_ROWS = 32  # files in memory at once, before they are decoded: photographs may have 10 MB and more


def picture_rows(
    reader: RowReader, task: EncodeTask, preprocess: Preprocess, rows: int, nvjpeg: bool = False
) -> Iterator[pa.Table]:
    """Tables of ``rows`` fetched and decoded pictures: uint8 pixels, and a reason for a bad row.

    With ``nvjpeg`` plain JPEGs are left as they are in the column ``jpeg``; their pixels are zeros.
    """
    for table in rechunk(reader.rows(task), rows):
        pixels = np.zeros((len(table), 3, preprocess.crop, preprocess.crop), dtype=np.uint8)
        reasons: list[str | None] = []
        jpegs: list[bytes | None] = []
        for start in range(0, len(table), FETCH_ROWS):
            files = fetch_images(table.slice(start, FETCH_ROWS), reader.base_uri)
            if nvjpeg:
                plain = [is_plain_jpeg(data, preprocess) for data in files]
                jpegs += [data if yes else None for data, yes in zip(files, plain, strict=True)]  # type: ignore[misc]
                files = [ON_GPU if yes else data for data, yes in zip(files, plain, strict=True)]
            _, bad = preprocess.eval_many(files, out=pixels[start : start + len(files)])
            bad = {i: error for i, error in bad.items() if error is not ON_GPU}
            reasons += [bad[i].reason if i in bad else None for i in range(len(files))]
        columns = {
            "shard": pa.array([task.shards[0].name] * len(table), pa.string()),
            "row_id": table["row_id"],
            "uri": table["uri"],
            "labels": table["labels"],
            "reason": pa.array(reasons, pa.string()),
            **{name: table[name] for name in reader.manifest.columns},
            "pixels": binary_column(pixels.reshape(len(table), -1)),
            **({"jpeg": pa.array(jpegs, pa.binary())} if nvjpeg else {}),
        }
        yield pa.table(columns)


def encode_rows(encoder: Encoder, output: str, table: pa.Table) -> pa.Table:
    """The table with ``code``, ``feature`` or both in place of ``pixels``; bad rows get zeros."""
    assert encoder.preprocess is not None
    crop = encoder.preprocess.crop
    pixels = binary_matrix(table["pixels"], 3 * crop * crop).reshape(-1, 3, crop, crop)
    if "jpeg" in table.column_names:
        table, pixels = _decode_jpegs(encoder, table, pixels)
    return with_output(table.drop_columns(["pixels"]), outputs_of(encoder, output, pixels))


def _decode_jpegs(encoder: Encoder, table: pa.Table, pixels: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """The table without the column ``jpeg``, with reasons for those that are bad, and everybody's pixels."""
    at = np.flatnonzero(table["jpeg"].is_valid())
    pixels, reasons = pixels.copy(), table["reason"].to_pylist()
    pixels[at], bad = encoder.decode(table["jpeg"].drop_null().to_pylist())
    for i, error in bad.items():
        reasons[at[i]] = error.reason
    column = table.column_names.index("reason")
    table = table.set_column(column, "reason", pa.array(reasons, pa.string()))
    return table.drop_columns(["jpeg"]), pixels


def encode_features(
    reader: RowReader, task: EncodeTask, encoder: Encoder, output: str
) -> Iterator[tuple[ShardRange, pa.Table]]:
    """(shard, encoded table) for each shard of a task over feature rows; ``commit_table`` takes both."""
    lengths = [len(shard) for shard in task.shards]
    for shard, table in zip(task.shards, rechunk(reader.rows(task), lengths), strict=True):
        features, reasons = feature_rows(table)
        whole = table.drop_columns(["feature"]).append_column("reason", reasons)
        yield shard, with_output(whole, outputs_of(encoder, output, features))


def outputs_of(encoder: Encoder, output: str, rows: np.ndarray) -> Outputs:
    """Logits, features or both of the good ones among prepared rows."""

    def outputs(good: np.ndarray) -> dict[str, np.ndarray]:
        some = rows if good.all() else rows[good]
        if output == "codes":
            return {"codes": encoder.logits(some)}
        features = encoder.features(some)
        return {"features": features} | ({"codes": encoder.head(features)} if output == BOTH else {})

    return outputs


def with_output(table: pa.Table, outputs: Outputs) -> pa.Table:
    """The table with columns of codes or features or both; a row whose output is not finite is bad."""
    good = table["reason"].is_null().to_numpy()
    values = outputs(good)
    finite = np.logical_and.reduce([np.isfinite(of_rows).all(axis=1) for of_rows in values.values()])
    if not finite.all():
        lost = good.copy()
        lost[good] = ~finite
        reasons = pc.if_else(pa.array(lost), pa.scalar("not_finite"), table["reason"])
        table = table.set_column(table.column_names.index("reason"), "reason", reasons)
        good, values = good & ~lost, {name: of_rows[finite] for name, of_rows in values.items()}
    for name, of_rows in values.items():
        stored = pack_signs(of_rows) if name == "codes" else of_rows
        whole = stored
        if not good.all():
            whole = np.zeros((len(table), stored.shape[1]), dtype=stored.dtype)
            whole[good] = stored
        if name == "codes":
            table = table.append_column("code", binary_column(whole))
        else:
            column = pa.FixedSizeListArray.from_arrays(pa.array(whole.ravel()), whole.shape[1])
            table = table.append_column("feature", column)
    return table


@dataclass(frozen=True)
class Target:
    """A store that shards are committed to."""

    uri: str
    plan: StorePlan

    def own(self, shard: ShardRange) -> ShardRange:
        """The range of rows by the name it has here: codes-00017 and features-00017 hold the same rows."""
        return replace(shard, name=f"{self.plan.output}-{shard.name.partition('-')[2]}")

    def commit(self, shard: ShardRange, rows: pa.Table, bad: pa.Table | None, repair: bool) -> ShardRecord:
        return StoreWriter(self.uri, self.plan).commit(self.own(shard), rows, bad, repair)


def commit_table(
    targets: Sequence[Target], shard: ShardRange, table: pa.Table, repair: bool = False
) -> ShardRecord | None:
    """Commits the rows of one shard, good and bad, to each store; returns the record of the first.

    A repair shard without a good row is not written. The first store's record comes last: what it counts,
    the others have.
    """
    good = table["reason"].is_null()
    rows, bad = table.filter(good), table.filter(pc.invert(good))
    if repair and not len(rows):
        return None
    records = [target.commit(shard, rows, None if repair else bad, repair) for target in reversed(targets)]
    return records[-1]


class ShardCollector:
    """Collects encoded rows in any order and commits each shard when its last row has arrived.

    Only codes (or features) are held here, never pixels. A row that arrives twice, as after a worker died,
    counts once.
    """

    def __init__(self, targets: Sequence[Target], shards: Sequence[ShardRange], repair: bool = False) -> None:
        self.targets, self.repair = targets, repair
        self.records: list[ShardRecord] = []
        self._shards = {shard.name: shard for shard in shards}
        self._waiting: dict[str, list[pa.Table]] = {}
        self._seen: dict[str, set[int]] = {}

    def add(self, table: pa.Table) -> int:
        """Takes encoded rows of one or more shards; returns how many of them are new."""
        new = 0
        for name in pc.unique(table["shard"]).to_pylist():
            if name not in self._shards:  # committed already
                continue
            rows = table.filter(pc.equal(table["shard"], name))
            seen = self._seen.setdefault(name, set())
            ids = rows["row_id"].to_pylist()
            fresh = [row_id not in seen for row_id in ids]
            if not all(fresh):
                rows = rows.filter(pa.array(fresh))
            seen.update(ids)
            self._waiting.setdefault(name, []).append(rows)
            new += len(rows)
            if len(seen) == len(self._shards[name]):
                self._commit(name)
        return new

    @property
    def unfinished(self) -> list[str]:
        return list(self._shards)

    def _commit(self, name: str) -> None:
        shard = self._shards.pop(name)
        del self._seen[name]
        table = pa.concat_tables(self._waiting.pop(name))
        record = commit_table(self.targets, shard, table.drop_columns(["shard"]), self.repair)
        if record is not None:
            self.records.append(record)


def reasons_of(records: list[ShardRecord]) -> dict[str, int]:
    """Bad rows by reason, most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        for reason, n in record.reasons.items():
            counts[reason] = counts.get(reason, 0) + n
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
