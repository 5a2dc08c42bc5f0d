"""Checks of feature rows (n, d) before anything is learnt from them."""

from __future__ import annotations

import numpy as np

from hashnet.errors import DataError

OUTLIER = 100.0  # times the median norm
MAX_OUTLIERS = 0.01  # of the rows: where more are that large, it is what the data is like


def varying_columns(X: np.ndarray) -> np.ndarray:
    """bool (d,): the columns that are not constant; DataError where all are."""
    varying = X.max(axis=0) > X.min(axis=0)
    if not varying.any():
        raise DataError(
            f"all {X.shape[1]} columns of the features are constant in {len(X):,} rows: there is nothing to "
            "learn; check how they were made"
        )
    return varying


def ordinary_rows(X: np.ndarray) -> np.ndarray:
    """bool (n,): false for a few rows whose norm is more than 100 times the median.

    The mean and the scale of all rows would be those of a single such row, and all others get one code.
    """
    norms = np.sqrt(np.einsum("nd,nd->n", X, X, dtype=np.float64))
    positive = norms[norms > 0]
    ordinary = norms <= OUTLIER * (np.median(positive) if len(positive) else 0.0)
    few = (~ordinary).sum() <= max(1, MAX_OUTLIERS * len(X))
    return ordinary if few else np.ones(len(X), dtype=bool)
