"""hnsw: a walk through a graph of neighbours. Approximate k-NN; radius search and filters through flat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from hashnet.errors import IndexMismatch
from hashnet.index.faiss_search import SLACK, ordered
from hashnet.index.rows import Selection, codes_in, with_ids
from hashnet.index.segment import IndexKind, KindOptions, Segment, option
from hashnet.kernels import pad_columns

MAX_NEIGHBOURS = 1024  # links take 8 bytes each per row: more of them only cost memory


@dataclass(frozen=True)
class HnswOptions(KindOptions):
    """``neighbours`` links per node, breadth of the walk when building and when searching."""

    neighbours: int = option(32, "links per node (none: 32)", low=2)
    ef_construction: int = option(80, "breadth when building (none: 80)", low=1)
    ef_search: int = option(128, "breadth when searching (none: 128)", low=1)


class Hnsw(IndexKind):
    name = "hnsw"
    summary = "approximate and faster, by a graph"
    options = HnswOptions
    faiss_class = faiss.IndexBinaryHNSW
    exact = False

    def complete(self, options: HnswOptions, n_bits: int, n: int) -> HnswOptions:
        fits = 2 <= options.neighbours <= MAX_NEIGHBOURS
        if not (fits and options.ef_construction and options.ef_search):
            raise IndexMismatch(
                f"hnsw needs neighbours >= 2 and <= {MAX_NEIGHBOURS}, ef_construction >= 1 and ef_search >= 1"
            )
        return options

    def build(
        self, options: HnswOptions, flat: Any, ids: np.ndarray | None, centroids: np.ndarray | None
    ) -> Any:
        index = faiss.IndexBinaryHNSW(flat.d, options.neighbours)
        index.hnsw.efConstruction = options.ef_construction
        index.hnsw.efSearch = options.ef_search
        return with_ids(index, codes_in(flat), ids)

    def search(
        self, segment: Segment, queries: np.ndarray, k: int, only: Selection | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Among the ef_search candidates of the walk; exact for the queries for which it finds too few."""
        rows, options = segment.rows, segment.options
        assert isinstance(options, HnswOptions)
        if not len(queries):
            return segment.exact_search(queries, k, only, engine)
        breadth = min(len(rows), max(options.ef_search, k + SLACK))
        far, near = rows.inner.search(queries, breadth, params=faiss.SearchParametersHNSW(efSearch=breadth))
        near, far, count = ordered(near, far, None if only is None else only.mask)
        ids, far = rows.ids_at(pad_columns(near, k)), pad_columns(far, k)
        short = np.flatnonzero(count < min(k, segment.n_live))
        if len(short):
            ids[short], far[short] = segment.exact_search(queries[short], k, only, engine)
        return ids, far
