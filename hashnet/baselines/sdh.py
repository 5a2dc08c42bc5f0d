"""SDH: supervised discrete hashing (Shen, Shen, Liu & Shen, CVPR 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.linalg

from hashnet.baselines.anchors import draw_rows, rbf, root_mean_distance
from hashnet.baselines.base import Baseline

MAX_SWEEPS = 10  # of the coordinate descent inside one round; it mostly stops by itself before


@dataclass(kw_only=True, eq=False)
class SDH(Baseline):
    """Codes from which a linear classifier reads the labels, learnt without relaxing them.

    min |Y - B W|^2 + lam |W|^2 + nu |B - phi(X) P|^2 over W, P and B in {-1, +1}: each in turn, B by
    discrete cyclic coordinate descent, one bit of all rows at a time. Every step is an exact minimiser, so
    ``history_`` (the start, then each round) never increases. New rows get sgn(phi(x) P).

    phi is an RBF map on anchors. ``width`` is the kernel's sigma in units of the root mean squared distance
    between rows and anchors, which suits features of any scale.
    """

    name = "sdh"
    labels = "required"
    monotone = True
    grid: ClassVar = {"width": [0.3, 0.5, 1.0], "n_anchors": [1000, 3000]}

    n_anchors: int = 1000
    lam: float = 1.0
    nu: float = 1e-5
    n_rounds: int = 5
    width: float = 1.0

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        assert y is not None
        self.anchors_ = X[draw_rows(len(X), self.n_anchors, rng, "sdh anchors")]  # (m, d)
        self.sigma_ = self.width * root_mean_distance(X, self.anchors_)
        phi = rbf(X, self.anchors_, self.sigma_)  # (n, m)
        inverse = least_squares_inverse(phi)  # (m, m): the same in every round
        Y = y.astype(np.float64)
        B = np.where(rng.random((len(X), self.n_bits)) < 0.5, -1.0, 1.0)
        W, P = ridge_classifier(B, Y, self.lam), inverse @ (phi.T @ B)
        self.history_ = [self.objective(Y, B, W, phi @ P)]
        for _ in range(self.n_rounds):
            B = discrete_descent(B, W, Y @ W.T + self.nu * (phi @ P))
            W, P = ridge_classifier(B, Y, self.lam), inverse @ (phi.T @ B)
            self.history_.append(self.objective(Y, B, W, phi @ P))
        self.projection_ = P  # (m, n_bits)

    def objective(self, Y: np.ndarray, B: np.ndarray, W: np.ndarray, F: np.ndarray) -> float:
        """The paper's Eq. 4 with F = phi(X) P."""
        return float(((Y - B @ W) ** 2).sum() + self.lam * (W**2).sum() + self.nu * ((B - F) ** 2).sum())

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return rbf(X, self.anchors_, self.sigma_) @ self.projection_


def ridge_classifier(B: np.ndarray, Y: np.ndarray, lam: float) -> np.ndarray:
    """W = (B^T B + lam I)^-1 B^T Y, float64 (n_bits, n_classes)."""
    return scipy.linalg.solve(B.T @ B + lam * np.eye(B.shape[1]), B.T @ Y, assume_a="pos")


def least_squares_inverse(phi: np.ndarray) -> np.ndarray:
    """(phi^T phi)^+, float64 (m, m); directions below 1e-10 of the largest are left out, not blown up."""
    return scipy.linalg.pinvh(phi.T @ phi, rtol=1e-10)


def discrete_descent(B: np.ndarray, W: np.ndarray, Q: np.ndarray) -> np.ndarray:
    """B in {-1, +1} (n, n_bits) that no flip of one bit column improves: minimises |B W|^2 - 2 tr(B^T Q).

    For bit k with the others fixed the minimiser is sgn(q_k - B' W' w_k), where ' leaves k out.
    """
    B = B.copy()
    WW = W @ W.T  # (n_bits, n_bits)
    for _ in range(MAX_SWEEPS):
        changed = False
        for k in range(B.shape[1]):
            value = Q[:, k] - B @ WW[:, k] + B[:, k] * WW[k, k]
            new = np.where(value > 0, 1.0, np.where(value < 0, -1.0, B[:, k]))  # a tie changes nothing
            changed |= bool((new != B[:, k]).any())
            B[:, k] = new
        if not changed:
            break
    return B
