"""BRE: binary reconstructive embeddings (Kulis & Darrell, NIPS 2009).

Its coordinate descent takes the exact best value of one weight, found by walking along its thresholds. The
bit of row i as a function of one weight w is [c_i + w k_i >= 0], c_i the part of the other weights: it flips
once, at t_i = -c_i / k_i. With all other bits fixed the objective is, up to a constant, the sum of
a_ij [h_i != h_j] over pairs, a_ij = 1 / K^2 - 2 r_ij / K, r_ij the distance the other bits leave to
reconstruct. A flip of row i changes it by the sum of ±a_ij over the pairs of i, so that all n + 1 intervals
of w cost one sort and one walk over the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from hashnet.baselines.anchors import draw_rows, rbf, root_mean_distance
from hashnet.baselines.base import Baseline
from hashnet.errors import ConfigError
from hashnet.kernels import compiled
from hashnet.labels import share_label

MAX_SWEEPS, STOP_BELOW = 30, 1e-3  # stop when a sweep over all weights gains less than a thousandth


@dataclass(kw_only=True, eq=False)
class BRE(Baseline):
    """Kernel hash functions whose Hamming distances reconstruct given distances.

    h_b(x) = [sum_q W_qb k(x_qb, x) >= 0] over ``n_anchors`` rows drawn for each bit; minimises the sum over
    pairs of (d_ij - |h_i - h_j|^2 / n_bits)^2 by exact coordinate descent: as one weight goes from -inf to
    +inf each row flips once, so sorting the n thresholds and walking along them gives the best interval
    (see above). ``history_`` (the start, then each sweep over all weights) never increases.

    With labels d is 0 for similar and 1 for dissimilar pairs; without, (1 - cosine) / 2 of the centred
    rows, the distance that Hamming distances of random hyperplanes would have. ``n_rows`` training rows
    and ``pair_share`` of their pairs are drawn. Rows have unit length; ``kernel`` is ``linear`` or ``rbf``
    (sigma = ``width`` x the root mean squared distance).
    """

    name = "bre"
    labels = "optional"
    monotone = True
    grid: ClassVar = {"n_rows": [1000, 3000], "n_anchors": [20, 100]}

    n_rows: int = 1000
    n_anchors: int = 20
    pair_share: float = 0.05
    kernel: str = "linear"
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel not in ("linear", "rbf"):
            raise ConfigError(f"kernel must be linear or rbf, got {self.kernel!r}")

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
        self.anchors_ = U[used]  # (m, d), unit length
        self.weights_ = np.zeros((len(used), self.n_bits))  # zero where an anchor is not the bit's
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


class PairLists(NamedTuple):
    """Pairs as neighbour lists, each pair from both ends: row i's are ``row[first[i]:first[i + 1]]``."""

    first: np.ndarray  # int64 (n + 1,)
    row: np.ndarray  # int64 (2 pairs,)
    distance: np.ndarray  # float64 (2 pairs,)

    @classmethod
    def of(cls, n: int, left: np.ndarray, right: np.ndarray, distance: np.ndarray) -> PairLists:
        start, end = np.concatenate([left, right]), np.concatenate([right, left])
        order = np.lexsort((end, start))
        first = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(np.bincount(start, minlength=n), out=first[1:])
        return cls(first, end[order], np.concatenate([distance, distance])[order])


def descend(
    K: np.ndarray,
    chosen: np.ndarray,
    W: np.ndarray,
    pairs: PairLists,
    max_sweeps: int,
    stop_below: float,
    rng: np.random.Generator,
) -> list[float]:
    """Improves W (n_bits, anchors) in place; returns the objective at the start and after each sweep.

    K (n, n) is the kernel, ``chosen`` (n_bits, anchors) the anchor rows of each bit.
    """
    n_bits, n_anchors = W.shape
    values = np.stack([W[b] @ K[chosen[b]] for b in range(n_bits)])  # (n_bits, n)
    bits = (values >= 0).astype(np.uint8)
    history = [reconstruction_error(bits, *pairs)]
    for _ in range(max_sweeps):
        for b in rng.permutation(n_bits):
            # c + w k drifts by rounding when values are only ever updated: start each bit afresh
            values[b] = W[b] @ K[chosen[b]]
            bits[b] = values[b] >= 0
            gains = pair_gains(bits, b, *pairs)
            for q in rng.permutation(n_anchors):
                k = K[chosen[b, q]]
                W[b, q] = improve_weight(W[b, q], k, values[b], bits[b], pairs.first, pairs.row, gains)
        history.append(reconstruction_error(bits, *pairs))
        if history[-2] - history[-1] <= stop_below * history[0]:
            break
    return history


