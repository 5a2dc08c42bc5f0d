"""ITQ-CCA: iterative quantisation on canonical directions (Gong & Lazebnik, CVPR 2011; PAMI 2013)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import scipy.linalg

from hashnet.baselines.base import Baseline, warn
from hashnet.baselines.itq import best_rotation

NO_CORRELATION = 1e-6  # a canonical correlation below this is numerical noise


class ITQCCA(Baseline):
    """CCA between features and multi-hot labels, each direction scaled by its correlation, then ITQ.

    ``ridge`` is added to both covariances, in units of their mean variance.

    There are at most min(d, n_classes) canonical directions (one fewer where every row has exactly
    one label). Beyond them the rotation spreads the r directions over all n_bits hyperplanes, as ITQ does
    with zero-padded columns; one warning says so.
    """

    name = "itq-cca"
    labels = "required"
    monotone = True
    grid: ClassVar = {"ridge": [1e-4, 1e-2, 1e-1, 1.0, 10.0]}

    directions_: np.ndarray  # (d, n_bits)
    correlations_: np.ndarray  # (r,), falling

    def __init__(
        self, n_bits: int = 48, *, seed: int = 0, ridge: float = 1e-4, n_iterations: int = 50
    ) -> None:
        super().__init__(n_bits, seed=seed)
        self.ridge = ridge
        self.n_iterations = n_iterations

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        assert y is not None
        directions, correlations = canonical_directions(X, y, self.ridge)
        directions, self.correlations_ = directions[:, : self.n_bits], correlations[: self.n_bits]
        if len(self.correlations_) < self.n_bits:
            warn(
                f"itq-cca: {y.shape[1]} classes give {len(self.correlations_)} canonical directions for "
                f"{self.n_bits} bits; the rotation spreads them over all bits"
            )
        scaled = directions * self.correlations_
        rotation, self.history_ = best_rotation(X @ scaled, self.n_bits, self.n_iterations, rng)
        self.directions_ = scaled @ rotation

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return X @ self.directions_


def canonical_directions(X: np.ndarray, y: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """(W (d, r), correlations (r,)): W^T (Cxx + ridge) W = I, correlations falling.

    They are the singular vectors of Lx^-1 Cxy Ly^-T with Cxx = Lx Lx^T and Cyy = Ly Ly^T, brought back.
    """
    Y = y - y.mean(axis=0)
    n = len(X)
    Lx = _cholesky(X.T @ X / n, ridge)
    Ly = _cholesky(Y.T @ Y / n, ridge)
    M = scipy.linalg.solve_triangular(Lx, X.T @ Y / n, lower=True)  # (d, n_classes)
    M = scipy.linalg.solve_triangular(Ly, M.T, lower=True).T
    U, correlations, _ = scipy.linalg.svd(M, full_matrices=False)
    kept = correlations > NO_CORRELATION
    return scipy.linalg.solve_triangular(Lx, U[:, kept], lower=True, trans="T"), correlations[kept]


def _cholesky(C: np.ndarray, ridge: float) -> np.ndarray:
    C[np.diag_indices_from(C)] += ridge * np.trace(C) / len(C)
    return scipy.linalg.cholesky(C, lower=True)
