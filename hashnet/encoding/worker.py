"""The steps from manifest rows to a committed shard, one function each; Ray only moves tables between them.

    pictures   EncodeTask → picture_rows (fetch, decode) → encode_rows (forward) → ShardCollector (commit)
    features   EncodeTask → encode_features → commit_table, all in one worker

A table on its way has the columns shard, row_id, uri, labels, reason (null for a good row) and one of
``pixels`` (uint8, fixed size), ``code`` or ``feature``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.codes import pack_signs
from hashnet.data import Preprocess, feature_rows, fetch_images
from hashnet.encoding.tasks import EncodeTask, RowReader
from hashnet.io import binary_column, binary_matrix, rechunk
from hashnet.store import ShardRange, ShardRecord, StorePlan, StoreWriter

if TYPE_CHECKING:
    from hashnet.encoding.encoder import Encoder  # imports torch, which workers that decode do without

FETCH_ROWS = 32  # files in memory at once, before they are decoded: photographs may have 10 MB and more
CARRIED = ("shard", "row_id", "uri", "labels", "reason")


def picture_rows(
    reader: RowReader, task: EncodeTask, preprocess: Preprocess, rows: int
) -> Iterator[pa.Table]:
    """Tables of ``rows`` fetched and decoded pictures: uint8 pixels, and a reason for a bad row."""
    for table in rechunk(reader.rows(task), rows):
        pixels = np.zeros((len(table), 3, preprocess.crop, preprocess.crop), dtype=np.uint8)
        reasons: list[str | None] = []
        for start in range(0, len(table), FETCH_ROWS):
            files = fetch_images(table.slice(start, FETCH_ROWS), reader.base_uri)
            _, bad = preprocess.eval_many(files, out=pixels[start : start + len(files)])
            reasons += [bad[i].reason if i in bad else None for i in range(len(files))]
        columns = {
            "shard": pa.array([task.shards[0].name] * len(table), pa.string()),
            "row_id": table["row_id"],
            "uri": table["uri"],
            "labels": table["labels"],
            "reason": pa.array(reasons, pa.string()),
            "pixels": binary_column(pixels.reshape(len(table), -1)),
        }
        yield pa.table(columns)


def encode_rows(encoder: Encoder, output: str, table: pa.Table) -> pa.Table:
    """The table with ``code`` or ``feature`` in place of ``pixels``; bad rows get zeros."""
    assert encoder.preprocess is not None
    crop = encoder.preprocess.crop
    pixels = binary_matrix(table["pixels"], 3 * crop * crop).reshape(-1, 3, crop, crop)
    return _encoded(encoder, output, pixels, table.select(CARRIED))


def _encoded(encoder: Encoder, output: str, rows: np.ndarray, table: pa.Table) -> pa.Table:
    """The table with the codes or features of its ``rows``; a row whose output is not finite is bad."""
    good = table["reason"].is_null().to_numpy()
    some = rows if good.all() else rows[good]
    values = encoder.logits(some) if output == "codes" else encoder.features(some)
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        lost = good.copy()
        lost[good] = ~finite
        reasons = pc.if_else(pa.array(lost), pa.scalar("not_finite"), table["reason"])
        table = table.set_column(table.column_names.index("reason"), "reason", reasons)
        good, values = good & ~lost, values[finite]
    if output == "codes":
        values = pack_signs(values)
    if not good.all():
        whole = np.zeros((len(rows), values.shape[1]), dtype=values.dtype)
        whole[good] = values
        values = whole
    if output == "codes":
        return table.append_column("code", binary_column(values))
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return table.append_column("feature", column)


def encode_features(
    reader: RowReader, task: EncodeTask, encoder: Encoder, output: str
) -> Iterator[tuple[ShardRange, pa.Table]]:
    """(shard, encoded table) for each shard of a task over feature rows; ``commit_table`` takes both."""
    lengths = [len(shard) for shard in task.shards]
    for shard, table in zip(task.shards, rechunk(reader.rows(task), lengths), strict=True):
        features, reasons = feature_rows(table)
        whole = table.select(["row_id", "uri", "labels"]).append_column("reason", reasons)
        yield shard, _encoded(encoder, output, features, whole)


def commit_table(
    uri: str, plan: StorePlan, shard: ShardRange, table: pa.Table, repair: bool = False
) -> ShardRecord | None:
    """Commits the rows of one shard, good and bad; a repair shard without a good row is not written."""
    good = table["reason"].is_null()
    rows, bad = table.filter(good), table.filter(pc.invert(good))
    writer = StoreWriter(uri, plan)
    if repair:
        return writer.commit(shard, rows, repair=True) if len(rows) else None
    return writer.commit(shard, rows, bad)


class ShardCollector:
    """Collects encoded rows in any order and commits each shard when its last row has arrived.

    Only codes (or features) are held here, never pixels. A row that arrives twice, as after a worker died,
    counts once.
    """

    def __init__(self, uri: str, plan: StorePlan, shards: list[ShardRange], repair: bool = False) -> None:
        self.uri, self.plan, self.repair = uri, plan, repair
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
        record = commit_table(self.uri, self.plan, shard, table.drop_columns(["shard"]), self.repair)
        if record is not None:
            self.records.append(record)


def reasons_of(records: list[ShardRecord]) -> dict[str, int]:
    """Bad rows by reason, most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        for reason, n in record.reasons.items():
            counts[reason] = counts.get(reason, 0) + n
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
