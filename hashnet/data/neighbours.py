"""Pairs from vectors alone: rows that are near each other are similar, rows far apart are not.

Mutual neighbours (each among the k nearest of the other) are similar. Of the other pairs, those of which one
row is among the FAR * k nearest of the other are unknown; all others are dissimilar, and not listed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet.data.pairs import PairTable
from hashnet.errors import DataError
from hashnet.io import as_array, check_whole

FAR = 2
NEAREST = 10  # k, unless told otherwise
ROWS = 4096  # whose neighbours are searched at once
NEIGHBOURS = "neighbours"  # the word that stands for such a table where a path is expected


def neighbour_pairs(
    vectors: Any,
    row_ids: Any = None,
    k: int = NEAREST,
    *,
    radius: float | None = None,
    near: np.ndarray | None = None,
) -> PairTable:
    """The pairs table of vectors float (n, d) whose rows have ascending ids int64 (n,), by default 0 … n - 1.

    Nearness is Euclidean. With ``radius``, neighbours within that distance are similar even where only one
    is among the k nearest of the other. ``near`` int64 (n, FAR * k) are the nearest rows of each, where they
    are known already (see ``nearest_rows``). Memory: the FAR * k nearest of every row, never n x n.
    """
    k = check_whole("k", k, 1)
    vectors = np.ascontiguousarray(as_array(vectors, "vectors"), dtype=np.float32)
    n = len(vectors)
    row_ids = np.arange(n) if row_ids is None else as_array(row_ids, "row_ids").astype(np.int64)
    if n < k + 2:
        raise DataError(f"there are {n} vectors; {k} neighbours of each need at least {k + 2}")
    near = nearest_rows(vectors, 0, n, k) if near is None else near
    own = np.arange(n)
    wanted = np.zeros(near.shape, dtype=bool)  # which of the nearest are similar
    listed = np.sort((own[:, None] * n + near[:, :k]).ravel())  # directed pairs as one number
    wanted[:, :k] = _among(near[:, :k] * n + own[:, None], listed)
    if radius is not None:
        for column in range(k):
            far = np.linalg.norm(vectors - vectors[near[:, column]], axis=1)
            wanted[:, column] |= far <= radius
    a, b = np.repeat(own, near.shape[1]), near.ravel()
    keys, where = np.unique(np.minimum(a, b) * n + np.maximum(a, b), return_inverse=True)
    similar = np.zeros(len(keys), dtype=bool)
    np.logical_or.at(similar, where, wanted.ravel())
    # ids ascend with the rows, so that pairs in the order of rows are in the order of ids
    return PairTable(row_ids[keys // n], row_ids[keys % n], similar, ~similar, n)


def nearest_rows(vectors: Any, start: int, stop: int, k: int = NEAREST) -> np.ndarray:
    """int64 (stop - start, FAR * k): for each of these rows, the nearest other rows, the nearest first."""
    from hashnet.metrics import exact_neighbours  # numba, which a reader of manifests does not need

    vectors = np.ascontiguousarray(as_array(vectors, "vectors"), dtype=np.float32)
    width, blocks = min(FAR * k, len(vectors) - 1), []
    for first in range(start, stop, ROWS):
        own = np.arange(first, min(first + ROWS, stop))
        blocks.append(exact_neighbours(vectors[own], [vectors], width, skip=own))
    return np.concatenate(blocks)


def _among(values: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """bool: which values are among ``listed``, which is sorted."""
    place = np.minimum(np.searchsorted(listed, values), len(listed) - 1)
    return listed[place] == values
