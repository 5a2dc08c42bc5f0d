"""Merge: results of several parts (slices, segments, machines) into one, by (distance, id)."""

from __future__ import annotations

import numpy as np

from hashnet.kernels import compiled


def merge(ids: list[np.ndarray], distances: list[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, distances) (q, k) of several parts (q, k_i), each ordered by (distance, id), -1 at the end."""
    if len(ids) == 1:
        return widen(ids[0], k), widen(distances[0], k)
    width = max(part.shape[1] for part in ids)
    merged_ids = np.full((len(ids[0]), k), -1, dtype=np.int64)
    merged_distances = np.full((len(ids[0]), k), -1, dtype=np.int32)
    merge_sorted(
        np.stack([widen(part, width) for part in ids]),
        np.stack([widen(part, width) for part in distances]),
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


def widen(array: np.ndarray, k: int) -> np.ndarray:
    """``array`` (q, width) cut or filled up with -1 to (q, k)."""
    if array.shape[1] >= k:
        return np.ascontiguousarray(array[:, :k])
    wide = np.full((len(array), k), -1, dtype=array.dtype)
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
