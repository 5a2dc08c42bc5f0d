"""ITQ: iterative quantisation (Gong & Lazebnik, CVPR 2011)."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from hashnet.baselines.base import Baseline, warn

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


class ITQ(Baseline):
    """PCA to n_bits dimensions, then the rotation that moves them nearest to the corners of the cube.

    Minimises |B - V R|_F^2 over B in {-1, +1} and orthogonal R, V = X W the projected rows: B and R
    in turn, each the exact minimiser, so that ``history_`` never increases.

    Data with fewer than n_bits directions (rank r) gets r of them and n_bits zero-padded columns: R then
    spreads r dimensions over n_bits hyperplanes. One warning says so.
    """

    name = "itq"
    monotone = True

    directions_: np.ndarray  # (d, n_bits): W R in one matrix

    def __init__(self, n_bits: int = 48, *, seed: int = 0, n_iterations: int = 50) -> None:
        super().__init__(n_bits, seed=seed)
        self.n_iterations = n_iterations

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        directions = principal_directions(X, self.n_bits)  # (d, r)
        if directions.shape[1] < self.n_bits:
            warn(
                f"itq: the data has {directions.shape[1]} directions for {self.n_bits} bits; "
                "the rotation spreads them over all bits"
            )
        rotation, self.history_ = best_rotation(X @ directions, self.n_bits, self.n_iterations, rng)
        self.directions_ = directions @ rotation

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return X @ self.directions_


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
