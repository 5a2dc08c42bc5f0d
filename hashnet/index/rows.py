"""StoredRows: the codes and ids inside one FAISS index, seen as arrays in id order; their labels and columns.

FAISS owns the memory (or the memory map); the arrays are views into it, so nothing is held twice.
The index on disk knows the true ids: a plain Flat / MultiHash / HNSW where ids are 0..n-1, the same
inside an IDMap where they are not, and IVF lists carry ids anyway. Postings say which rows carry which
label, small enough to keep beside an index.
"""

from __future__ import annotations

import base64
import copy
import ctypes
import mmap
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashnet.errors import FormatError, IdTaken, IndexMismatch, Unsupported
from hashnet.index.expressions import nearest_name
from hashnet.io import storage
from hashnet.results import HIT_FIELDS

if TYPE_CHECKING:
    from hashnet.index.segment import IndexKind

HUGE_PAGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # of Linux 6.1; the mmap module has no name for it
GATHER_BELOW = 1 / 16  # share of the rows let through below which copying them out is cheaper


@dataclass(frozen=True)
class Postings:
    """Pairs (label, row), sorted by both: ``labels`` int32 (m,), ``rows`` int64 (m,)."""

    labels: np.ndarray
    rows: np.ndarray
    n_classes: int

    @classmethod
    def from_pairs(cls, labels: np.ndarray, rows: np.ndarray, n_classes: int) -> Postings:
        """Of pairs in any order."""
        if len(rows) and not (rows[1:] >= rows[:-1]).all():
            by_row = np.argsort(rows, kind="stable")
            labels, rows = labels[by_row], rows[by_row]
        small = labels.astype(np.uint16) if n_classes <= 1 << 16 else labels  # 16 bits: a radix sort
        order = np.argsort(small, kind="stable")
        sorted_labels = labels[order].astype(np.int32, copy=False)
        return cls(sorted_labels, rows[order].astype(np.int64, copy=False), n_classes)

    def rows_with(self, labels: list[int]) -> np.ndarray:
        """Rows that carry at least one of the labels, ascending int64."""
        starts = np.searchsorted(self.labels, labels, side="left")
        stops = np.searchsorted(self.labels, labels, side="right")
        found = [self.rows[a:b] for a, b in zip(starts, stops, strict=True)]
        if len(found) == 1:
            return found[0]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def labels_at(self, rows: np.ndarray) -> list[list[int]]:
        """The labels of each of these rows, ascending."""
        by_row, labels = self._by_row
        starts, stops = (np.searchsorted(by_row, rows, side=side) for side in ("left", "right"))
        return [labels[a:b].tolist() for a, b in zip(starts, stops, strict=True)]

    @cached_property
    def _by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, labels) sorted by (row, label): 12 bytes per pair, from the first look-up on."""
        order = np.argsort(self.rows, kind="stable")
        return self.rows[order], self.labels[order]

    def take(self, rows: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(labels, new rows) of the rows picked: row ``rows[i]`` of the ``n_rows`` becomes row i."""
        renamed = np.full(n_rows, -1, dtype=np.int64)
        renamed[rows] = np.arange(len(rows))
        new = renamed[self.rows]
        kept = new >= 0
        return self.labels[kept], new[kept]

    def write(self, uri: str) -> None:
        table = pa.table({"label": self.labels, "row": self.rows})
        with storage.open_output(uri) as sink:
            pq.write_table(table, sink, compression="zstd")

    @classmethod
    def read(cls, uri: str, n_rows: int, n_classes: int) -> Postings:
        with storage.open_input(uri) as source:
            try:
                table = pq.read_table(source)
                labels, rows = table["label"].to_numpy(), table["row"].to_numpy()
            except (pa.ArrowException, KeyError) as error:
                raise FormatError(f"{uri} does not hold labels of an index: {error}") from error
        if len(rows) and (rows.min() < 0 or rows.max() >= n_rows or labels.min() < 0):
            raise FormatError(f"{uri} names rows or labels that do not exist")
        return cls(labels, rows, n_classes)


