"""Principal directions: what SH and ITQ start from."""

from __future__ import annotations

import numpy as np
import scipy.linalg

RANK_TOLERANCE = 1e-10  # share of the largest variance below which a direction is numerical noise


def principal_directions(X: np.ndarray, k: int) -> np.ndarray:
    """Orthonormal columns, float64 (d, r), r <= k: the directions of most variance of centred X (n, d).

    r is smaller than k where the data has no more directions with any variance. The sign of a
    direction is fixed (its largest entry is positive), so that it does not depend on the solver.
    """
    n, d = X.shape
    small = min(n, d)
    k = min(k, small)
    gram = X.T @ X if d <= n else X @ X.T  # the smaller one has the same non-zero eigenvalues
    values, vectors = scipy.linalg.eigh(gram, subset_by_index=(small - k, small - 1), driver="evr")
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = values > RANK_TOLERANCE * values[0]
    directions = vectors[:, kept]
    if d > n:
        directions = X.T @ directions / np.sqrt(values[kept])
    largest = np.abs(directions).argmax(axis=0)
    return directions * np.sign(directions[largest, np.arange(directions.shape[1])])
