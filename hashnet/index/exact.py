"""Exact search over packed codes by our kernel, on as many cores as there are.

Positions are row numbers; the caller keeps rows in id order, so that (distance, position) is
(distance, id).

>>> import numpy as np
>>> codes = np.array([[0b1111], [0b0011], [0b0000]], dtype=np.uint8)
>>> positions, distances = top_k(codes, np.array([[0b0001]], dtype=np.uint8), k=2)
>>> positions, distances
(array([[1, 2]]), array([[1, 1]], dtype=int32))
"""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise

import numpy as np

from hashnet.codes import as_words
from hashnet.index.merge import merge, merge_hits, widen
from hashnet.kernels import default_threads, hamming, run_all

SMALL = 500_000  # comparisons below which waking another thread costs more than it saves
MIN_SLICE = 65_536  # rows of the database worth a thread of their own


def top_k(
    codes: np.ndarray,
    queries: np.ndarray,
    k: int,
    *,
    allowed: np.ndarray | None = None,
    skip: np.ndarray | None = None,
    threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(positions int64, distances int32), both (q, k), of the k nearest rows; -1, -1 where there are none.

    ``codes`` uint8 (n, n_bytes) and ``queries`` uint8 (q, n_bytes), C-contiguous; ``allowed`` uint8
    (n,) marks the rows that may be found; ``skip`` int64 (q,) is one row each query must not find.
    """
    n, n_queries = len(codes), len(queries)
    width = min(k, n)
    flat, words, allowed, skip = _arguments(codes, queries, allowed, skip)
    by_query, ranges = _cut(n, n_queries, threads)

    def scan(low: int, high: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.full((last - first, width), -1, dtype=np.int64)
        distances = np.full((last - first, width), -1, dtype=np.int32)
        hamming.scan_top_k(
            flat,
            codes.shape[1],
            low,
            high,
            words[first:last],
            codes.shape[1] * 8,
            width,
            allowed,
            skip[first:last],
            scratch(codes.shape[1] * 8),
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
        return widen(positions, k), widen(distances, k)
    return merge([p for p, _ in parts], [d for _, d in parts], k)


def within(
    codes: np.ndarray,
    queries: np.ndarray,
    radius: int,
    *,
    allowed: np.ndarray | None = None,
    skip: np.ndarray | None = None,
    threads: int | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each query (positions int64 (m,), distances int32 (m,)) of all rows with distance <= radius."""
    n, n_queries = len(codes), len(queries)
    flat, words, allowed, skip = _arguments(codes, queries, allowed, skip)
    radius = min(radius, codes.shape[1] * 8)
    by_query, ranges = _cut(n, n_queries, threads)

    def scan(low: int, high: int, first: int, last: int) -> list[tuple[np.ndarray, np.ndarray]]:
        counts, positions, distances = hamming.scan_radius(
            flat,
            codes.shape[1],
            low,
            high,
            words[first:last],
            codes.shape[1] * 8,
            radius,
            allowed,
            skip[first:last],
            scratch(codes.shape[1] * 8),
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
    within(codes, codes, 0)
    merge([np.zeros((1, 1), np.int64)] * 2, [np.zeros((1, 1), np.int32)] * 2, 1)


def _arguments(
    codes: np.ndarray, queries: np.ndarray, allowed: np.ndarray | None, skip: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arrays of the one type each that the kernels are compiled for."""
    flat = codes.reshape(-1)
    if not flat.flags.writeable:  # numba would compile anew for read-only arrays; nothing is written
        flat = np.frombuffer(
            memoryview((ctypes.c_uint8 * flat.size).from_address(flat.ctypes.data)), np.uint8
        )
    words = np.array(as_words(queries))  # a copy: aligned and writable whatever came
    if skip is None:
        skip = np.full(len(queries), -1, dtype=np.int64)
    return flat, words, np.empty(0, np.uint8) if allowed is None else allowed, skip


def _cut(n: int, n_queries: int, threads: int | None) -> tuple[bool, list[tuple[int, int, int, int]]]:
    """(by query?, ranges (low, high, first, last)): many queries are cut, else the database is."""
    threads = threads or default_threads()
    if threads == 1 or n * n_queries < SMALL:
        return True, [(0, n, 0, n_queries)]
    if n_queries >= 8 * threads:
        cuts = np.linspace(0, n_queries, threads + 1).astype(int)
        return True, [(0, n, int(a), int(b)) for a, b in pairwise(cuts)]
    pieces = max(1, min(threads, n // MIN_SLICE))
    cuts = np.linspace(0, n, pieces + 1).astype(int)
    return False, [(int(a), int(b), 0, n_queries) for a, b in pairwise(cuts)]


def scratch(n_bits: int) -> np.ndarray:
    """Room for the distances of one block; n_bits + 1 must fit as "beyond everything"."""
    dtype = np.uint8 if n_bits < 255 else np.uint16
    return np.empty(hamming.BLOCK + hamming.LANES, dtype=dtype)
