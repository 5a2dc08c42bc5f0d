"""flat: every code is compared. Exact, memory-mapped, and the yardstick of the other kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from hashnet.index.kinds.base import IndexKind, KindOptions
from hashnet.index.stored_rows import new_flat, with_flat_ids


@dataclass(frozen=True)
class FlatOptions(KindOptions):
    """Exact search needs none."""


class Flat(IndexKind):
    name = "flat"
    options = FlatOptions
    faiss_class = faiss.IndexBinaryFlat
    map_flags = faiss.IO_FLAG_MMAP_IFC

    def build(
        self,
        options: FlatOptions,
        codes: np.ndarray,
        ids: np.ndarray | None,
        centroids: np.ndarray | None = None,
    ) -> Any:
        flat, room = new_flat(codes.shape[1] * 8, len(codes))
        room[:] = codes
        return with_flat_ids(flat, ids)
