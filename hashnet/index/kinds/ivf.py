"""ivf: codes in lists around k-means centroids, of which the nprobe nearest are scanned. Approximate.

Our kernel keeps ties while it scans lists. Too few hits (filters, removed rows, short lists) widen the
search: a query gets fewer than k only if the index holds fewer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import faiss
import numpy as np

from hashnet.codes import as_words
from hashnet.errors import FormatError
from hashnet.index.artefact import HEADER
from hashnet.index.faiss_search import split_hits
from hashnet.index.rows import Selection, StoredRows, codes_in
from hashnet.index.segment import IndexKind, KindOptions, Segment, option
from hashnet.kernels import (
    InvertedLists,
    block_scratch,
    default_threads,
    memory_between,
    pad_columns,
    run_all,
    scan_lists,
    top_k,
)

QUERIES_PER_THREAD = 16  # fewer are answered before another thread has woken up
TRAIN_PER_LIST = 64  # codes k-means sees per list: enough for balanced lists, and fast
ADDED_AT_ONCE = 1 << 20  # codes assigned to lists at once
NO_IDS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class IvfOptions(KindOptions):
    """``nlist`` lists (0: about the square root of n), ``nprobe`` of them are scanned (0: nlist / 64)."""

    nlist: int = option(0, "lists (none: about sqrt(n))", low=1)
    nprobe: int = option(0, "lists scanned per query (none: nlist / 64)", low=1)
    seed: int = option(0, "seed of k-means (none: 0)")


class ListRows(StoredRows):
    """Rows in inverted lists, each list in id order: ids and codes are gathered from them."""

    has_plain_ids = False

    def writable(self) -> Any:
        """``index`` for a writer: FAISS writes mapped lists as the name of their file, so they are copied."""
        if not self.mapped:
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
        """uint8 (n, n_bits // 8) in id order: a copy."""
        return self.take(np.arange(self.n))

    @cached_property
    def ids(self) -> np.ndarray:
        """int64 (n,), ascending."""
        return self._places[0]

    @cached_property
    def inverted(self) -> InvertedLists:
        """Where FAISS keeps or maps the lists, for the kernel."""
        lists, n_bytes, sizes = self.inner.invlists, self.n_bits // 8, self._sizes
        code_at, id_at = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        for i in np.flatnonzero(sizes):
            code_at[i] = faiss.rev_swig_ptr(lists.get_codes(int(i)), 1).ctypes.data
            id_at[i] = faiss.rev_swig_ptr(lists.get_ids(int(i)), 1).ctypes.data
        used = sizes > 0
        starts = np.concatenate([code_at[used], id_at[used]])
        ends = np.concatenate([(code_at + sizes * n_bytes)[used], (id_at + sizes * 8)[used]])
        low, high = (int(starts.min()), int(ends.max())) if used.any() else (0, 0)
        return InvertedLists(memory_between(low, high), code_at - low, id_at - low, sizes, n_bytes)

    @cached_property
    def centroids(self) -> np.ndarray:
        """The code at the centre of each list, uint8 (nlist, n_bits // 8)."""
        quantizer = faiss.downcast_IndexBinary(self.inner.quantizer)
        size = self.inner.nlist * self.n_bits // 8
        return faiss.rev_swig_ptr(quantizer.xb.data(), size).reshape(self.inner.nlist, -1).copy()

    @cached_property
    def _sizes(self) -> np.ndarray:
        lists = self.inner.invlists
        return np.array([lists.list_size(i) for i in range(self.inner.nlist)], dtype=np.int64)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids ascending, and for each the list and the place in the list it lies at."""
        lists, sizes = self.inner.invlists, self._sizes
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
        _, of_list, place = self._places
        taken = np.empty((len(positions), self.n_bits // 8), dtype=np.uint8)
        lists = self.inner.invlists
        order = np.argsort(of_list[positions], kind="stable")
        numbers, starts = np.unique(of_list[positions][order], return_index=True)
        for i, here in zip(numbers, np.split(order, starts)[1:], strict=True):
            size = lists.list_size(int(i)) * self.n_bits // 8
            codes = faiss.rev_swig_ptr(lists.get_codes(int(i)), size).reshape(-1, self.n_bits // 8)
            taken[here] = codes[place[positions[here]]]
        return taken

    def check(self) -> None:
        """FAISS has checked the sizes of its lists."""

    def probing(self, nprobe: int) -> Any:
        """The same lists as a FAISS index with another nprobe, which a radius search takes from the index."""
        view = faiss.IndexBinaryIVF(self.inner.quantizer, self.n_bits, self.inner.nlist)  # owns neither
        view.replace_invlists(self.inner.invlists, False)
        view.ntotal, view.nprobe = self.n, nprobe
        return view


class Ivf(IndexKind):
    name = "ivf"
    summary = "approximate and faster, by lists"
    options = IvfOptions
    faiss_class = faiss.IndexBinaryIVF
    exact = False
    map_flags = faiss.IO_FLAG_MMAP
    rows_class = ListRows
    has_kernel = True
    scans_selections = True

    def complete(self, options: IvfOptions, n_bits: int, n: int) -> IvfOptions:
        nlist = min(options.nlist or _default_lists(n), max(1, n))
        nprobe = min(options.nprobe or max(1, nlist // 64), nlist)
        return dataclasses.replace(options, nlist=nlist, nprobe=nprobe)

    def build(
        self, options: IvfOptions, flat: Any, ids: np.ndarray | None, centroids: np.ndarray | None
    ) -> Any:
        """``centroids`` reuses the lists of an earlier index instead of running k-means."""
        n_bits, codes = flat.d, codes_in(flat)
        ids = np.arange(len(codes), dtype=np.int64) if ids is None else ids
        if centroids is None:
            centroids = train_centroids(codes, options.nlist, options.seed)
        quantizer = faiss.IndexBinaryFlat(n_bits)
        quantizer.add(centroids)
        ivf = faiss.IndexBinaryIVF(quantizer, n_bits, len(centroids))
        ivf.own_fields = True  # the quantizer lives as long as the index
        quantizer.this.disown()
        ivf.nprobe = options.nprobe
        for start in range(0, len(codes), ADDED_AT_ONCE):  # ascending ids: each list stays in id order
            block = np.ascontiguousarray(codes[start : start + ADDED_AT_ONCE])
            # the lowest number of equally near lists, as in FAISS
            lists = np.ascontiguousarray(top_k(centroids, block, 1)[0][:, 0])
            block_ids = np.ascontiguousarray(ids[start : start + ADDED_AT_ONCE], dtype=np.int64)
            ivf.add_core(len(block), faiss.swig_ptr(block), faiss.swig_ptr(block_ids), faiss.swig_ptr(lists))
        return ivf

    def check_opened(self, rows: ListRows, options: IvfOptions, where: str) -> None:
        if int(rows.inner.nlist) != options.nlist:
            raise FormatError(f"{where} has {rows.inner.nlist} lists, {HEADER} says {options.nlist}")

    def kept_centroids(self, rows: ListRows) -> np.ndarray:
        return rows.centroids

    def search(
        self, segment: Segment, queries: np.ndarray, k: int, only: Selection | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Among the lists scanned: nprobe, more where k hits need more. A small selection is exact."""
        if only is not None and only.is_small:
            return segment.exact_search(queries, k, only, engine)
        options = segment.options
        assert isinstance(options, IvfOptions)
        ids = np.full((len(queries), k), -1, dtype=np.int64)
        distances = np.full((len(queries), k), -1, dtype=np.int32)
        wanted = min(k, len(segment.rows) if only is None else len(only))
        nprobe, short = options.nprobe, np.arange(len(queries))
        while len(short):
            ids[short], distances[short], count = _scan(segment, queries[short], k, only, nprobe)
            short = short[count < wanted] if nprobe < options.nlist else short[:0]
            nprobe = min(options.nlist, nprobe * 4)
        return ids, distances

    def search_radius(
        self, segment: Segment, queries: np.ndarray, radius: int, only: Selection | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Among the nprobe nearest lists. A small selection is exact."""
        if not len(queries):
            return []
        if only is not None and only.is_small:
            return segment.exact_search_radius(queries, radius, only, engine)
        rows, options = segment.rows, segment.options
        assert isinstance(rows, ListRows)
        assert isinstance(options, IvfOptions)
        lists = rows.probing(options.nprobe)
        limits, distances, ids = lists.range_search(queries, min(radius, rows.n_bits) + 1)
        kept = None if only is None else only.mask[rows.find(ids)] == 1
        return split_hits(limits, distances, ids, kept)


def train_centroids(codes: np.ndarray, nlist: int, seed: int) -> np.ndarray:
    """Binary k-means: ``nlist`` codes, uint8 (nlist, n_bits // 8), of a sample of the codes."""
    rng = np.random.default_rng(seed)
    if len(codes) > nlist * TRAIN_PER_LIST:
        codes = codes[np.sort(rng.choice(len(codes), nlist * TRAIN_PER_LIST, replace=False))]
    n_bits = codes.shape[1] * 8
    quantizer = faiss.IndexBinaryFlat(n_bits)
    ivf = faiss.IndexBinaryIVF(quantizer, n_bits, nlist)
    ivf.cp.seed = seed + 1
    ivf.cp.min_points_per_centroid = 1  # small lists are the caller's choice: no warning
    ivf.train(np.ascontiguousarray(codes))
    return faiss.rev_swig_ptr(quantizer.xb.data(), nlist * n_bits // 8).reshape(nlist, -1).copy()


def _default_lists(n: int) -> int:
    """The power of two near sqrt(n), with at least 39 codes per list, as k-means needs."""
    return max(1, min(2 ** round(math.log2(max(1.0, math.sqrt(n)))), n // 39))


def _scan(
    segment: Segment, queries: np.ndarray, k: int, only: Selection | None, nprobe: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, distances, hits per query) of the selected rows of the ``nprobe`` nearest lists."""
    rows, n_queries = segment.rows, len(queries)
    assert isinstance(rows, ListRows)
    lists = rows.inverted
    probes, _ = top_k(rows.centroids, queries, nprobe)
    words = np.array(as_words(queries))
    listed, allowed = NO_IDS, False
    if only is not None and only is segment.live:  # removed rows are fewer than those left
        listed = rows.ids[segment.dead]
    elif only is not None:
        listed, allowed = rows.ids[only.positions], True
    width = min(k, len(rows))
    ids = np.full((n_queries, width), -1, dtype=np.int64)
    distances = np.full((n_queries, width), -1, dtype=np.int32)

    def scan(part: slice) -> np.ndarray:
        scratch = block_scratch(rows.n_bits)
        return scan_lists(
            lists, probes[part], words[part], listed, allowed, scratch, ids[part], distances[part]
        )

    threads = min(default_threads(), max(1, n_queries // QUERIES_PER_THREAD))
    cuts = np.linspace(0, n_queries, threads + 1).astype(int)
    counts = run_all([partial(scan, slice(a, b)) for a, b in pairwise(cuts)])
    return pad_columns(ids, k), pad_columns(distances, k), np.concatenate(counts)
