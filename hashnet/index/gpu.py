"""A flat index on a GPU: FAISS finds the candidates there, ties are settled as everywhere.

GpuIndexBinaryFlat answers k <= 2048 and cuts ties anywhere. So more than k are asked for; a query
whose last one is as far as its k-th is answered again on the CPU.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import faiss
import numpy as np

from hashnet.index.faiss_flat import ordered
from hashnet.index.segment import Segment
from hashnet.index.snapshot import Snapshot
from hashnet.index.stored_rows import StoredRows
from hashnet.kernels import pad_columns

MAX_K = 2048
log = logging.getLogger(__name__)


def why_not(state: Snapshot) -> str | None:
    """Why this index cannot be searched on a GPU by this process; None when it can."""
    if state.kind != "flat":
        return f"a {state.kind} index has no GPU form; kind='flat' has"
    if not state.segments:
        return "the index is empty"
    if not hasattr(faiss, "StandardGpuResources"):
        return "the installed FAISS has no GPU support (install hashnet[gpu] instead of hashnet[cpu])"
    if faiss.get_num_gpus() == 0:
        return "FAISS sees no GPU here"
    return None


class GpuFlat:
    """The codes of a flat index's main segment on GPU 0."""

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
        if k > MAX_K and not self._said:
            self._said = True
            log.warning("k = %d is beyond the GPU's %d; searching on the CPU", k, MAX_K)
        return k <= MAX_K

    def search(
        self, segment: Segment, queries: np.ndarray, k: int, exclude: np.ndarray | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k), as ``Segment.search``."""
        n = len(segment.rows)
        fetch = min(n, MAX_K, 2 * k + 64)
        with self._lock:
            found, near = self._index.search(queries, fetch)
        cut_at = found[:, -1].copy()
        ids = segment.rows.ids_at(near.astype(np.int64))
        ids, distances, count = ordered(segment, ids, found, exclude)
        ids, distances = pad_columns(ids, k), pad_columns(distances, k)
        unsure = (count >= k) & (cut_at <= distances[:, -1]) | (count < k)
        if fetch < n and unsure.any():
            some = None if exclude is None else exclude[unsure]
            ids[unsure], distances[unsure] = segment.search(queries[unsure], k, None, some, engine)
        return ids, distances
