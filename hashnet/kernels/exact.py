"""Exact search over packed codes, on all available cores; and merging the results of several parts.

Positions are row numbers. A caller that keeps rows in id order gets results by (distance, id), one that keeps
them in the order of the tie hash gets the order of MAP.

>>> import numpy as np
>>> codes = np.array([[0b1111], [0b0011], [0b0000]], dtype=np.uint8)
>>> positions, distances = top_k(codes, np.array([[0b0001]], dtype=np.uint8), k=2)
>>> positions, distances
(array([[1, 2]]), array([[1, 1]], dtype=int32))
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from hashnet.codes import as_words
from hashnet.kernels.hamming import LONG, CodeRange, block_scratch, scan_radius, scan_top_k
from hashnet.kernels.jit import compiled, default_threads, memory_between, run_all

SMALL = 1_500_000  # comparisons of 64 bits below which waking another thread costs more than it saves
MIN_SLICE = 65_536  # rows of 64 bits worth a thread of their own
QUERIES_EACH = 8  # queries of a thread from which on the queries are divided and not the database
# The same for long codes: every thread that has some of the queries interleaves all rows.
LONG_QUERIES_EACH = 64


def top_k(
    codes: np.ndarray,
    queries: np.ndarray,
    k: int,
    *,
    allowed: np.ndarray | None = None,
    threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(positions int64, distances int32), both (q, k), of the k nearest rows; -1, -1 where there are none.

    ``codes`` uint8 (n, n_bytes) and ``queries`` uint8 (q, n_bytes), C-contiguous; ``allowed`` uint8
    (n,) marks the rows that may be found.
    """
    n, n_queries = len(codes), len(queries)
    width = min(k, n)
    flat, words, only = _arguments(codes, queries, allowed)
    by_query, ranges = divide(codes.shape, n_queries, threads, _queries_each(codes))

    def scan(low: int, high: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.full((last - first, width), -1, dtype=np.int64)
        distances = np.full((last - first, width), -1, dtype=np.int32)
        scan_top_k(
            CodeRange(flat, codes.shape[1], low, high),
            words[first:last],
            only,
            block_scratch(codes.shape[1] * 8),
            positions,
            distances,
        )
        return positions, distances

    if width and n_queries:
        parts = run_all([partial(scan, *bounds) for bounds in ranges])
    else:
        parts = [(np.zeros((n_queries, 0), np.int64), np.zeros((n_queries, 0), np.int32))]
    if by_query or len(parts) == 1:
        positions, distances = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return pad_columns(positions, k), pad_columns(distances, k)
    return merge_top_k([p for p, _ in parts], [d for _, d in parts], k)


def within_radius(
    codes: np.ndarray,
    queries: np.ndarray,
    radius: int,
    *,
    allowed: np.ndarray | None = None,
    threads: int | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each query (positions int64 (m,), distances int32 (m,)) of all rows with distance <= radius."""
    n_queries = len(queries)
    flat, words, only = _arguments(codes, queries, allowed)
    radius = min(radius, codes.shape[1] * 8)
    by_query, ranges = divide(codes.shape, n_queries, threads, _queries_each(codes))

    def scan(low: int, high: int, first: int, last: int) -> list[tuple[np.ndarray, np.ndarray]]:
        counts, positions, distances = scan_radius(
            CodeRange(flat, codes.shape[1], low, high),
            words[first:last],
            radius,
            only,
            block_scratch(codes.shape[1] * 8),
        )
        ends = np.cumsum(counts)[:-1]
        return list(zip(np.split(positions, ends), np.split(distances, ends), strict=True))

    if n_queries == 0:
        return []
    parts = run_all([partial(scan, *bounds) for bounds in ranges])
    if by_query or len(parts) == 1:
        return [hits for part in parts for hits in part]
    return [merge_hits(list(of_query)) for of_query in zip(*parts, strict=True)]


def warm_up(n_bits: int) -> None:
    """Compiles (or loads from disk) every kernel that codes of this length need."""
    codes = np.zeros((2, n_bits // 8), dtype=np.uint8)
    top_k(codes, codes, 1)
    within_radius(codes, codes, 0)
    merge_top_k([np.zeros((1, 1), np.int64)] * 2, [np.zeros((1, 1), np.int32)] * 2, 1)


def _arguments(
    codes: np.ndarray, queries: np.ndarray, allowed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, queries and filter as arrays of the one type each that the kernels are compiled for."""
    words = np.array(as_words(queries))  # a copy: aligned and writable whatever came
    return writable_bytes(codes), words, np.empty(0, np.uint8) if allowed is None else allowed


def writable_bytes(codes: np.ndarray) -> np.ndarray:
    """The same bytes, flat: numba would compile anew for read-only arrays, though nothing is written."""
    flat = codes.reshape(-1)
    if flat.flags.writeable:
        return flat
    return memory_between(flat.ctypes.data, flat.ctypes.data + flat.size)


def _queries_each(codes: np.ndarray) -> int:
    return LONG_QUERIES_EACH if codes.shape[1] > LONG else QUERIES_EACH


def divide(
    shape: tuple[int, ...],
    n_queries: int,
    threads: int | None,
    queries_each: int = QUERIES_EACH,
    small: int = SMALL,
) -> tuple[bool, list[tuple[int, int, int, int]]]:
    """(by query?, ranges (low, high, first, last)): many queries are divided, else the database is.

    ``shape`` is that of the codes, (n, n_bytes): a long code is the work of several short ones. Queries are
    divided where each thread gets at least ``queries_each``. Fewer than ``small`` comparisons stay whole.
    """
    n, words = shape[0], max(1, shape[1] // 8)
    threads = threads or default_threads()
    if threads == 1 or n * n_queries * words < small:
        return True, [(0, n, 0, n_queries)]
    if n_queries >= queries_each * threads:
        cuts = np.linspace(0, n_queries, threads + 1).astype(int)
        return True, [(0, n, int(a), int(b)) for a, b in pairwise(cuts)]
    pieces = max(1, min(threads, n * words // MIN_SLICE))
    cuts = np.linspace(0, n, pieces + 1).astype(int)
    return False, [(int(a), int(b), 0, n_queries) for a, b in pairwise(cuts)]


def merge_top_k(ids: list[np.ndarray], distances: list[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, distances) (q, k) of several parts (q, k_i), each ordered by (distance, id), -1 at the end."""
    if len(ids) == 1:
        return pad_columns(ids[0], k), pad_columns(distances[0], k)
    width = max(part.shape[1] for part in ids)
    merged_ids = np.full((len(ids[0]), k), -1, dtype=np.int64)
    merged_distances = np.full((len(ids[0]), k), -1, dtype=np.int32)
    merge_sorted(
        np.stack([pad_columns(part, width) for part in ids]),
        np.stack([pad_columns(part, width) for part in distances]),
        k,
        merged_ids,
        merged_distances,
    )
    return merged_ids, merged_distances


def merge_hits(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """One query's hits (ids, distances) of several parts, ordered by (distance, id)."""
    ids = np.concatenate([part for part, _ in parts])
    distances = np.concatenate([part for _, part in parts])
    order = np.lexsort((ids, distances))
    return ids[order], distances[order]


def pad_columns(array: np.ndarray, k: int, unused: float = -1) -> np.ndarray:
    """``array`` (q, width) cut or filled up with ``unused`` to (q, k)."""
    if array.shape[1] >= k:
        return np.ascontiguousarray(array[:, :k])
    wide = np.full((len(array), k), unused, dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide


@compiled
def merge_sorted(ids, distances, k, merged_ids, merged_distances):  # type: ignore[no-untyped-def]
    """Merges rows of ``ids`` and ``distances`` (parts, q, width), each by (distance, id), -1 at the end.

    Fills ``merged_ids`` int64 and ``merged_distances`` int32 (q, k); unused slots stay as they are.
    """
    n_parts, n_queries, width = ids.shape
    heads = np.empty(n_parts, np.int64)
    for q in range(n_queries):
        heads[:] = 0
        for slot in range(k):
            best = -1
            for p in range(n_parts):
                h = heads[p]
                if h == width or ids[p, q, h] < 0:
                    continue
                if best >= 0:
                    nearest, here = distances[best, q, heads[best]], distances[p, q, h]
                    if here > nearest or (here == nearest and ids[p, q, h] > ids[best, q, heads[best]]):
                        continue
                best = p
            if best < 0:
                break
            merged_ids[q, slot] = ids[best, q, heads[best]]
            merged_distances[q, slot] = distances[best, q, heads[best]]
            heads[best] += 1
