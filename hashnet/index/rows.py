"""Rows: the codes and ids inside one FAISS index, seen as arrays in id order.

FAISS owns the memory (or the memory map); the arrays are views into it, so nothing is held twice.
The index on disk knows the true ids: a plain Flat / MultiHash / HNSW where ids are 0..n-1, the same
inside an IDMap where they are not, and IVF lists carry ids anyway.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import faiss
import numpy as np

from hashnet.errors import FormatError
from hashnet.index.postings import Postings
from hashnet.kernels import InvertedLists

CLASSES = {
    "flat": faiss.IndexBinaryFlat,
    "ivf": faiss.IndexBinaryIVF,
    "multihash": faiss.IndexBinaryMultiHash,
    "hnsw": faiss.IndexBinaryHNSW,
}


class Rows:
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
        if not isinstance(self.inner, CLASSES[kind]):
            raise FormatError(f"this is not a {kind} index but {type(self.inner).__name__}")
        self.n_bits, self.n = int(index.d), int(index.ntotal)

    def __len__(self) -> int:
        return self.n

    @property
    def flat(self) -> Any:
        """The IndexBinaryFlat that holds the codes; IVF has none."""
        if self.kind == "flat":
            return self.inner
        return faiss.downcast_IndexBinary(self.inner.storage)

    def in_memory(self) -> Any:
        """``index`` for a writer: FAISS writes mapped lists as the name of their file, so they are copied."""
        if not (self.mapped and self.kind == "ivf"):
            return self.index
        mapped = self.inner
        lists = faiss.ArrayInvertedLists(mapped.nlist, self.n_bits // 8)
        mapped.invlists.copy_subset_to(lists, faiss.InvertedLists.SUBSET_TYPE_INVLIST, 0, mapped.nlist)
        copy = faiss.IndexBinaryIVF(mapped.quantizer, self.n_bits, mapped.nlist)
        copy.replace_invlists(lists, True)  # from here on the copy's
        lists.this.disown()
        copy.ntotal, copy.nprobe = self.n, mapped.nprobe
        return copy

    @cached_property
    def codes(self) -> np.ndarray:
        """uint8 (n, n_bits // 8) in id order: a view, except for IVF, whose lists are gathered."""
        if self.kind == "ivf":
            return self.take(np.arange(self.n))
        return _view(self.flat.xb, self.n * self.n_bits // 8, np.uint8).reshape(self.n, self.n_bits // 8)

    @cached_property
    def ids(self) -> np.ndarray:
        """int64 (n,), ascending."""
        if self.kind == "ivf":
            return self._lists[0]
        if self.is_id_map:
            return _view(self.index.id_map, self.n, np.int64)
        return np.arange(self.n, dtype=np.int64)

    @cached_property
    def inverted(self) -> InvertedLists:
        """IVF: where FAISS keeps or maps its lists, for the kernel."""
        lists, n_bytes = self.inner.invlists, self.n_bits // 8
        sizes = np.array([lists.list_size(i) for i in range(self.inner.nlist)], dtype=np.int64)
        code_at, id_at = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        for i in np.flatnonzero(sizes):
            code_at[i] = faiss.rev_swig_ptr(lists.get_codes(int(i)), 1).ctypes.data
            id_at[i] = faiss.rev_swig_ptr(lists.get_ids(int(i)), 1).ctypes.data
        used = sizes > 0
        starts = np.concatenate([code_at[used], id_at[used]])
        ends = np.concatenate([(code_at + sizes * n_bytes)[used], (id_at + sizes * 8)[used]])
        low, high = (int(starts.min()), int(ends.max())) if used.any() else (0, 0)
        memory = np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), np.uint8)
        return InvertedLists(memory, code_at - low, id_at - low, sizes, n_bytes)

    @cached_property
    def centroids(self) -> np.ndarray:
        """IVF: the code at the centre of each list, uint8 (nlist, n_bits // 8)."""
        quantizer = faiss.downcast_IndexBinary(self.inner.quantizer)
        size = self.inner.nlist * self.n_bits // 8
        return faiss.rev_swig_ptr(quantizer.xb.data(), size).reshape(self.inner.nlist, -1).copy()

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """IVF: ids ascending, and for each the list and the place in the list it lies at."""
        lists = self.inner.invlists
        sizes = np.array([lists.list_size(i) for i in range(self.inner.nlist)], dtype=np.int64)
        ids = np.empty(int(sizes.sum()), dtype=np.int64)
        for i, start in enumerate(np.cumsum(sizes) - sizes):
            if sizes[i]:
                ids[start : start + sizes[i]] = faiss.rev_swig_ptr(lists.get_ids(i), int(sizes[i]))
        order = np.argsort(ids, kind="stable")
        of_list = np.repeat(np.arange(len(sizes)), sizes)[order]
        place = order - (np.cumsum(sizes) - sizes)[of_list]
        return ids[order], of_list, place

    def take(self, positions: np.ndarray) -> np.ndarray:
        """A copy of the codes at these positions."""
        if self.kind != "ivf":
            return self.codes[positions]
        _, of_list, place = self._lists
        taken = np.empty((len(positions), self.n_bits // 8), dtype=np.uint8)
        lists = self.inner.invlists
        order = np.argsort(of_list[positions], kind="stable")
        numbers, starts = np.unique(of_list[positions][order], return_index=True)
        for i, here in zip(numbers, np.split(order, starts)[1:], strict=True):
            size = lists.list_size(int(i)) * self.n_bits // 8
            codes = faiss.rev_swig_ptr(lists.get_codes(int(i)), size).reshape(-1, self.n_bits // 8)
            taken[here] = codes[place[positions[here]]]
        return taken

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id, int64; -1 where it is not here."""
        if not self.is_id_map and self.kind != "ivf":
            return np.where((ids >= 0) & (ids < self.n), ids, -1)
        if not self.n:
            return np.full(len(ids), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.ids, ids), self.n - 1)
        return np.where(self.ids[places] == ids, places, -1)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Ids at positions of any shape; -1 stays -1."""
        if not self.is_id_map and self.kind != "ivf":
            return positions
        if not self.n:
            return np.full_like(positions, -1)
        return np.where(positions >= 0, self.ids[positions], -1)

    def check(self) -> None:
        """FormatError unless sizes agree and ids ascend: what a search relies on."""
        if self.is_id_map and int(self.index.id_map.size()) != self.n:
            raise FormatError(f"{self.n} codes came with {self.index.id_map.size()} ids")
        if self.kind != "ivf":
            if int(self.flat.ntotal) != self.n or int(self.flat.xb.size()) != self.n * self.n_bits // 8:
                raise FormatError(
                    f"{self.n} codes of {self.n_bits} bits came with {self.flat.xb.size()} bytes"
                )
            if self.is_id_map and self.n and not (self.ids[0] >= 0 and (np.diff(self.ids) > 0).all()):
                raise FormatError("its ids do not ascend")

    def rehash(self) -> None:
        """Fills a multihash anew where its file lost a table: one whose rows all lie in one bucket.

        FAISS stores a bucket's size in as many bits as an id takes: of 2**m rows, m bits, where 2**m
        reads as 0. Filling always would take ten times as long as reading.
        """
        if self.n & (self.n - 1):
            return
        codes = self.codes.copy()  # the view goes with what is reset
        differ = np.bitwise_or.reduce(codes, axis=0) ^ np.bitwise_and.reduce(codes, axis=0)
        tables = np.unpackbits(differ, bitorder="little")[: self.inner.nhash * self.inner.b]
        if tables.reshape(self.inner.nhash, self.inner.b).any(axis=1).all():
            return
        del self.codes
        self.inner.reset()
        self.inner.add(codes)


def new_flat(n_bits: int, n: int) -> tuple[Any, np.ndarray]:
    """An IndexBinaryFlat with room for ``n`` rows, and the view of its codes to be filled in."""
    flat = faiss.IndexBinaryFlat(n_bits)
    flat.xb.resize(n * n_bits // 8)
    flat.ntotal = n
    return flat, _view(flat.xb, n * n_bits // 8, np.uint8).reshape(n, n_bits // 8)


def flat_rows(flat: Any, ids: np.ndarray | None, postings: Postings | None) -> Rows:
    """Rows of a filled flat index; ids None are 0..n-1, others ascend."""
    if ids is None:
        return Rows(flat, "flat", postings)
    n, flat.ntotal = int(flat.ntotal), 0  # FAISS wraps only what looks empty
    index = faiss.IndexBinaryIDMap(flat)
    index.id_map.resize(n)
    _view(index.id_map, n, np.int64)[:] = ids
    flat.ntotal = index.ntotal = n
    return Rows(index, "flat", postings)


def _view(vector: Any, size: int, dtype: type) -> np.ndarray:
    if size == 0:
        return np.empty(0, dtype=dtype)
    return faiss.rev_swig_ptr(vector.data(), size)
