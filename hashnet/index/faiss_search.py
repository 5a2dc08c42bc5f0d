"""What FAISS finds, in our order: exact search by IndexBinaryFlat, the oracle, and a flat index on a GPU."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from hashnet.kernels import pad_columns

if TYPE_CHECKING:
    from hashnet.index.rows import StoredRows
    from hashnet.index.segment import Segment
    from hashnet.index.snapshot import Snapshot

SLACK = 16  # candidates requested beyond k: resolves most ties in one go
GPU_MAX_K = 2048
_BEYOND = 1 << 14  # larger than every distance: sorts to the end
_POSITION_BITS = 47  # a distance and a position sort as one integer

log = logging.getLogger(__name__)


def top_k(
    flat: Any, queries: np.ndarray, k: int, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(positions int64, distances int32) (q, k) of the nearest rows, as ``hashnet.kernels.top_k``."""
    width = min(k, int(flat.ntotal))
    if width == 0 or len(queries) == 0:
        nothing = np.full((len(queries), k), -1, dtype=np.int64)
        return nothing, nothing.astype(np.int32)
    parameters, _alive = _selector(allowed)
    distances, positions = flat.search(queries, width, params=parameters)
    distances[positions < 0] = -1
    return pad_columns(positions, k), pad_columns(distances, k)


def within_radius(
    flat: Any, queries: np.ndarray, radius: int, allowed: np.ndarray | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each query (positions, distances) of all rows with distance <= radius."""
    if len(queries) == 0:
        return []
    parameters, _alive = _selector(allowed)
    radius = min(radius, int(flat.d)) + 1  # FAISS means smaller than
    return split_hits(*flat.range_search(queries, radius, params=parameters))


def flat_of(codes: np.ndarray) -> Any:
    """An IndexBinaryFlat of a copy of the codes."""
    flat = faiss.IndexBinaryFlat(codes.shape[1] * 8)
    flat.add(codes)
    return flat


def _selector(allowed: np.ndarray | None) -> tuple[Any, Any]:
    """Search parameters that admit only the allowed rows, and what must outlive the call."""
    if allowed is None:
        return None, None
    bitmap = np.packbits(allowed != 0, bitorder="little")
    selector = faiss.IDSelectorBitmap(bitmap)
    return faiss.SearchParameters(sel=selector), (selector, bitmap)


def split_hits(
    limits: np.ndarray, distances: np.ndarray, ids: np.ndarray, kept: np.ndarray | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """FAISS range results as one (ids, distances) per query, by (distance, id); ``kept`` masks the hits."""
    results = []
    for q in range(len(limits) - 1):
        hits = np.arange(int(limits[q]), int(limits[q + 1]))
        hits = hits if kept is None else hits[kept[hits]]
        found, far = ids[hits].astype(np.int64), distances[hits].astype(np.int32)
        order = np.lexsort((found, far))
        results.append((found[order], far[order]))
    return results


def ordered(
    positions: np.ndarray, distances: np.ndarray, allowed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions, distances, hits per query) of allowed rows by (distance, position), -1 at the end."""
    left_out = positions < 0
    if allowed is not None:
        left_out |= allowed[positions] == 0
    keys = np.where(left_out, _BEYOND, distances).astype(np.int64) << _POSITION_BITS
    keys |= np.where(left_out, 0, positions)
    keys.sort(axis=1)
    positions, distances = keys & ((1 << _POSITION_BITS) - 1), keys >> _POSITION_BITS
    beyond = distances >= _BEYOND
    positions[beyond], distances[beyond] = -1, -1
    return positions, distances.astype(np.int32), (~beyond).sum(axis=1)


def why_no_gpu(state: Snapshot) -> str | None:
    """Why this index cannot be searched on a GPU by this process; None when it can."""
    if state.kind != "flat":
        return f"a {state.kind} index has no GPU form; kind='flat' has"
    if not state.segments:
        return "the index is empty"
    if not hasattr(faiss, "StandardGpuResources"):
        return "the installed FAISS has no GPU support (install hashnet[gpu] instead of hashnet[cluster])"
    if faiss.get_num_gpus() == 0:
        return "FAISS sees no GPU here"
    return None


class GpuFlat:
    """The codes of a flat index's main segment on GPU 0.

    GpuIndexBinaryFlat answers k <= 2048 and cuts ties anywhere. So more than k are requested; a query
    whose last hit is as far away as its k-th is searched again on the CPU.
    """

    def __init__(self, rows: StoredRows) -> None:
        self.rows = rows
        self._said = False
        self._lock = threading.Lock()  # a GPU index answers one caller at a time
        self._resources = faiss.StandardGpuResources()  # must outlive the index
        self._index: Any = faiss.index_binary_cpu_to_gpu(self._resources, 0, rows.flat)

    def holds(self, segment: Segment, k: int) -> bool:
        """Whether the GPU can answer for this segment; what it cannot, the CPU does."""
        if self.rows is not segment.rows:
            return False
        if k > GPU_MAX_K and not self._said:
            self._said = True
            log.warning("k = %d is beyond the GPU's %d; searching on the CPU", k, GPU_MAX_K)
        return k <= GPU_MAX_K

    def search(
        self, segment: Segment, queries: np.ndarray, k: int, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k), as ``Segment.search``."""
        n = len(segment.rows)
        fetch = min(n, GPU_MAX_K, 2 * k + 64)
        with self._lock:
            far, near = self._index.search(queries, fetch)
        mask = None if segment.live is None else segment.live.mask
        positions, distances, count = ordered(near.astype(np.int64), far, mask)
        ids = segment.rows.ids_at(pad_columns(positions, k))
        distances = pad_columns(distances, k)
        unsure = (count < k) | (far[:, -1] <= distances[:, -1])
        if fetch < n and unsure.any():
            ids[unsure], distances[unsure] = segment.search(queries[unsure], k, None, engine)
        return ids, distances
