"""LSH: random hyperplanes (Charikar, STOC 2002)."""

from __future__ import annotations

import numpy as np

from hashnet.baselines.base import Baseline


class LSH(Baseline):
    """Signs of projections on Gaussian directions: sgn(W^T (x - mean)), W ~ N(0, 1)^(d x n_bits).

    Only the mean is learnt; without it, features after a ReLU would share nearly all their bits.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(100, 5))
    >>> LSH(n_bits=16).fit(X).encode(X).shape
    (100, 2)
    """

    name = "lsh"

    directions_: np.ndarray  # (d, n_bits)

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        self.directions_ = rng.standard_normal((X.shape[1], self.n_bits))

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return X @ self.directions_
