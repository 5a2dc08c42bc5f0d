"""Exact search by FAISS's own IndexBinaryFlat: the oracle, and the engine where it is the faster one.

The same arguments and results as ``exact``. ``range_search`` of FAISS is strictly smaller than its
radius, hence the + 1.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from hashnet.kernels import pad_columns


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
