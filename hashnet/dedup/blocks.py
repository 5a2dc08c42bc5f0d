"""The join of large stores in pieces: the shards are cut into blocks, and one task joins two blocks.

    OUT/pairs/00000-00001.parquet     a, b, distance: the pairs between block 0 and block 1, by (a, b)
    OUT/_links/00000-00001.parquet    a, b: a forest that connects what those pairs connect
    OUT/_records/00000-00001.json     what they were made from, their counts and sha256; written last

A task's files depend on its two blocks and the settings alone, and its record makes them count. So the same
command resumes after a crash, any number of workers writes the same bytes, and after rows were added to a
store only the blocks that changed are joined again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.dedup.join import estimate_pairs
from hashnet.dedup.pairs import MAX_PAIRS, CodeJoin, CodeSet, Limit
from hashnet.errors import DataError, HashnetError, LineageMismatch
from hashnet.io import fingerprint, read_checked, read_sealed, storage, write_sealed
from hashnet.store import CodeStore

PAIRS, LINKS, RECORDS = "pairs", "_links", "_records"
KIND, VERSION, FIX = "joined blocks", 1, "run jobs/dedup.py again"
SAMPLE = 16_384  # rows that the number of pairs is estimated from


@dataclass(frozen=True)
class Block:
    """Neighbouring shards of a store."""

    store: str
    sha256: str  # of the shards' list
    shards: tuple[int, ...]

    def read(self) -> CodeSet:
        """Ids and codes; LineageMismatch if the store has changed since it was planned."""
        store = CodeStore.open(self.store)
        if _block(store, self.shards) != self:
            raise LineageMismatch(f"{self.store} changed while it was read; run the same command again")
        return CodeSet.read(store, self.shards)


@dataclass(frozen=True)
class BlockRecord:
    """A finished task: the key it was made for, pairs per distance, pairs kept, and sha256 of its files."""

    name: str
    key: str
    n_at: tuple[int, ...]
    n_kept: int
    files: dict[str, str]

    @property
    def pairs_file(self) -> str:
        return f"{PAIRS}/{self.name}.parquet"

    @property
    def links_file(self) -> str:
        return f"{LINKS}/{self.name}.parquet"

    def save(self, out: str) -> BlockRecord:
        """Writes the record, which makes the task's files count."""
        values = dataclasses.asdict(self)
        write_sealed(storage.join(out, RECORDS, f"{self.name}.json"), KIND, VERSION, values)
        return self

    @classmethod
    def load(cls, out: str, name: str) -> BlockRecord | None:
        """The record of a task; None where there is none, or a damaged one: the task runs again."""
        uri = storage.join(out, RECORDS, f"{name}.json")
        if not storage.exists(uri):
            return None
        try:
            values = read_sealed(uri, KIND, VERSION, FIX)
            known = {field.name: values[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**known, "n_at": tuple(known["n_at"])})
        except (HashnetError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class BlockTask:
    """Joins two blocks of one store, a block with itself, or blocks of two stores (``crossed``)."""

    name: str
    left: Block
    right: Block
    crossed: bool
    radius: int
    max_pairs: int | None
    out: str

    @property
    def key(self) -> str:
        """What the files depend on; where the stores are does not matter."""
        made_from = (self.left.sha256, self.right.sha256, self.crossed, self.radius, self.max_pairs)
        return fingerprint({"made_from": made_from})[:16]

    def record(self) -> BlockRecord | None:
        """The record of the finished task, None where there is none for these blocks and settings."""
        record = BlockRecord.load(self.out, self.name)
        if record is None or record.key != self.key:
            return None
        present = all(storage.exists(storage.join(self.out, file)) for file in record.files)
        return record if present else None

    def run(self, threads: int | None = None) -> BlockRecord:
        """Joins the blocks and writes pairs, links and the record."""
        left = self.left.read()
        if self.left == self.right and not self.crossed:
            found = CodeJoin.within(left, self.radius, threads=threads)
        else:
            found = CodeJoin.between(left, self.right.read(), self.radius, threads=threads)
        pairs = found.pairs(Limit(self.max_pairs, self.radius, len(found.left) + len(found.right)))
        a, b = found.links()
        order = np.lexsort((b, a))
        record = BlockRecord(self.name, self.key, tuple(found.n_at.tolist()), len(pairs), {})
        links = pa.table({"a": a[order], "b": b[order]})
        files = {
            record.pairs_file: write_table(self.out, record.pairs_file, pairs.table()),
            record.links_file: write_table(self.out, record.links_file, links),
        }
        return dataclasses.replace(record, files=files).save(self.out)


def write_table(folder: str, name: str, table: pa.Table) -> str:
    """Writes a Parquet file, the same bytes for the same table; returns its sha256."""
    uri = storage.join(folder, name)
    with storage.open_output(uri) as sink:
        pq.write_table(table, sink, compression="zstd")
    return storage.sha256_of(uri)


def read_table(folder: str, name: str, sha256: str) -> pa.Table:
    """One of the Parquet files; FormatError unless it is the one that was written."""
    return pq.read_table(pa.BufferReader(read_checked(storage.join(folder, name), sha256, FIX)))


def plan_tasks(
    store: CodeStore,
    against: CodeStore | None,
    radius: int,
    max_pairs: int | None,
    rows_per_block: int,
    out: str,
) -> list[BlockTask]:
    """One task per pair of blocks; of blocks of two stores where there is one to compare with."""
    radius = min(radius, store.n_bits)
    lefts = cut_blocks(store, rows_per_block)
    rights = lefts if against is None else cut_blocks(against, rows_per_block)
    return [
        BlockTask(f"{i:05d}-{j:05d}", left, right, against is not None, radius, max_pairs, out)
        for i, left in enumerate(lefts)
        for j, right in enumerate(rights)
        if against is not None or i <= j
    ]


def cut_blocks(store: CodeStore, rows: int) -> list[Block]:
    """Blocks of neighbouring shards of about ``rows`` rows; added shards leave the full ones as they are."""
    groups: list[list[int]] = []
    total = rows
    for place, shard in enumerate(store.shards):
        if total + shard.rows > rows:
            groups.append([])
            total = 0
        groups[-1].append(place)
        total += shard.rows
    return [_block(store, tuple(group)) for group in groups]


def _block(store: CodeStore, shards: tuple[int, ...]) -> Block:
    listed = [store.shards[place].sha256 for place in shards if place < len(store.shards)]
    return Block(store.uri, fingerprint({"shards": listed}), shards)


def refuse_too_many(store: CodeStore, against: CodeStore | None, tasks: list[BlockTask]) -> None:
    """DataError with the estimated number of pairs, before any work, where they would not fit.

    Equal codes count only where all pairs are wanted: with ``max_pairs`` they cost nothing.
    """
    one = _sample(store)
    other = one[:0] if against is None else _sample(against)
    if not tasks or len(one) < 2 or (against is not None and len(other) == 0):
        return
    radius, max_pairs = tasks[0].radius, tasks[0].max_pairs
    within = estimate_pairs(np.concatenate([one, other]), radius, len(one) if against is not None else 0)
    scale = (len(store) / len(one)) * (
        len(store) / len(one) if against is None else len(against) / len(other)
    )
    expected = float(within[-1] if max_pairs is None else within[-1] - within[0]) * scale
    fits = MAX_PAIRS * len(tasks)
    if expected > fits:
        advice = "" if max_pairs is not None else ", or max_pairs=N to keep the nearest (0: clusters alone)"
        raise DataError(
            f"about {expected:,.0f} pairs of {len(store) + len(against or ()):,} codes lie within radius "
            f"{radius}, more than {fits:,} that fit; use a smaller radius{advice}"
        )


def _sample(store: CodeStore) -> np.ndarray:
    """Codes of SAMPLE random rows, or of all of them."""
    rows = np.sort(np.random.default_rng(0).choice(len(store), min(len(store), SAMPLE), replace=False))
    found: list[Any] = [np.zeros((0, store.n_bits // 8), np.uint8)]
    first = 0
    for ids, codes, _ in store.blocks(labels=False):
        inside = rows[(rows >= first) & (rows < first + len(ids))] - first
        found.append(codes[inside])
        first += len(ids)
    return np.concatenate(found)