@compiled
def reconstruction_error(bits: np.ndarray, first: np.ndarray, row: np.ndarray, distance: np.ndarray) -> float:
    """sum over pairs of (d_ij - different bits / n_bits)^2, each pair once."""
    n_bits, n = bits.shape
    total = 0.0
    for i in range(n):
        for e in range(first[i], first[i + 1]):
            j = row[e]
            if j > i:
                different = 0
                for b in range(n_bits):
                    different += bits[b, i] != bits[b, j]
                total += (distance[e] - different / n_bits) ** 2
    return total


@compiled
def pair_gains(
    bits: np.ndarray, skip: int, first: np.ndarray, row: np.ndarray, distance: np.ndarray
) -> np.ndarray:
    """a_ij per listed pair: what the objective gains when bit ``skip`` differs instead of agreeing."""
    n_bits, n = bits.shape
    gains = np.empty(len(row))
    for i in range(n):
        for e in range(first[i], first[i + 1]):
            j = row[e]
            different = 0
            for b in range(n_bits):
                different += bits[b, i] != bits[b, j]
            different -= bits[skip, i] != bits[skip, j]
            left_over = distance[e] - different / n_bits
            gains[e] = 1 / n_bits**2 - 2 * left_over / n_bits
    return gains


@compiled
def cut_cost(bit: np.ndarray, first: np.ndarray, row: np.ndarray, gains: np.ndarray) -> float:
    """sum of a_ij over pairs whose bits differ, each pair once."""
    total = 0.0
    for i in range(len(bit)):
        for e in range(first[i], first[i + 1]):
            if row[e] > i and bit[row[e]] != bit[i]:
                total += gains[e]
    return total


@compiled
def improve_weight(
    w: float,
    k: np.ndarray,
    value: np.ndarray,
    bit: np.ndarray,
    first: np.ndarray,
    row: np.ndarray,
    gains: np.ndarray,
) -> float:
    """The best weight; ``value`` = c + w k and ``bit`` = [value >= 0] (n,) follow it in place.

    The weight stays as it is unless another interval is truly better.
    """
    n = len(k)
    c = value - w * k  # (n,): the part of the other weights
    threshold = np.full(n, np.inf)  # a row with k = 0 never flips
    trial = np.empty(n, np.uint8)  # the bits at w = -inf
    for i in range(n):
        if k[i] != 0:
            threshold[i] = -c[i] / k[i]
            trial[i] = k[i] < 0
        else:
            trial[i] = c[i] >= 0
    order = np.argsort(threshold)
    n_flips = n
    while n_flips > 0 and threshold[order[n_flips - 1]] == np.inf:
        n_flips -= 1
    # Walk w from -inf to +inf over the n_flips + 1 intervals between sorted thresholds; ``cost`` is that of
    # the bits in the current interval, updated by the pairs of the one row that flips.
    cost = cut_cost(trial, first, row, gains)
    best_cost, best_w = np.inf, w
    for f in range(n_flips + 1):
        low = threshold[order[f - 1]] if f > 0 else -np.inf
        high = threshold[order[f]] if f < n_flips else np.inf
        # equal thresholds flip together; an interval too narrow to contain a number is skipped
        holds_a_number = f == 0 or f == n_flips or high - low > 1e-9 * (1 + abs(low))
        if holds_a_number and cost < best_cost:
            best_cost = cost
            if f == 0:
                best_w = high - 1 if n_flips > 0 else w
            elif f == n_flips:
                best_w = low + 1
            else:
                best_w = (low + high) / 2
        if f < n_flips:
            i = order[f]
            for e in range(first[i], first[i + 1]):
                cost += gains[e] if trial[row[e]] == trial[i] else -gains[e]
            trial[i] = 1 - trial[i]
    current = cut_cost(bit, first, row, gains)
    if best_cost >= current - 1e-12:
        return w
    for i in range(n):
        trial[i] = c[i] + best_w * k[i] >= 0
    if cut_cost(trial, first, row, gains) >= current:  # rounding moved a row over its threshold
        return w
    for i in range(n):
        value[i] = c[i] + best_w * k[i]
        bit[i] = trial[i]
    return best_w
