"""Precision and recall as curves: of the top N for every N up to k, and within each Hamming radius."""

from __future__ import annotations

import numpy as np

from hashnet.kernels import compiled

ALL_RANKS = 10_000  # beyond this many ranks a curve keeps every rank to 1,000 and then about 4,600 per decade


def rank_sums(relevance: np.ndarray, n_relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Summed over queries: hits int64 (m,) and recall float64 (m,) within the top 1 … m.

    ``relevance`` uint8 (q, m) by rank. Hits / (N q) is precision at N; a query without a relevant
    item in the database has recall 0.
    """
    return _rank_sums(relevance, n_relevant)


@compiled
def _rank_sums(relevance, n_relevant):  # type: ignore[no-untyped-def]
    """``rank_sums``, one query after another: the hits so far are added at every rank."""
    q, m = relevance.shape
    hits = np.zeros(m, dtype=np.int64)
    recall = np.zeros(m, dtype=np.float64)
    for i in range(q):
        found = 0
        one = 1.0 / max(n_relevant[i], 1)
        for r in range(m):
            found += relevance[i, r]
            hits[r] += found
            recall[r] += found * one
    return hits, recall


def curve_ranks(k: int) -> np.ndarray:
    """The ranks a curve up to k is kept at, int64: all of them unless k is large."""
    if k <= ALL_RANKS:
        return np.arange(1, k + 1)
    further = np.geomspace(1000, k, int(2000 * np.log(k / 1000)) + 2).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(1, 1001), further]))


def within_radius(all_items: np.ndarray, relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision and recall float64, and emptiness bool, (q, n_bits + 1) each: column r is radius r.

    Precision of a ball = relevant items in it / items in it, 0 for an empty ball. Recall = relevant
    items in it / relevant items in the database, 0 where the database has none.
    """
    items, hits = np.cumsum(all_items, axis=1), np.cumsum(relevant, axis=1)
    return hits / np.maximum(items, 1), hits / np.maximum(hits[:, -1:], 1), items == 0
