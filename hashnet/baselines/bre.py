"""BRE: binary reconstructive embeddings (Kulis & Darrell, NIPS 2009)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hashnet.baselines.anchors import draw_rows, rbf, root_mean_distance
from hashnet.baselines.base import Baseline
from hashnet.baselines.threshold_search import PairLists, descend
from hashnet.errors import ConfigError
from hashnet.labels import share_label

MAX_SWEEPS, STOP_BELOW = 30, 1e-3  # stop when a sweep over all weights gains less than a thousandth


class BRE(Baseline):
    """Kernel hash functions whose Hamming distances reconstruct given distances.

    h_b(x) = [sum_q W_qb k(x_qb, x) >= 0] over ``n_anchors`` rows drawn for each bit; minimises the sum over
    pairs of (d_ij - |h_i - h_j|^2 / n_bits)^2 by exact coordinate descent: as one weight goes from -inf to
    +inf each row flips once, so sorting the n thresholds and walking along them gives the best interval
    (see ``threshold_search``). ``history_`` (the start, then each sweep over all weights) never increases.

    With labels d is 0 for similar and 1 for dissimilar pairs; without, (1 - cosine) / 2 of the centred
    rows, the distance that Hamming distances of random hyperplanes would have. ``n_rows`` training rows
    and ``pair_share`` of their pairs are drawn. Rows have unit length; ``kernel`` is ``linear`` or ``rbf``
    (sigma = ``width`` x the root mean squared distance).
    """

    name = "bre"
    labels = "optional"
    monotone = True
    grid: ClassVar = {"n_rows": [1000, 3000], "n_anchors": [20, 100]}

    anchors_: np.ndarray  # (m, d), unit length
    weights_: np.ndarray  # (m, n_bits): zero where an anchor is not the bit's
    sigma_: float

    def __init__(
        self,
        n_bits: int = 48,
        *,
        seed: int = 0,
        n_rows: int = 1000,
        n_anchors: int = 20,
        pair_share: float = 0.05,
        kernel: str = "linear",
        width: float = 1.0,
    ) -> None:
        super().__init__(n_bits, seed=seed)
        if kernel not in ("linear", "rbf"):
            raise ConfigError(f"kernel must be linear or rbf, got {kernel!r}")
        self.n_rows, self.n_anchors, self.pair_share = n_rows, n_anchors, pair_share
        self.kernel, self.width = kernel, width

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        rows = draw_rows(len(X), self.n_rows, rng, "bre training rows")
        U = unit_rows(X[rows])
        left, right = draw_pairs(len(U), self.pair_share, rng)
        distance = target_distances(U, None if y is None else y[rows], left, right)
        n_anchors = min(self.n_anchors, len(U))
        chosen = np.stack([rng.choice(len(U), n_anchors, replace=False) for _ in range(self.n_bits)])
        self.sigma_ = self.width * root_mean_distance(U, U)
        K = self._kernel(U, U)  # (n, n), symmetric: row q is k(x_q, .)
        W = rng.standard_normal((self.n_bits, n_anchors))
        pairs = PairLists.of(len(U), left, right, distance)
        self.history_ = descend(K, chosen, W, pairs, MAX_SWEEPS, STOP_BELOW, rng)
        used, place = np.unique(chosen, return_inverse=True)
        self.anchors_ = U[used]
        self.weights_ = np.zeros((len(used), self.n_bits))
        bit = np.repeat(np.arange(self.n_bits), n_anchors)
        self.weights_[place.ravel(), bit] = W.ravel()

    def _kernel(self, U: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        return U @ anchors.T if self.kernel == "linear" else rbf(U, anchors, self.sigma_)

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return self._kernel(unit_rows(X), self.anchors_) @ self.weights_


def unit_rows(X: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a zero row stays zero."""
    length = np.linalg.norm(X, axis=1, keepdims=True)
    return X / np.where(length > 0, length, 1)


def draw_pairs(n: int, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(left, right), left < right: a share of all n (n - 1) / 2 pairs, each once, at least n of them."""
    total = n * (n - 1) // 2
    n_pairs = min(total, max(n, round(share * total)))
    number = np.sort(rng.choice(total, n_pairs, replace=False))
    left, right = np.triu_indices(n, 1)
    return left[number], right[number]


def target_distances(U: np.ndarray, y: np.ndarray | None, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """d_ij of the pairs, float64."""
    if y is None:
        return (1 - np.einsum("ij,ij->i", U[left], U[right])) / 2
    return np.where(share_label(y, y)[left, right], 0.0, 1.0)
