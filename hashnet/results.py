"""SearchResult: what every search returns, local or served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SearchResult:
    """Ids and Hamming distances, ordered by (distance, id).

    ``ids`` int64 and ``distances`` int32 have the same shape: (q, k) from ``search``, where unused
    slots hold -1 in both, or (n,) for one query of ``search_radius``. ``version`` is the version
    of the index that answered, where it is known.
    """

    ids: np.ndarray
    distances: np.ndarray
    version: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def per_query(self) -> list[SearchResult]:
        """One 1-D result per query of a (q, k) result, without unused slots."""
        used = self.distances >= 0
        rows = zip(self.ids, self.distances, used, strict=True)
        return [SearchResult(ids[here], distances[here], self.version) for ids, distances, here in rows]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SearchResult):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.distances, other.distances)

    __hash__ = None  # type: ignore[assignment] # arrays inside
