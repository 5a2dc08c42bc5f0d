"""Which pairs of a batch are similar, and how much: from labels, or from a table of pairs alone.

A loss holds one of these for its whole training set and looks up the rows of a batch in it. Rows are
positions 0..n-1 in that set.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hashnet.errors import DataError
from hashnet.labels import PairCounts, as_multi_hot, count_pairs


class BatchPairs(NamedTuple):
    """The pairs of a batch of n rows, all (n, n): similar bool, known bool, jaccard float or None.

    ``known`` is false for a row with itself and for pairs of unknown similarity.
    """

    similar: torch.Tensor
    known: torch.Tensor
    jaccard: torch.Tensor | None


class LabelSimilarity:
    """Similar means: at least one shared label. ``labels`` are multi-hot (n, n_classes) or ids (n,)."""

    def __init__(self, labels: Any, device: torch.device | str = "cpu") -> None:
        multi_hot = as_multi_hot(labels)
        self.counts = count_pairs(multi_hot)
        self.labels = torch.from_numpy(np.ascontiguousarray(multi_hot)).to(device)

    def pairs(self, rows: torch.Tensor, jaccard: bool = False) -> BatchPairs:
        y = self.labels[rows].float()  # (n, n_classes)
        shared = y @ y.T  # counts, exact in float32
        known = rows[:, None] != rows[None, :]
        if not jaccard:
            return BatchPairs(shared > 0, known, None)
        size = y.sum(dim=1)
        union = size[:, None] + size[None, :] - shared
        return BatchPairs(shared > 0, known, shared / union.clamp(min=1))


class TableSimilarity:
    """Similarity from listed pairs alone; a pair that is not listed carries no loss.

    ``a``, ``b`` are positions (m,) of the two rows, ``similar`` bool (m,); the order inside a pair does
    not matter. ``n_rows`` is the size of the training set.
    """

    def __init__(self, a: Any, b: Any, similar: Any, n_rows: int, device: torch.device | str = "cpu") -> None:
        first, second = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
        similar = np.asarray(similar, dtype=bool)
        if not len(first) == len(second) == len(similar):
            raise DataError(f"pairs of unequal length: {len(first)}, {len(second)} and {len(similar)}")
        keys = np.minimum(first, second) * n_rows + np.maximum(first, second)
        keys, where = np.unique(keys[first != second], return_index=True)
        similar = similar[first != second][where]
        self.counts = PairCounts(len(keys), int(similar.sum()), float(similar.sum()))
        self.n_rows = n_rows
        self.keys = torch.from_numpy(keys).to(device)  # sorted, so that a lookup is a binary search
        self.similar = torch.from_numpy(similar).to(device)

    def pairs(self, rows: torch.Tensor, jaccard: bool = False) -> BatchPairs:
        if jaccard:
            raise DataError("a table of pairs has no label sets: continuous similarity needs labels")
        low, high = torch.minimum(rows[:, None], rows), torch.maximum(rows[:, None], rows)
        keys = low * self.n_rows + high  # (n, n)
        found = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        known = self.keys[found] == keys
        return BatchPairs(self.similar[found] & known, known, None)
