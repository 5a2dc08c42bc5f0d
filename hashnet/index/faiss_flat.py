"""Results of FAISS's searches put into our order; and exact search by its IndexBinaryFlat, the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from hashnet.kernels import pad_columns

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


def top_k(
    flat: Any, queries: np.ndarray, k: int, allowed: np.ndarray | None = None, skip: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(positions int64, distances int32) (q, k) of the nearest rows; -1, -1 where there are none."""
    width = min(k, int(flat.ntotal))
    if width == 0 or len(queries) == 0:
        nothing = np.full((len(queries), k), -1, dtype=np.int64)
        return nothing, nothing.astype(np.int32)
    fetch = width if skip is None else min(width + 1, int(flat.ntotal))
    parameters, _alive = _selector(allowed)
    distances, positions = flat.search(queries, fetch, params=parameters)
    if skip is not None:
        positions, distances = drop(positions, distances, positions == skip[:, None])
    distances[positions < 0] = -1
    return pad_columns(positions, k), pad_columns(distances, k)


def within(
    flat: Any,
    queries: np.ndarray,
    radius: int,
    allowed: np.ndarray | None = None,
    skip: np.ndarray | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each query (positions, distances) of all rows with distance <= radius."""
    if len(queries) == 0:
        return []
    parameters, _alive = _selector(allowed)
    limits, distances, positions = flat.range_search(queries, min(radius, int(flat.d)) + 1, params=parameters)
    return split_hits(limits, positions, distances, skip)


def split_hits(
    limits: np.ndarray, ids: np.ndarray, distances: np.ndarray, skip: np.ndarray | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """FAISS range results as one (ids, distances) per query, ordered by (distance, id)."""
    results = []
    for q in range(len(limits) - 1):
        hits = slice(int(limits[q]), int(limits[q + 1]))
        found, far = ids[hits].astype(np.int64), distances[hits].astype(np.int32)
        if skip is not None:
            kept = found != skip[q]
            found, far = found[kept], far[kept]
        order = np.lexsort((found, far))
        results.append((found[order], far[order]))
    return results


def drop(ids: np.ndarray, distances: np.ndarray, unwanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (q, width) without the unwanted entries; the rest moves up, -1 fills the end."""
    ids = np.where(unwanted, -1, ids)
    order = np.argsort(ids < 0, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)


def _selector(allowed: np.ndarray | None) -> tuple[Any, Any]:
    """Search parameters that admit only the allowed rows, and what must outlive the call."""
    if allowed is None:
        return None, None
    bitmap = np.packbits(allowed != 0, bitorder="little")
    selector = faiss.IDSelectorBitmap(bitmap)
    return faiss.SearchParameters(sel=selector), (selector, bitmap)
