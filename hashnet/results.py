"""SearchResult: what every search returns, local or served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa  # the client needs none

HIT_FIELDS = ("id", "labels", "code", "distance", "score")  # what every hit has: no column can be called so


@dataclass(frozen=True)
class SearchResult:
    """Ids and Hamming distances, ordered by (distance, id); with ``scores``, by (score descending, id).

    ``ids`` int64 and ``distances`` int32 have the same shape: (q, k) from ``search``, where unused
    slots hold -1 in both, or (n,) for one query of ``search_radius``. ``version`` is the version
    of the index that answered, where it is known. ``scores`` float32, of the same shape, are there when
    logits were searched; unused slots hold -inf. ``columns`` is the Arrow table of the requested columns,
    one row per slot, query after query; unused slots hold nulls.
    """

    ids: np.ndarray
    distances: np.ndarray
    version: int | None = None
    scores: np.ndarray | None = None
    columns: pa.Table | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def per_query(self) -> list[SearchResult]:
        """One 1-D result per query of a (q, k) result, without unused slots."""
        results = []
        for q, here in enumerate(self.distances >= 0):
            scores = None if self.scores is None else self.scores[q][here]
            columns = self.columns
            if columns is not None:
                columns = columns.slice(q * len(here), len(here)).filter(here)
            results.append(
                SearchResult(self.ids[q][here], self.distances[q][here], self.version, scores, columns)
            )
        return results

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SearchResult):
            return NotImplemented
        if (self.scores is None) != (other.scores is None):
            return False
        same = np.array_equal(self.ids, other.ids) and np.array_equal(self.distances, other.distances)
        return same and (self.scores is None or np.array_equal(self.scores, other.scores))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment] # arrays inside
