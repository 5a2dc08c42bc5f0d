"""The numba kernels: distances counted per query, and the k best of each query."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from hashnet.popcount import popcount


@njit(parallel=True, nogil=True, cache=True)
def count(queries, query_sets, words, ids, sets, n_bits):  # type: ignore[no-untyped-def]
    """int64 (q, 2, n_bits + 1): all and relevant items at each distance."""
    out = np.zeros((len(queries), 2, n_bits + 1), dtype=np.int64)
    for i in prange(len(queries)):
        for j in range(words.shape[0]):
            distance = np.uint64(0)
            for w in range(words.shape[1]):
                distance += popcount(queries[i, w] ^ words[j, w])
            out[i, 0, distance] += 1
            if _relevant(query_sets, i, ids, sets, j):
                out[i, 1, distance] += 1
    return out


@njit(inline="always")
def _relevant(query_sets, i, ids, sets, j):  # type: ignore[no-untyped-def]
    if len(ids):
        c = ids[j]
        return (query_sets[c >> 6, i] >> np.uint64(c & 63)) & np.uint64(1) != 0
    for w in range(sets.shape[0]):
        if query_sets[w, i] & sets[w, j]:
            return True
    return False


@njit(parallel=True, nogil=True, cache=True)
def rank(queries, query_sets, words, ids, sets, hashes, counts, k):  # type: ignore[no-untyped-def]
    """uint64 (q, min(k, n)): the smallest keys of each query, ascending; items come by hash."""
    n = words.shape[0]
    out = np.zeros((len(queries), min(k, n)), dtype=np.uint64)
    for i in prange(len(queries)):
        slot = np.zeros(counts.shape[2], dtype=np.int64)
        for d in range(1, counts.shape[2]):
            slot[d] = slot[d - 1] + counts[i, 0, d - 1]
        for j in range(n):
            distance = np.uint64(0)
            for w in range(words.shape[1]):
                distance += popcount(queries[i, w] ^ words[j, w])
            at = slot[distance]
            if at < out.shape[1]:
                relevant = np.uint64(_relevant(query_sets, i, ids, sets, j))
                out[i, at] = (distance << np.uint64(53)) | (hashes[j] << np.uint64(1)) | relevant
                slot[distance] = at + 1
    return out