class Selection:
    """The rows of ``n_rows`` that a search may find, by ascending ``positions`` int64 or a ``mask``."""

    def __init__(
        self, n_rows: int, *, positions: np.ndarray | None = None, mask: np.ndarray | None = None
    ) -> None:
        self.n_rows = n_rows
        if positions is not None:
            self.positions, self.n = positions, len(positions)
        if mask is not None:
            self.mask, self.n = mask, int(np.count_nonzero(mask))

    def __len__(self) -> int:
        return self.n

    @property
    def is_small(self) -> bool:
        """Whether copying these rows out is cheaper than scanning all."""
        return self.n <= GATHER_BELOW * self.n_rows

    @cached_property
    def positions(self) -> np.ndarray:
        return np.flatnonzero(self.mask.view(bool))  # of bytes it takes ten times as long

    @cached_property
    def mask(self) -> np.ndarray:
        """uint8 (n_rows,): 1 where a row may be found."""
        mask = np.zeros(self.n_rows, dtype=np.uint8)
        mask[self.positions] = 1
        return mask


class StoredRows:
    """Frozen rows: ``ids`` ascending int64 (n,), ``codes`` uint8 (n, n_bits // 8), label postings, columns.

    ``index`` is what FAISS writes and reads; ``inner`` the index inside an IDMap, or the same.
    Both arrays are views: whoever uses them keeps this object alive.
    """

    def __init__(
        self,
        index: Any,
        kind: IndexKind,
        postings: Postings | None = None,
        columns: pa.Table | None = None,
        *,
        mapped: bool = False,
    ) -> None:
        self.index, self.kind, self.mapped = index, kind, mapped
        self.postings, self.columns = postings, columns
        self.is_id_map = isinstance(index, faiss.IndexBinaryIDMap)
        # a downcast view of what index owns: index must outlive it, so both stay here
        self.inner = faiss.downcast_IndexBinary(index.index) if self.is_id_map else index
        self.n_bits, self.n = int(index.d), int(index.ntotal)

    def __len__(self) -> int:
        return self.n

    def with_columns(self, columns: pa.Table | None) -> StoredRows:
        """The same rows with other columns."""
        other = copy.copy(self)
        other.columns = columns
        return other

    @property
    def has_plain_ids(self) -> bool:
        """Whether ids are the positions 0..n-1."""
        return not self.is_id_map

    @property
    def flat(self) -> Any:
        """The IndexBinaryFlat that holds the codes: itself, or the storage of a graph or of hash tables."""
        if isinstance(self.inner, faiss.IndexBinaryFlat):
            return self.inner
        return faiss.downcast_IndexBinary(self.inner.storage)

    def writable(self) -> Any:
        """The FAISS index to be written to a file."""
        return self.index

    @cached_property
    def codes(self) -> np.ndarray:
        """uint8 (n, n_bits // 8) in id order: a view."""
        return codes_in(self.flat)

    @cached_property
    def ids(self) -> np.ndarray:
        """int64 (n,), ascending."""
        if self.is_id_map:
            return _view(self.index.id_map, self.n, np.int64)
        return np.arange(self.n, dtype=np.int64)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """A copy of the codes at these positions."""
        return self.codes[positions]

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id, int64; -1 where it is not here."""
        if self.has_plain_ids:
            return np.where((ids >= 0) & (ids < self.n), ids, -1)
        if not self.n:
            return np.full(len(ids), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.ids, ids), self.n - 1)
        return np.where(self.ids[places] == ids, places, -1)

    def rows_with(self, labels: list[int]) -> np.ndarray:
        """Positions that carry at least one of the labels, ascending; none where rows came without labels."""
        return np.empty(0, dtype=np.int64) if self.postings is None else self.postings.rows_with(labels)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Ids at positions of any shape; -1 stays -1."""
        if self.has_plain_ids:
            return positions
        if not self.n:
            return np.full_like(positions, -1)
        return np.where(positions >= 0, self.ids[positions], -1)

    def check(self) -> None:
        """FormatError unless sizes agree and ids ascend: what a search relies on."""
        if self.is_id_map and int(self.index.id_map.size()) != self.n:
            raise FormatError(f"{self.n} codes came with {self.index.id_map.size()} ids")
        if int(self.flat.ntotal) != self.n or int(self.flat.xb.size()) != self.n * self.n_bits // 8:
            raise FormatError(f"{self.n} codes of {self.n_bits} bits came with {self.flat.xb.size()} bytes")
        if self.is_id_map and self.n and not (self.ids[0] >= 0 and (np.diff(self.ids) > 0).all()):
            raise FormatError("its ids do not ascend")


