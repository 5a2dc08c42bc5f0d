"""RBF features, in which KSH and SDH are linear: the similarity of a row to each anchor row."""

from __future__ import annotations

import numpy as np

from hashnet.baselines.base import warn


def draw_rows(n_rows: int, n: int, rng: np.random.Generator, what: str) -> np.ndarray:
    """``n`` different row numbers, int64, ascending; all rows, with a warning, where there are fewer."""
    if n_rows < n:
        warn(f"{what}: {n} requested but there are only {n_rows} rows; all are used")
        return np.arange(n_rows)
    return np.sort(rng.choice(n_rows, n, replace=False))


def squared_distances(X: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """|x - a|^2, float64 (n, m), by one matrix product; never below 0."""
    squared = (X**2).sum(axis=1)[:, None] + (anchors**2).sum(axis=1) - 2 * X @ anchors.T
    return np.maximum(squared, 0)


def rbf(X: np.ndarray, anchors: np.ndarray, sigma: float) -> np.ndarray:
    """exp(-|x - a|^2 / (2 sigma^2)), float64 (n, m)."""
    return np.exp(squared_distances(X, anchors) / (-2 * sigma**2))


def root_mean_distance(X: np.ndarray, anchors: np.ndarray) -> float:
    """sqrt(mean |x - a|^2): the kernel width that suits the data's own scale."""
    return float(np.sqrt(squared_distances(X, anchors).mean())) or 1.0
