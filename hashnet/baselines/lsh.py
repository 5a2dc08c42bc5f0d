"""Signs without learning: LSH (Charikar, STOC 2002), of a random rotation, of the embedding itself."""

from __future__ import annotations

import numpy as np

from hashnet.baselines.base import Baseline, Projection
from hashnet.baselines.itq import random_rotation


class LSH(Projection):
    """Signs of projections on Gaussian directions: sgn(W^T (x - mean)), W ~ N(0, 1)^(d x n_bits).

    Only the mean is learnt; without it, features after a ReLU would share nearly all their bits.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(100, 5))
    >>> LSH(n_bits=16).fit(X).encode(X).shape
    (100, 2)
    """

    name = "lsh"

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        self.directions_ = rng.standard_normal((X.shape[1], self.n_bits))


class Sign(Baseline):
    """Signs of the centred embedding itself, which vector databases call binary quantisation.

    Of more columns than bits, those of the greatest variance are taken; of fewer, all of them, repeatedly,
    which ranks the same as using each once.
    """

    name = "sign"

    chosen_: np.ndarray  # int64 (n_bits,): the column of each bit

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        by_variance = np.argsort(-X.var(axis=0), kind="stable")
        self.chosen_ = np.sort(by_variance[: self.n_bits])
        if len(self.chosen_) < self.n_bits:
            self.chosen_ = np.resize(self.chosen_, self.n_bits)

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return X[:, self.chosen_]


class Rotation(Projection):
    """Signs after a random rotation: LSH with orthogonal directions (Ji et al., NIPS 2012).

    Beyond d bits the directions are those of further rotations.
    """

    name = "rotation"

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        d = X.shape[1]
        rotations = [random_rotation(d, rng) for _ in range(-(-self.n_bits // d))]
        self.directions_ = np.concatenate(rotations, axis=1)[:, : self.n_bits]