def new_flat(n_bits: int, n: int) -> Any:
    """An IndexBinaryFlat with room for ``n`` rows, which are filled in through ``codes_in``."""
    flat = faiss.IndexBinaryFlat(n_bits)
    flat.xb.resize(n * n_bits // 8)
    flat.ntotal = n
    _prefer_huge_pages(codes_in(flat))
    return flat


def _prefer_huge_pages(codes: np.ndarray) -> None:
    """Asks Linux to put these rows on huge pages: a scan that waits for memory takes some 10 % less time.

    An older kernel, or one that is told never to use them, leaves everything as it is.
    """
    page = mmap.PAGESIZE
    low, high = -(-codes.ctypes.data // page) * page, (codes.ctypes.data + codes.nbytes) // page * page
    if sys.platform == "linux" and high - low >= HUGE_PAGE:
        madvise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)


def codes_in(flat: Any) -> np.ndarray:
    """uint8 (n, n_bits // 8): a view of the codes of an IndexBinaryFlat."""
    n, n_bytes = int(flat.ntotal), int(flat.d) // 8
    return _view(flat.xb, n * n_bytes, np.uint8).reshape(n, n_bytes)


def with_flat_ids(flat: Any, ids: np.ndarray | None) -> Any:
    """A filled flat index with these ids, which ascend: inside an IDMap, or itself for None (0..n-1)."""
    if ids is None:
        return flat
    n, flat.ntotal = int(flat.ntotal), 0  # FAISS wraps only what looks empty
    index = faiss.IndexBinaryIDMap(flat)
    index.id_map.resize(n)
    _view(index.id_map, n, np.int64)[:] = ids
    flat.ntotal = index.ntotal = n
    return index


def with_ids(index: Any, codes: np.ndarray, ids: np.ndarray | None) -> Any:
    """``index`` filled with codes; inside an IDMap where ids are not 0..n-1."""
    if ids is None:
        index.add(codes)
        return index
    mapped = faiss.IndexBinaryIDMap(index)
    mapped.add_with_ids(codes, ids)
    return mapped


def _view(vector: Any, size: int, dtype: type) -> np.ndarray:
    if size == 0:
        return np.empty(0, dtype=dtype)
    return faiss.rev_swig_ptr(vector.data(), size)


# ---------------------------------------------------------------- columns
# Columns of an index's items: an Arrow table per segment, in id order; string keys are its column ``key``.
#
# On disk a segment's table is one Arrow IPC file, uncompressed: it is memory-mapped, and a filter or a hit
# reads only the columns and rows it needs.

KEY = "key"
ROWS_PER_BATCH = 1 << 16


def as_table(columns: Any, keys: Any, n: int) -> Any:
    """Columns (an Arrow table, or name → values) and keys of ``n`` items as one table, or None."""
    if columns is None and keys is None:
        return None
    try:
        table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns or {}))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise IndexMismatch(f"columns= must be an Arrow table or name → values: {error}") from error
    refuse_names(table.schema)
    given = {name: table[name] for name in table.schema.names}
    if keys is not None:
        if KEY in given:
            raise IndexMismatch(f"the column {KEY!r} is given twice: in columns= and as keys=")
        given[KEY] = _key_array(keys)
    for name, values in given.items():
        if len(values) != n:
            raise IndexMismatch(f"{n} codes came with {len(values)} values of {name!r}; give one per code")
    table = _plain(pa.table(given))
    if KEY in table.schema.names:
        refuse_repeated(table[KEY])
    return table


def refuse_names(schema: pa.Schema) -> None:
    """Names that would be ambiguous in a filter or a hit; keys that are not text."""
    names = schema.names
    for name in names:
        if name in HIT_FIELDS:
            raise IndexMismatch(f"a column cannot be called {name!r}, which every hit has; rename it")
        if names.count(name) > 1:
            raise IndexMismatch(f"the column {name!r} is given twice; give each name once")
    if KEY in names and not _is_text(schema.field(KEY).type):
        got = schema.field(KEY).type
        raise IndexMismatch(f"the column {KEY!r} names items and must hold text, got {got}")


