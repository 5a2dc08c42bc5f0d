"""From blocks of codes (shards of a store, arrays, older segments) to one segment in id order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hashnet.errors import IndexMismatch
from hashnet.index.changelog import CodeBlock
from hashnet.index.kinds import KINDS, KindOptions
from hashnet.index.rows import (
    KEY,
    Postings,
    conform,
    new_flat,
    refuse_names,
    refuse_repeated,
    schema_of,
    with_flat_ids,
)
from hashnet.index.segment import Segment
from hashnet.io import binary_matrix, storage

if TYPE_CHECKING:
    from hashnet.store import CodeStore

REMOTE_READERS = 16  # shards read at once from an object store


def store_schema(store: CodeStore) -> pa.Schema | None:
    """The further columns of a store, those of the user's; None where it has none."""
    further = pa.schema([store.plan.schema.field(name) for name in store.columns])
    refuse_names(further)
    return schema_of(further.empty_table()) if store.columns else None


def read_code_blocks(
    store: CodeStore, labels: bool = True, shards: Sequence[int] | None = None
) -> Iterator[CodeBlock]:
    """One CodeBlock per shard of a store, in order; ``shards`` picks some by number.

    Shards of an object store are read several at once, which hides its latency.
    """
    with_labels = labels and store.n_classes is not None
    schema = store_schema(store)
    further = [] if schema is None else schema.names
    columns = ["row_id", "code", *further] + (["labels"] if with_labels else [])
    numbers = range(len(store.shards)) if shards is None else shards

    def block(table: pa.Table) -> CodeBlock:
        pairs = _label_pairs(table["labels"]) if with_labels else (None, None)
        codes = binary_matrix(table["code"], store.n_bits // 8)
        own = conform(table.select(further), schema, len(codes)) if further else None
        return CodeBlock(table["row_id"].to_numpy(), codes, pairs[0], pairs[1], own)

    if storage.is_local(store.uri):
        yield from map(block, store.tables(columns, numbers))
        return

    def read(number: int) -> CodeBlock:
        (table,) = store.tables(columns, [number])
        return block(table)

    with ThreadPoolExecutor(REMOTE_READERS) as pool:
        waiting = deque(pool.submit(read, number) for number in numbers[: 2 * REMOTE_READERS])
        for number in numbers[2 * REMOTE_READERS :]:
            yield waiting.popleft().result()
            waiting.append(pool.submit(read, number))
        while waiting:
            yield waiting.popleft().result()


def _label_pairs(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    lists = column.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    return lists.flatten().to_numpy(), np.repeat(np.arange(len(lengths)), lengths)


@dataclass(frozen=True)
class IndexSpec:
    """What an index is to be: its kind and the options given, what its codes are, where they come from."""

    n_bits: int
    kind: str = "flat"
    options: Mapping[str, Any] = field(default_factory=dict)
    n_classes: int | None = None  # None: without labels
    lineage: Mapping[str, Any] = field(default_factory=dict)
    schema: pa.Schema | None = None  # of the items' columns; None: without

    @classmethod
    def of_store(
        cls, store: CodeStore, kind: str, options: Mapping[str, Any], *, labels: bool = True
    ) -> IndexSpec:
        """An index of a store's codes, with their labels or without."""
        n_classes = store.n_classes if labels else None
        lineage = dict(store.lineage)
        lineage |= {"codes_sha256": store.sha256, "rows_sha256": store.rows_sha256}
        return cls(store.n_bits, kind, options, n_classes, lineage, store_schema(store))


def build_segment(
    blocks: Iterable[CodeBlock],
    n: int,
    kind: str,
    options: KindOptions,
    *,
    n_bits: int,
    n_classes: int | None,
    schema: pa.Schema | None,
    centroids: np.ndarray | None = None,
) -> Segment:
    """The ``n`` rows that the blocks hold together, in id order; one copy of the codes is in memory.

    ``centroids`` are what ``kept_centroids`` of the kind said of the rows it replaces.
    """
    flat, codes = new_flat(n_bits, n)
    ids, pairs, tables = _collect(blocks, n, codes, schema)
    order = _order(ids)
    columns = _columns(tables, schema, order)
    if order is not None:
        ids, codes[:] = ids[order], codes[order]
    _refuse_bad_ids(ids)
    postings = _postings(pairs, n_classes, order) if pairs and n_classes is not None else None
    plain = not n or (int(ids[0]) == 0 and int(ids[-1]) == n - 1)  # 0..n-1 need not be stored
    stored = None if plain else ids
    if kind == "flat":  # the codes lie in it already
        index = with_flat_ids(flat, stored)
    else:
        index = KINDS[kind].build(options, codes, stored, centroids)
    return Segment(KINDS[kind].rows(index, postings, columns), options)


def _columns(tables: list[pa.Table], schema: pa.Schema | None, order: np.ndarray | None) -> pa.Table | None:
    """The rows' columns in id order."""
    if schema is None:
        return None
    columns = pa.concat_tables(tables)
    if KEY in schema.names:
        refuse_repeated(columns[KEY])
    return columns if order is None else columns.take(pa.array(order))


def live_block(segment: Segment) -> CodeBlock:
    """The rows of a segment that were not removed."""
    rows, live = segment.rows, segment.live_positions
    labels, label_rows = rows.postings.take(live, len(rows)) if rows.postings else (None, None)
    columns = rows.columns
    if columns is not None and segment.live is not None:
        columns = columns.take(pa.array(live))
    return CodeBlock(rows.ids[live], rows.take(live), labels, label_rows, columns)


def _collect(
    blocks: Iterable[CodeBlock], n: int, codes: np.ndarray, schema: pa.Schema | None
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]], list[pa.Table]]:
    """The ids int64 (n,), (label, row) pairs and columns of all blocks; fills ``codes`` (n, n_bits // 8)."""
    ids = np.empty(n, dtype=np.int64)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    tables: list[pa.Table] = []
    start = 0
    for block in blocks:
        stop = start + len(block.ids)
        if stop > n:
            break
        ids[start:stop] = block.ids
        codes[start:stop] = block.codes
        if block.labels is not None and block.label_rows is not None:
            pairs.append((block.labels, block.label_rows + start))
        if schema is not None:
            tables.append(conform(block.columns, schema, len(block.ids)))
        start = stop
    if start != n:
        raise IndexMismatch(f"{n} rows were announced, but the shards do not hold exactly that many")
    return ids, pairs, tables


