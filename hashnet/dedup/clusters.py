"""Clusters of near-duplicates: connected components of pairs, by union-find in linear memory.

>>> ids, clusters = connected_components(np.array([1, 5, 9]), np.array([5, 7, 12]))
>>> ids.tolist(), clusters.tolist()
([1, 5, 7, 9, 12], [1, 1, 1, 9, 9])
"""

from __future__ import annotations

import numpy as np

from hashnet.kernels import compiled


def connected_components(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, clusters) int64 (m,): every id of the pairs (a, b) once, ascending, with its cluster.

    A cluster is named by its smallest id.
    """
    ids, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    root = _roots(places[: len(a)], places[len(a) :], len(ids))
    return ids, ids[root]


def spanning_forest(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """Positions int64 of those edges (a, b) between nodes 0 … n - 1 that join two components."""
    return _forest(a, b, n)[0]


def _roots(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    parent = _forest(a, b, n)[1]
    while (parent[parent] != parent).any():
        parent = parent[parent]
    return parent


@compiled
def _forest(a, b, n):  # type: ignore[no-untyped-def]
    """(edges that joined two trees, parent of each node); the root of a tree is its smallest node."""
    parent = np.arange(n)
    kept = np.empty(min(len(a), n), dtype=np.int64)
    count = 0
    for e in range(len(a)):
        x, y = a[e], b[e]
        while parent[x] != x:  # path halving
            parent[x] = parent[parent[x]]
            x = parent[x]
        while parent[y] != y:
            parent[y] = parent[parent[y]]
            y = parent[y]
        if x != y:
            parent[max(x, y)] = min(x, y)
            kept[count] = e
            count += 1
    return kept[:count].copy(), parent
