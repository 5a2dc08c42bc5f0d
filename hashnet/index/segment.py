"""Segment: frozen rows, some of them removed, searched as their kind says or by comparing every code.

Every path ends ordered by (distance, id), and ties at the cut go to the smallest ids: exactly where
search is exact, among the candidates scanned otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import faiss
import numpy as np

from hashnet.errors import Unsupported
from hashnet.index import faiss_flat
from hashnet.index.filters import Where
from hashnet.index.kinds import KINDS, KindOptions
from hashnet.index.stored_rows import StoredRows
from hashnet.kernels import top_k, within_radius

GATHER_BELOW = 1 / 16  # share of the rows let through below which copying them out is cheaper


@dataclass(frozen=True, eq=False)
class Segment:
    """``dead`` are the ascending positions of removed rows; ``record`` says where it lies on disk."""

    rows: StoredRows
    options: KindOptions
    dead: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    record: dict[str, Any] | None = None

    @property
    def n_live(self) -> int:
        return len(self.rows) - len(self.dead)

    @cached_property
    def alive(self) -> np.ndarray | None:
        """uint8 (n,): 1 where a row is still there; None when all are."""
        if not len(self.dead):
            return None
        alive = np.ones(len(self.rows), dtype=np.uint8)
        alive[self.dead] = 0
        return alive

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id among the live rows, int64; -1 where it is not."""
        positions = self.rows.find(ids)
        if self.alive is not None:
            positions = np.where((positions >= 0) & (self.alive[positions] == 1), positions, -1)
        return positions

    @cached_property
    def live_positions(self) -> np.ndarray:
        return np.arange(len(self.rows)) if self.alive is None else np.flatnonzero(self.alive)

    def search(
        self, queries: np.ndarray, k: int, where: Where | None, exclude: np.ndarray | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k); ``exclude`` holds one id per query that it must not find, or -1."""
        if where is None:
            return KINDS[self.rows.kind].search(self, queries, k, exclude, engine)
        return self.exact_search(queries, k, where, exclude, engine)

    def exact_search(
        self, queries: np.ndarray, k: int, where: Where | None, exclude: np.ndarray | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k) by comparing every stored code, whatever the kind."""
        gathered, allowed = self._let_through(where)
        skip = self._skip(exclude, gathered)
        if engine == "faiss":
            flat = self._faiss_flat(gathered)
            positions, distances = faiss_flat.top_k(flat, queries, k, allowed, skip)
        else:
            codes = self.rows.codes if gathered is None else self.rows.take(gathered)
            positions, distances = top_k(codes, queries, k, allowed=allowed, skip=skip)
        if gathered is not None and len(gathered):
            positions = np.where(positions >= 0, gathered[positions], -1)
        return self.rows.ids_at(positions), distances

    def search_radius(
        self, queries: np.ndarray, radius: int, where: Where | None, exclude: np.ndarray | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) of all hits with distance <= radius."""
        if where is None:
            return KINDS[self.rows.kind].search_radius(self, queries, radius, exclude, engine)
        return self.exact_search_radius(queries, radius, where, exclude, engine)

    def exact_search_radius(
        self, queries: np.ndarray, radius: int, where: Where | None, exclude: np.ndarray | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same by comparing every stored code, whatever the kind."""
        gathered, allowed = self._let_through(where)
        skip = self._skip(exclude, gathered)
        if engine == "faiss":
            hits = faiss_flat.within(self._faiss_flat(gathered), queries, radius, allowed, skip)
        else:
            codes = self.rows.codes if gathered is None else self.rows.take(gathered)
            hits = within_radius(codes, queries, radius, allowed=allowed, skip=skip)
        if gathered is not None:
            hits = [(gathered[positions], distances) for positions, distances in hits]
        return [(self.rows.ids_at(positions), distances) for positions, distances in hits]

    def _let_through(self, where: Where | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(positions to copy out, mask of rows that may be found): at most one of them."""
        if where is None:
            return None, self.alive
        refusal = KINDS[self.rows.kind].why_no_filter
        if refusal is not None:
            raise Unsupported(refusal)
        positions = where.positions(self.rows)
        if self.alive is not None:
            positions = positions[self.alive[positions] == 1]
        if len(positions) <= GATHER_BELOW * len(self.rows):
            return positions, None
        mask = np.zeros(len(self.rows), dtype=np.uint8)
        mask[positions] = 1
        return None, mask

    def _skip(self, exclude: np.ndarray | None, gathered: np.ndarray | None) -> np.ndarray | None:
        """The excluded ids as positions (of the rows copied out, where some are)."""
        if exclude is None:
            return None
        positions = self.rows.find(exclude)
        if gathered is None:
            return positions
        if not len(gathered):
            return np.full(len(positions), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(gathered, positions), len(gathered) - 1)
        return np.where(gathered[places] == positions, places, -1)

    def _faiss_flat(self, gathered: np.ndarray | None) -> Any:
        if gathered is None:
            return self.rows.flat
        flat = faiss.IndexBinaryFlat(self.rows.n_bits)
        if len(gathered):
            flat.add(self.rows.take(gathered))
        return flat
