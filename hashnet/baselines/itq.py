"""ITQ and ITQ-CCA: iterative quantisation (Gong & Lazebnik, CVPR 2011; PAMI 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.linalg

from hashnet.baselines.base import Projection, warn

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


@dataclass(kw_only=True, eq=False)
class ITQ(Projection):
    """PCA to n_bits dimensions, then the rotation that moves them nearest to the corners of the cube.

    Minimises |B - V R|_F^2 over B in {-1, +1} and orthogonal R, V = X W the projected rows: B and R
    in turn, each the exact minimiser, so that ``history_`` never increases.

    Data with fewer than n_bits directions (rank r) gets r of them and n_bits zero-padded columns: R then
    spreads r dimensions over n_bits hyperplanes. One warning says so.
    """

    name = "itq"
    monotone = True

    n_iterations: int = 50

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        directions = principal_directions(X, self.n_bits)  # (d, r)
        if directions.shape[1] < self.n_bits:
            warn(
                f"itq: the data has {directions.shape[1]} directions for {self.n_bits} bits; "
                "the rotation spreads them over all bits"
            )
        rotation, self.history_ = best_rotation(X @ directions, self.n_bits, self.n_iterations, rng)
        self.directions_ = directions @ rotation  # W R in one matrix


def best_rotation(
    V: np.ndarray, n_bits: int, n_iterations: int, rng: np.random.Generator
) -> tuple[np.ndarray, list[float]]:
    """ITQ's rotation (r, n_bits), rows orthonormal, for V (n, r), r <= n_bits; and its history.

    Starts from a random one. ``history`` holds |B - V R|_F^2 per iteration.
    """
    r = V.shape[1]
    rotation = random_rotation(n_bits, rng)[:r]  # padding V with zeros = keeping the first r rows
    size, history = float((V**2).sum()) + len(V) * n_bits, []
    for _ in range(n_iterations):
        rotated = V @ rotation
        B = np.where(rotated >= 0, 1.0, -1.0)
        history.append(size - 2 * float(np.abs(rotated).sum()))  # |B|^2 + |V|^2 - 2 tr(B^T V R)
        left, _, right = scipy.linalg.svd(V.T @ B, full_matrices=False)  # (r, r), (r,), (r, n_bits)
        rotation = left @ right  # orthogonal Procrustes: maximises tr(R^T V^T B)
    return rotation, history


def random_rotation(size: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly random orthogonal matrix, float64 (size, size)."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.where(np.diag(r) >= 0, 1.0, -1.0)  # QR alone is not uniform: its signs are the solver's


NO_CORRELATION = 1e-6  # a canonical correlation below this is numerical noise


@dataclass(kw_only=True, eq=False)
class ITQCCA(Projection):
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

    ridge: float = 1e-4
    n_iterations: int = 50

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