def _order(ids: np.ndarray) -> np.ndarray | None:
    """The order that sorts the ids; None where they ascend already, as a store's do."""
    return None if (ids[1:] > ids[:-1]).all() else np.argsort(ids, kind="stable")


def _refuse_bad_ids(ids: np.ndarray) -> None:
    if ids[0] < 0:
        raise IndexMismatch(f"ids must be >= 0 (-1 marks an unused slot), got {ids[0]}")
    repeated = np.flatnonzero(ids[1:] == ids[:-1])
    if len(repeated):
        raise IndexMismatch(
            f"id {ids[repeated[0]]} is given twice ({len(repeated)} ids of {len(ids)} repeat another); "
            "ids must differ"
        )


def _postings(
    pairs: list[tuple[np.ndarray, np.ndarray]], n_classes: int, order: np.ndarray | None
) -> Postings:
    label = np.concatenate([np.empty(0, dtype=np.int32), *(labels for labels, _ in pairs)])
    row = np.concatenate([np.empty(0, dtype=np.int64), *(rows for _, rows in pairs)])
    pairs.clear()  # sorting needs their memory
    if len(label) and not 0 <= label.min() <= label.max() < n_classes:
        raise IndexMismatch(f"labels hold classes {label.min()}..{label.max()}, but there are {n_classes}")
    if order is not None:
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        row = place[row]
    return Postings.from_pairs(label, row, n_classes)
