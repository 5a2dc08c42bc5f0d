"""KSH: supervised hashing with kernels (Liu, Wang, Ji, Jiang & Chang, CVPR 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.linalg

from hashnet.baselines.anchors import draw_rows, rbf, root_mean_distance
from hashnet.baselines.base import Baseline
from hashnet.labels import share_label


@dataclass(kw_only=True, eq=False)
class KSH(Baseline):
    """Kernel hash functions whose code products imitate similarity: min |K S - H H^T|_F^2, bit by bit.

    S is +1 for similar and -1 for dissimilar pairs of ``n_labelled`` rows. Bit k maximises h^T R h, where R
    is what the bits before it left of K S: first by the spectral relaxation (the largest generalised
    eigenvector), then by Nesterov's accelerated gradient on the smooth y = 2 sigmoid(Ka) - 1; the better
    of the two after taking signs is kept. ``history_`` holds |R|_F^2 / n^2 after each bit; greedy choice does
    not promise that it falls. ``width`` is the kernel's sigma in units of the root mean squared distance.
    """

    name = "ksh"
    labels = "required"
    grid: ClassVar = {"width": [0.5, 1.0], "n_anchors": [300, 1000]}

    n_anchors: int = 300
    n_labelled: int = 2000
    n_iterations: int = 500
    width: float = 1.0

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        assert y is not None
        self.anchors_ = X[draw_rows(len(X), self.n_anchors, rng, "ksh anchors")]  # (m, d)
        self.sigma_ = self.width * root_mean_distance(X, self.anchors_)
        kernel = rbf(X, self.anchors_, self.sigma_)
        self.kernel_mean_ = kernel.mean(axis=0)  # (m,): makes the kernel features zero-centred
        rows = draw_rows(len(X), self.n_labelled, rng, "ksh labelled rows")
        K = kernel[rows] - self.kernel_mean_  # (n, m)
        # R starts as n_bits * S and loses h h^T with every bit. Its entries are whole numbers far below 2^24:
        # float32 is exact and halves the memory every gradient step reads.
        R = np.where(share_label(y[rows], y[rows]), 1, -1).astype(np.float32) * self.n_bits
        np.fill_diagonal(R, self.n_bits)
        KRK = K.T @ (R @ K.astype(np.float32))  # (m, m)
        KK = K.T @ K
        KK[np.diag_indices_from(KK)] += 1e-6 * np.trace(KK) / len(KK)
        K32 = K.astype(np.float32)
        self.weights_ = np.empty((K.shape[1], self.n_bits))
        for k in range(self.n_bits):
            start = spectral_start(KRK, KK, len(K))
            refined = refine(start, K32, R, self.n_iterations)
            a = max((start, refined), key=lambda a: _agreement(_signs(K @ a), R))
            h = _signs(K @ a)
            R -= np.outer(h, h)
            KRK -= np.outer(K.T @ h, K.T @ h)
            self.weights_[:, k] = a
            self.history_.append(float(np.square(R, dtype=np.float64).mean()))

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return (rbf(X, self.anchors_, self.sigma_) - self.kernel_mean_) @ self.weights_


def _signs(values: np.ndarray) -> np.ndarray:
    return np.where(values >= 0, 1.0, -1.0).astype(np.float32)


def _agreement(y: np.ndarray, R: np.ndarray) -> float:
    """y^T R y."""
    return float(y.astype(np.float64) @ (R @ y.astype(np.float32)))


def spectral_start(KRK: np.ndarray, KK: np.ndarray, n: int) -> np.ndarray:
    """a (m,) that maximises a^T K^T R K a subject to a^T K^T K a = n."""
    last = len(KK) - 1
    _, vectors = scipy.linalg.eigh(KRK, KK, subset_by_index=(last, last))
    a = vectors[:, 0]  # a^T KK a = 1
    return a * np.sqrt(n) * np.sign(a[np.abs(a).argmax()])


def smooth_objective(a: np.ndarray, K: np.ndarray, R: np.ndarray) -> tuple[float, np.ndarray]:
    """(-y^T R y, its gradient in a), y = 2 sigmoid(Ka) - 1 = tanh(Ka / 2)."""
    y = np.tanh(K @ a.astype(K.dtype) / 2)
    Ry = R @ y.astype(R.dtype)
    # dy/d(Ka) = (1 - y^2) / 2, and y appears twice
    return -float(y.astype(np.float64) @ Ry), -(Ry * (1 - y**2)) @ K


def refine(a: np.ndarray, K: np.ndarray, R: np.ndarray, n_iterations: int) -> np.ndarray:
    """The best a (m,) Nesterov's accelerated gradient with backtracking sees on the smooth objective."""
    value, _ = smooth_objective(a, K, R)
    best, best_value, previous, t_previous, t = a, value, a, 0.0, 1.0
    lipschitz = 1.0
    for _ in range(n_iterations):
        ahead = a + (t_previous - 1) / t * (a - previous)
        value, gradient = smooth_objective(ahead, K, R)
        slope = float(gradient @ gradient)
        while True:
            new = ahead - gradient / lipschitz
            new_value, _ = smooth_objective(new, K, R)
            if new_value <= value - slope / (2 * lipschitz) or slope < 1e-12:
                break
            lipschitz *= 2
        previous, a = a, new
        t_previous, t = t, (1 + np.sqrt(1 + 4 * t**2)) / 2
        gain = best_value - new_value
        if gain > 0:
            best, best_value = new, new_value
        if abs(gain) <= 1e-6 * abs(best_value):
            break
        lipschitz /= 1.1  # let the step grow again: the curvature falls where y saturates
    return best
