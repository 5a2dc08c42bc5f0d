"""Segment: frozen rows, some of them removed, built and searched as their kind of index says.

Rows come in blocks: shards of a store, arrays, older segments. Every search ends ordered by (distance, id),
and ties at the cut go to the smallest ids: exactly where search is exact, among the candidates scanned
otherwise.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import faiss
import numpy as np
import pyarrow as pa

from hashnet.errors import FormatError, IndexMismatch
from hashnet.index import faiss_search
from hashnet.index.changelog import CodeBlock
from hashnet.index.rows import (
    KEY,
    Postings,
    Selection,
    StoredRows,
    codes_in,
    conform,
    find_keys,
    new_flat,
    refuse_names,
    refuse_repeated,
    schema_of,
    with_flat_ids,
)
from hashnet.io import binary_matrix, storage
from hashnet.kernels import top_k, top_scores, within_radius

if TYPE_CHECKING:
    from hashnet.index.filters import Where
    from hashnet.store import CodeStore

KEPT_SELECTIONS = 8  # of conditions: servers get the same ones again and again
REMOTE_READERS = 16  # shards read at once from an object store
_keeping = threading.Lock()


@dataclass(frozen=True)
class KindOptions:
    """Options of a kind: whole numbers >= 0. The default 0 of some means "choose by size"."""


def option(default: int, meaning: str, low: int = 0) -> Any:
    """A field of an options class; the build_index job has a key of this name, help and lower limit."""
    return dataclasses.field(default=default, metadata={"help": meaning, "low": low})


class IndexKind(ABC):
    """One kind of index. Stateless: what it works on is passed in."""

    name: ClassVar[str]
    summary: ClassVar[str]  # what it is for, in the help of the build_index job
    options: ClassVar[type[KindOptions]]
    faiss_class: ClassVar[type]
    exact: ClassVar[bool] = True  # whether k-NN search is
    map_flags: ClassVar[int] = 0  # of faiss.read_index_binary, for the kinds FAISS can memory-map
    rows_class: ClassVar[type[StoredRows]] = StoredRows
    has_kernel: ClassVar[bool] = False  # whether it has a compiled kernel that no other kind uses
    scans_selections: ClassVar[bool] = False  # whether it searches ``where=`` itself; else codes are compared

    def complete(self, options: Any, n_bits: int, n: int) -> Any:
        """``options`` with those left open filled in for n codes; IndexMismatch where they do not fit."""
        return options

    @abstractmethod
    def build(self, options: Any, flat: Any, ids: np.ndarray | None, centroids: np.ndarray | None) -> Any:
        """The FAISS index of the codes in ``flat``, an IndexBinaryFlat in id order; ids None are 0..n-1.

        ``centroids`` are what ``kept_centroids`` said of the rows it replaces.
        """

    def rows(
        self,
        index: Any,
        postings: Postings | None = None,
        columns: pa.Table | None = None,
        *,
        mapped: bool = False,
    ) -> StoredRows:
        """The rows inside a FAISS index of this kind; FormatError where it is of another."""
        rows = self.rows_class(index, self, postings, columns, mapped=mapped)
        if not isinstance(rows.inner, self.faiss_class):
            raise FormatError(f"this is not a {self.name} index but {type(rows.inner).__name__}")
        return rows

    def check_opened(self, rows: Any, options: Any, where: str) -> None:  # noqa: B027 - most need none
        """Checks or repairs rows that were just read from the file ``where``."""

    def kept_centroids(self, rows: Any) -> np.ndarray | None:
        """What a compacted index takes over from these rows, so that its tuning stays true; or None."""
        return None

    def search(
        self, segment: Segment, queries: np.ndarray, k: int, only: Selection | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k) of the selected rows, ordered by (distance, id)."""
        return segment.exact_search(queries, k, only, engine)

    def search_radius(
        self, segment: Segment, queries: np.ndarray, radius: int, only: Selection | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) within the radius, ordered by (distance, id)."""
        return segment.exact_search_radius(queries, radius, only, engine)

    def describe(self, options: Any) -> dict[str, int]:
        """Further facts for ``BinaryIndex.describe()``."""
        return {}


class Flat(IndexKind):
    """Every code is compared. Exact, memory-mapped, and the yardstick of the other kinds."""

    name = "flat"
    summary = "exact"
    options = KindOptions
    faiss_class = faiss.IndexBinaryFlat
    map_flags = faiss.IO_FLAG_MMAP_IFC

    def build(
        self, options: KindOptions, flat: Any, ids: np.ndarray | None, centroids: np.ndarray | None
    ) -> Any:
        return with_flat_ids(flat, ids)


@dataclass(frozen=True, eq=False)
class Segment:
    """``dead`` are the ascending positions of removed rows; ``record`` says where it lies on disk."""

    rows: StoredRows
    options: KindOptions
    dead: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    record: dict[str, Any] | None = None
    _selections: dict[str, Selection] = field(default_factory=dict, init=False, repr=False)

    @property
    def n_live(self) -> int:
        return len(self.rows) - len(self.dead)

    @cached_property
    def live(self) -> Selection | None:
        """The rows that are still there; None when all are."""
        if not len(self.dead):
            return None
        alive = np.ones(len(self.rows), dtype=bool)
        alive[self.dead] = False
        return Selection(len(self.rows), mask=alive.view(np.uint8))

    @property
    def live_positions(self) -> np.ndarray:
        return np.arange(len(self.rows)) if self.live is None else self.live.positions

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id among the live rows, int64; -1 where it is not."""
        return self._if_live(self.rows.find(ids))

    def find_keys(self, keys: pa.Array) -> np.ndarray:
        """Position of each key among the live rows, int64; -1 where it is not."""
        if self.rows.columns is None or KEY not in self.rows.columns.schema.names:
            return np.full(len(keys), -1, dtype=np.int64)
        return self._if_live(find_keys(self.rows.columns, keys))

    def _if_live(self, positions: np.ndarray) -> np.ndarray:
        """The same positions, -1 for those of removed rows."""
        if self.live is None:
            return positions
        return np.where((positions >= 0) & (self.live.mask[positions] == 1), positions, -1)

    def select(self, where: Where | None) -> Selection | None:
        """The live rows that a filter lets through; None for every row."""
        if where is None:
            return self.live
        found = self._selections.get(where.text) if where.text is not None else None
        if found is None:
            found = where.selection(self.rows, self.live)
            if where.text is not None:
                with _keeping:
                    if len(self._selections) >= KEPT_SELECTIONS:
                        self._selections.pop(next(iter(self._selections)))
                    self._selections[where.text] = found
        return found

    def search(
        self, queries: np.ndarray, k: int, where: Where | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k)."""
        kind, only = self.rows.kind, self.select(where)
        if where is not None and not kind.scans_selections:
            return self.exact_search(queries, k, only, engine)
        return kind.search(self, queries, k, only, engine)

    def search_radius(
        self, queries: np.ndarray, radius: int, where: Where | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) of all hits with distance <= radius."""
        kind, only = self.rows.kind, self.select(where)
        if where is not None and not kind.scans_selections:
            return self.exact_search_radius(queries, radius, only, engine)
        return kind.search_radius(self, queries, radius, only, engine)

    def exact_search(
        self, queries: np.ndarray, k: int, only: Selection | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k) by comparing every code of the selection, whatever the kind."""
        copied, mask = self._divide(only)
        if engine == "faiss":
            flat = self.rows.flat if copied is None else faiss_search.flat_of(copied)
            positions, distances = faiss_search.top_k(flat, queries, k, mask)
        else:
            codes = self.rows.codes if copied is None else copied
            positions, distances = top_k(codes, queries, k, allowed=mask)
        return self._ids_of(positions, only), distances

    def exact_search_radius(
        self, queries: np.ndarray, radius: int, only: Selection | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) within the radius, likewise."""
        copied, mask = self._divide(only)
        if engine == "faiss":
            flat = self.rows.flat if copied is None else faiss_search.flat_of(copied)
            hits = faiss_search.within_radius(flat, queries, radius, mask)
        else:
            codes = self.rows.codes if copied is None else copied
            hits = within_radius(codes, queries, radius, allowed=mask)
        return [(self._ids_of(positions, only), distances) for positions, distances in hits]

    def exact_scores(self, logits: np.ndarray, k: int, where: Where | None) -> tuple[np.ndarray, np.ndarray]:
        """(ids, scores) (q, k) of the highest scores of logits (q, n_bits), by scoring every selected row."""
        only = self.select(where)
        copied, mask = self._divide(only)
        codes = self.rows.codes if copied is None else copied
        positions, scores = top_scores(codes, logits, k, allowed=mask)
        return self._ids_of(positions, only), scores

    def _divide(self, only: Selection | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(a copy of the selected codes, mask of the rows that may be found): at most one of them."""
        if only is None:
            return None, None
        return (self.rows.take(only.positions), None) if only.is_small else (None, only.mask)

    def _ids_of(self, positions: np.ndarray, only: Selection | None) -> np.ndarray:
        """The ids of positions among all rows or among those copied out; -1 stays -1."""
        if only is not None and only.is_small and len(only):
            positions = np.where(positions >= 0, only.positions[positions], -1)
        return self.rows.ids_at(positions)


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
    """The specification of an index: its kind, the given options, what its codes are and their origin."""

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
    kind: IndexKind,
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
    flat = new_flat(n_bits, n)
    codes = codes_in(flat)
    ids, pairs, tables = _collect(blocks, n, codes, schema)
    order = _order(ids)
    columns = _columns(tables, schema, order)
    if order is not None:
        ids, codes[:] = ids[order], codes[order]
    _refuse_bad_ids(ids)
    postings = _postings(pairs, n_classes, order) if pairs and n_classes is not None else None
    plain = not n or (int(ids[0]) == 0 and int(ids[-1]) == n - 1)  # 0..n-1 need not be stored
    index = kind.build(options, flat, None if plain else ids, centroids)
    return Segment(kind.rows(index, postings, columns), options)


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
        raise IndexMismatch(f"{n} rows were expected, but the shards do not hold exactly that many")
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
