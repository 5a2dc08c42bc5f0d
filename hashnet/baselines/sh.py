"""SH: spectral hashing (Weiss, Torralba & Fergus, NIPS 2008)."""

from __future__ import annotations

import numpy as np

from hashnet.baselines.base import Baseline
from hashnet.baselines.itq import principal_directions


class SH(Baseline):
    """Signs of the smoothest eigenfunctions of the Laplacian on the box the principal components fill.

    On a box the eigenfunction with m half-waves along a side of length R has the eigenvalue
    (pi m / R)^2: long sides are cut first, and more than once before a short one is cut at all. The box
    is the training set's, for queries too. There are always n_bits modes, whatever the dimension.
    ``history_`` holds one number: the sum of the eigenvalues chosen, which is the relaxed objective.
    """

    name = "sh"

    directions_: np.ndarray  # (d, r)
    low_: np.ndarray  # (r,): where the box begins
    side_: np.ndarray  # (r,): how long it is
    dimension_: np.ndarray  # int64 (n_bits,): which principal component a bit looks at
    mode_: np.ndarray  # int64 (n_bits,): how many half-waves it lays along it

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        self.directions_ = principal_directions(X, self.n_bits)
        V = X @ self.directions_
        self.low_ = V.min(axis=0)
        self.side_ = V.max(axis=0) - self.low_
        self.dimension_, self.mode_ = smoothest_modes(self.side_, self.n_bits)
        self.history_ = [float(((np.pi * self.mode_ / self.side_[self.dimension_]) ** 2).sum())]

    def _logits(self, X: np.ndarray) -> np.ndarray:
        position = (X @ self.directions_ - self.low_) / self.side_  # 0 ... 1 inside the training box
        return np.sin(np.pi / 2 + np.pi * self.mode_ * position[:, self.dimension_])


def smoothest_modes(side: np.ndarray, n_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(dimension, mode), int64 (n_bits,) each: the n_bits smallest eigenvalues (pi m / side)^2, m >= 1.

    A side no longer than max / (n_bits + 1) offers the constant mode only, the longest one n_bits others.
    """
    n_modes = np.ceil((n_bits + 1) * side / side.max()).astype(np.int64)  # the constant one counted
    dimension = np.repeat(np.arange(len(side)), n_modes - 1)
    mode = np.concatenate([np.arange(1, n) for n in n_modes])
    order = np.argsort((mode / side[dimension]) ** 2, kind="stable")[:n_bits]
    return dimension[order], mode[order]
