"""HashNet's weighted pairwise cross-entropy (Eqs. 1-4).

    P(s_ij = 1 | g) = sigmoid(alpha <g_i, g_j>)                                     (Eq. 3)
    J = sum w_ij ( log(1 + exp(alpha <g_i, g_j>)) - alpha s_ij <g_i, g_j> ) / sum w_ij   (Eq. 4)
    w_ij = c_ij |S| / |S1| for similar pairs, |S| / |S0| for dissimilar ones           (Eq. 2)

g is tanh(beta z) for J and sgn(z) for L. Three choices the paper leaves open or gets wrong:
c_ij as printed is 0 for every dissimilar pair, which would remove them, so c_ij is the Jaccard
similarity for similar pairs and 1 for dissimilar ones; with c_ij, similar pairs weigh
|S| / (sum of c_ij over S1), else a small c_ij undoes the balance; and the sum is divided by the sum
of weights, so that ln 2 = 0.693 always means that nothing has been learnt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch.nn import functional

from hashnet.errors import ConfigError
from hashnet.labels import PAIR_WEIGHTS, PairCounts, check_pairs
from hashnet.losses.similarity import BatchPairs
from hashnet.models import relax

if TYPE_CHECKING:
    from hashnet.training import TrainConfig


class Similarity(Protocol):
    """What a pairwise loss needs to know: see ``LabelSimilarity`` and ``TableSimilarity``."""

    counts: PairCounts

    def pairs(self, rows: torch.Tensor, jaccard: bool = False) -> BatchPairs: ...


def pair_cross_entropy(codes: torch.Tensor, similar: torch.Tensor, alpha: float) -> torch.Tensor:
    """-log P(s_ij | codes) for every pair, (n, n); softplus keeps it finite for any codes."""
    inner = alpha * (codes @ codes.T)  # (n, n)
    return functional.softplus(inner) - similar.to(inner.dtype) * inner


def class_weights(counts: PairCounts, continuous: bool = False) -> tuple[float, float]:
    """(similar, dissimilar): |S| / |S1| (|S| / sum of c_ij over S1 when continuous) and |S| / |S0|."""
    similar = counts.jaccard_sum if continuous else counts.n_similar
    return counts.n_pairs / similar, counts.n_pairs / counts.n_dissimilar


class PairwiseLoss:
    """Callable: the loss of a batch, as ``sum(w l) / sum(w)``.

    ``weights``: ``global`` (|S1| and |S0| of the whole training set), ``batch`` or ``none`` (w = 1).
    ``continuous`` turns c_ij on (HashNet+C). ``alpha`` defaults to 10 / n_bits.
    """

    guessing = math.log(2)

    def __init__(
        self,
        similarity: Similarity,
        n_bits: int,
        *,
        alpha: float | None = None,
        weights: str = "global",
        continuous: bool = False,
    ) -> None:
        if weights not in PAIR_WEIGHTS:
            raise ConfigError(f"weights must be one of {', '.join(PAIR_WEIGHTS)}, got {weights!r}")
        counts = check_pairs(similarity.counts)
        self.similarity, self.weights, self.continuous = similarity, weights, continuous
        self.alpha = 10 / n_bits if alpha is None else alpha
        self.class_weights = class_weights(counts, continuous) if weights == "global" else (1.0, 1.0)
        self._last: tuple[torch.Tensor, torch.Tensor, BatchPairs, torch.Tensor] | None = None

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor:
        """Scalar loss of tanh(beta logits), or of the signs with ``beta=inf``.

        logits (n, n_bits); rows (n,) int64 positions in the training set; valid (n,) bool, false for
        padding. A batch without a single known pair has loss 0.
        """
        pairs, weight = self._known(rows, valid, logits.dtype)
        losses = pair_cross_entropy(relax(logits, beta), pairs.similar, self.alpha)
        return (weight * losses).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)

    @classmethod
    def from_config(cls, config: TrainConfig, similarity: Similarity) -> Self:
        return cls(
            similarity,
            config.n_bits,
            alpha=config.alpha,
            weights=config.pair_weights,
            continuous=config.continuous_on,
        )

    def _known(
        self, rows: torch.Tensor, valid: torch.Tensor, dtype: torch.dtype
    ) -> tuple[BatchPairs, torch.Tensor]:
        """Pairs and weights of a batch, computed once for its J and its L."""
        if self._last is not None and self._last[0] is rows and self._last[1] is valid:
            return self._last[2], self._last[3]
        pairs = self.similarity.pairs(rows, self.continuous)
        weight = self._weights(pairs, valid, dtype)
        self._last = rows, valid, pairs, weight
        return pairs, weight

    def _weights(self, pairs: BatchPairs, valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """w_ij (n, n), 0 for pairs that do not count."""
        counted = (pairs.known & valid[:, None] & valid[None, :]).to(dtype)
        similar = pairs.similar.to(dtype) * counted
        dissimilar = counted - similar
        if pairs.jaccard is not None:
            similar = similar * pairs.jaccard.to(dtype)
        if self.weights == "batch":
            return counted.sum() * (_shares(similar) + _shares(dissimilar))
        w_similar, w_dissimilar = self.class_weights
        return w_similar * similar + w_dissimilar * dissimilar


def _shares(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` divided by its sum; all zeros where the batch has no pair of the kind."""
    total = weight.sum()
    return weight / torch.where(total > 0, total, torch.ones_like(total))
