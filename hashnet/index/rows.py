"""StoredRows: the codes and ids inside one FAISS index, seen as arrays in id order, and their labels.

FAISS owns the memory (or the memory map); the arrays are views into it, so nothing is held twice.
The index on disk knows the true ids: a plain Flat / MultiHash / HNSW where ids are 0..n-1, the same
inside an IDMap where they are not, and IVF lists carry ids anyway. Postings say which rows carry which
label, small enough to keep beside an index.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.errors import FormatError
from hashnet.io import storage

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
        return np.flatnonzero(self.mask)

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
        kind: str,
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
        return _view(self.flat.xb, self.n * self.n_bits // 8, np.uint8).reshape(self.n, self.n_bits // 8)

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


def new_flat(n_bits: int, n: int) -> tuple[Any, np.ndarray]:
    """An IndexBinaryFlat with room for ``n`` rows, and the view of its codes to be filled in."""
    flat = faiss.IndexBinaryFlat(n_bits)
    flat.xb.resize(n * n_bits // 8)
    flat.ntotal = n
    return flat, _view(flat.xb, n * n_bits // 8, np.uint8).reshape(n, n_bits // 8)


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


def _view(vector: Any, size: int, dtype: type) -> np.ndarray:
    if size == 0:
        return np.empty(0, dtype=dtype)
    return faiss.rev_swig_ptr(vector.data(), size)
