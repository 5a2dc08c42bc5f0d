"""Segment: frozen rows, some of them removed, searched as their kind says or by comparing every code.

Every path ends ordered by (distance, id), and ties at the cut go to the smallest ids: exactly where
search is exact, among the candidates scanned otherwise.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hashnet.index import faiss_search
from hashnet.index.kinds import KINDS, KindOptions
from hashnet.index.rows import KEY, Selection, StoredRows, find_keys
from hashnet.kernels import top_k, top_scores, within_radius

if TYPE_CHECKING:
    from hashnet.index.filters import Where

KEPT_SELECTIONS = 8  # of conditions: servers get the same ones again and again
_keeping = threading.Lock()


@dataclass(frozen=True, eq=False)
class Segment:
    """``dead`` are the ascending positions of removed rows; ``record`` says where it lies on disk."""

    rows: StoredRows
    options: KindOptions
    dead: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    record: dict[str, Any] | None = None
    _selections: dict[str, Selection] = field(default_factory=dict, init=False, repr=False)

    @property
    def n_live(self) -> int:
        return len(self.rows) - len(self.dead)

    @cached_property
    def live(self) -> Selection | None:
        """The rows that are still there; None when all are."""
        if not len(self.dead):
            return None
        alive = np.ones(len(self.rows), dtype=bool)
        alive[self.dead] = False
        return Selection(len(self.rows), mask=alive.view(np.uint8))

    @property
    def live_positions(self) -> np.ndarray:
        return np.arange(len(self.rows)) if self.live is None else self.live.positions

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id among the live rows, int64; -1 where it is not."""
        positions = self.rows.find(ids)
        if self.live is not None:
            positions = np.where((positions >= 0) & (self.live.mask[positions] == 1), positions, -1)
        return positions

    def find_keys(self, keys: pa.Array) -> np.ndarray:
        """Position of each key among the live rows, int64; -1 where it is not."""
        if self.rows.columns is None or KEY not in self.rows.columns.schema.names:
            return np.full(len(keys), -1, dtype=np.int64)
        positions = find_keys(self.rows.columns, keys)
        if self.live is not None:
            positions = np.where((positions >= 0) & (self.live.mask[positions] == 1), positions, -1)
        return positions

    def select(self, where: Where | None) -> Selection | None:
        """The live rows that a filter lets through; None for every row."""
        if where is None:
            return self.live
        found = self._selections.get(where.text) if where.text is not None else None
        if found is None:
            found = where.selection(self.rows, self.live)
            if where.text is not None:
                with _keeping:
                    if len(self._selections) >= KEPT_SELECTIONS:
                        self._selections.pop(next(iter(self._selections)))
                    self._selections[where.text] = found
        return found

    def search(
        self, queries: np.ndarray, k: int, where: Where | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k)."""
        kind, only = KINDS[self.rows.kind], self.select(where)
        if where is not None and not kind.scans_selections:
            return self.exact_search(queries, k, only, engine)
        return kind.search(self, queries, k, only, engine)

    def search_radius(
        self, queries: np.ndarray, radius: int, where: Where | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) of all hits with distance <= radius."""
        kind, only = KINDS[self.rows.kind], self.select(where)
        if where is not None and not kind.scans_selections:
            return self.exact_search_radius(queries, radius, only, engine)
        return kind.search_radius(self, queries, radius, only, engine)

    def exact_search(
        self, queries: np.ndarray, k: int, only: Selection | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k) by comparing every code of the selection, whatever the kind."""
        copied, mask = self._divide(only)
        if engine == "faiss":
            flat = self.rows.flat if copied is None else faiss_search.flat_of(copied)
            positions, distances = faiss_search.top_k(flat, queries, k, mask)
        else:
            codes = self.rows.codes if copied is None else copied
            positions, distances = top_k(codes, queries, k, allowed=mask)
        return self._ids_of(positions, only), distances

    def exact_search_radius(
        self, queries: np.ndarray, radius: int, only: Selection | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) within the radius, likewise."""
        copied, mask = self._divide(only)
        if engine == "faiss":
            flat = self.rows.flat if copied is None else faiss_search.flat_of(copied)
            hits = faiss_search.within_radius(flat, queries, radius, mask)
        else:
            codes = self.rows.codes if copied is None else copied
            hits = within_radius(codes, queries, radius, allowed=mask)
        return [(self._ids_of(positions, only), distances) for positions, distances in hits]

    def exact_scores(self, logits: np.ndarray, k: int, where: Where | None) -> tuple[np.ndarray, np.ndarray]:
        """(ids, scores) (q, k) of the highest scores of logits (q, n_bits), by scoring every selected row."""
        only = self.select(where)
        copied, mask = self._divide(only)
        codes = self.rows.codes if copied is None else copied
        positions, scores = top_scores(codes, logits, k, allowed=mask)
        return self._ids_of(positions, only), scores

    def _divide(self, only: Selection | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(a copy of the selected codes, mask of the rows that may be found): at most one of them."""
        if only is None:
            return None, None
        return (self.rows.take(only.positions), None) if only.is_small else (None, only.mask)

    def _ids_of(self, positions: np.ndarray, only: Selection | None) -> np.ndarray:
        """The ids of positions among all rows or among those copied out; -1 stays -1."""
        if only is not None and only.is_small and len(only):
            positions = np.where(positions >= 0, only.positions[positions], -1)
        return self.rows.ids_at(positions)
