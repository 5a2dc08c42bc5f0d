"""Candidates that FAISS found in no particular order, put into the order of every search: (distance, id)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hashnet.index.segment import Segment

SLACK = 16  # candidates requested beyond k: resolves most ties in one go
ID_BITS = 47  # ids below 2**47 sort as one integer together with their distance
_BEYOND = 1 << 14  # larger than every distance: sorts to the end


def ordered(
    segment: Segment, ids: np.ndarray, distances: np.ndarray, exclude: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, distances, hits per query) by (distance, id), -1 at the end; none removed or excluded."""
    left_out = ids < 0
    if len(segment.dead):
        left_out |= np.isin(ids, segment.rows.ids[segment.dead])
    if exclude is not None:
        left_out |= ids == exclude[:, None]
    distances = distances.astype(np.int64)
    distances[left_out] = _BEYOND
    if ids.max(initial=0) < 1 << ID_BITS:
        keys = (distances << ID_BITS) | np.where(left_out, 0, ids)
        keys.sort(axis=1)
        ids, distances = keys & ((1 << ID_BITS) - 1), keys >> ID_BITS
    else:
        order = np.lexsort((ids, distances), axis=1)
        ids, distances = np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)
    beyond = distances >= _BEYOND
    ids[beyond], distances[beyond] = -1, -1
    return ids, distances.astype(np.int32), (~beyond).sum(axis=1)


def most_hits(segment: Segment, n_queries: int, k: int, exclude: np.ndarray | None) -> np.ndarray:
    """How many hits each query can have at most, int64 (q,)."""
    available = np.full(n_queries, segment.n_live, dtype=np.int64)
    if exclude is not None:
        available -= segment.find(exclude) >= 0
    return np.minimum(available, k)


def live_hits(
    segment: Segment, hits: list[tuple[np.ndarray, np.ndarray]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The hits (ids, distances) of each query without those on removed rows."""
    if not len(segment.dead):
        return hits
    dead = segment.rows.ids[segment.dead]
    live = [~np.isin(near, dead, assume_unique=True) for near, _ in hits]
    return [(near[kept], far[kept]) for (near, far), kept in zip(hits, live, strict=True)]
