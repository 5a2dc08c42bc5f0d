"""StoredRows: the codes and ids inside one FAISS index, seen as arrays in id order.

FAISS owns the memory (or the memory map); the arrays are views into it, so nothing is held twice.
The index on disk knows the true ids: a plain Flat / MultiHash / HNSW where ids are 0..n-1, the same
inside an IDMap where they are not, and IVF lists carry ids anyway.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import faiss
import numpy as np

from hashnet.errors import FormatError
from hashnet.index.postings import Postings


class StoredRows:
    """Frozen rows: ``ids`` ascending int64 (n,), ``codes`` uint8 (n, n_bits // 8), label postings.

    ``index`` is what FAISS writes and reads; ``inner`` the index inside an IDMap, or the same.
    Both arrays are views: whoever uses them keeps this object alive.
    """

    def __init__(
        self, index: Any, kind: str, postings: Postings | None = None, *, mapped: bool = False
    ) -> None:
        self.index, self.kind, self.postings, self.mapped = index, kind, postings, mapped
        self.is_id_map = isinstance(index, faiss.IndexBinaryIDMap)
        # a downcast view of what index owns: index must outlive it, so both stay here
        self.inner = faiss.downcast_IndexBinary(index.index) if self.is_id_map else index
        self.n_bits, self.n = int(index.d), int(index.ntotal)

    def __len__(self) -> int:
        return self.n

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