def _key_array(keys: Any) -> pa.Array:
    try:
        array = pa.array(keys) if not isinstance(keys, (pa.Array, pa.ChunkedArray)) else keys
        if not _is_text(array.type):
            raise pa.ArrowInvalid(f"got {array.type}")
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise IndexMismatch(f"keys must be text, one per item: {error}") from error
    return array.cast(pa.large_string())


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _plain(table: pa.Table) -> pa.Table:
    """Without metadata and dictionaries; text has 64-bit offsets, so that tables of any size join."""
    fields = []
    for column in table.schema:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        fields.append(pa.field(column.name, pa.large_string() if pa.types.is_string(kind) else kind))
    return table.cast(pa.schema(fields))


def schema_of(table: pa.Table) -> pa.Schema:
    """The schema of an index whose first rows are these."""
    return _plain(table.slice(0, 0)).schema


def conform(table: pa.Table | None, schema: pa.Schema | None, n: int) -> pa.Table | None:
    """The columns of ``n`` items as an index with ``schema`` has them; a column left out holds nulls."""
    if schema is None:
        if table is not None:
            raise Unsupported("this index was built without columns and keys; add the codes without them")
        return None
    given = {} if table is None else {name: table[name] for name in table.schema.names}
    for name in given:
        if name not in schema.names:
            raise IndexMismatch(f"the index has no column {name!r}; {nearest_name(name, schema.names)}")
    columns = []
    for column in schema:
        values = given.get(column.name, pa.nulls(n, column.type))
        try:
            columns.append(values.cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise IndexMismatch(
                f"column {column.name!r} holds {column.type}, the new items have {values.type}: {error}"
            ) from error
    return pa.table(columns, schema=schema)


def refuse_repeated(keys: pa.ChunkedArray) -> None:
    """IdTaken where two items have the same key."""
    if pc.count_distinct(keys).as_py() == len(keys) - keys.null_count:
        return
    counts = pc.value_counts(keys.drop_null()).to_pylist()
    key, times = next((c["values"], c["counts"]) for c in counts if c["counts"] > 1)
    raise IdTaken(f"key {key!r} is given {times} times; a key belongs to one item")


def find_keys(table: pa.Table, keys: pa.Array) -> np.ndarray:
    """Row of each key, int64; -1 where the table does not hold it. One pass over its keys."""
    found = np.full(len(keys), -1, dtype=np.int64)
    place = pc.index_in(table[KEY], value_set=keys, skip_nulls=True).fill_null(-1).to_numpy()
    rows = np.flatnonzero(place >= 0)
    found[place[rows]] = rows
    return found


def check_keyed(schema: pa.Schema | None) -> None:
    """Unsupported unless the items have keys."""
    if schema is None or KEY not in schema.names:
        raise Unsupported(
            "the items of this index have no keys; make the manifest or the codes with --key (of arrays: "
            "--keys), or give keys to BinaryIndex.from_arrays"
        )


def check_names(names: Any, schema: pa.Schema | None) -> list[str]:
    """The columns to return with hits."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise IndexMismatch(f"columns= must be a list of names, got {names!r}")
    known = [] if schema is None else schema.names
    for name in names:
        if name not in known:
            raise IndexMismatch(f"the index has no column {name!r}; {nearest_name(name, known)}")
    return list(names)


def write_table(uri: str, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression=None)
    with storage.open_output(uri) as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=ROWS_PER_BATCH)


def read_table(uri: str, n_rows: int, schema: pa.Schema) -> pa.Table:
    """The table at ``uri``, memory-mapped; FormatError unless it is the one the header describes.

    Columns that the index was given after the file was written hold nulls.
    """
    with storage.local_copy(uri) as path:  # a map keeps the bytes alive when a copy is deleted
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{uri} does not hold columns of an index: {error}") from error
    if table.num_rows != n_rows or any(column not in schema for column in table.schema):
        raise FormatError(
            f"{uri} holds {table.num_rows} rows of {table.schema.names}, not what the index says"
        )
    return table if table.schema == schema else conform(table, schema, n_rows)


def schema_text(schema: pa.Schema | None) -> str | None:
    """A schema as it stands in a header, in base 64."""
    return None if schema is None else base64.b64encode(schema.serialize().to_pybytes()).decode()


def read_schema(text: Any) -> pa.Schema | None:
    """The schema in a header; ValueError where it is none."""
    return None if text is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
