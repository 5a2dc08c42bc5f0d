"""DHN's loss: unweighted pairwise cross-entropy plus a quantisation term (Zhu et al., AAAI 2016)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional

from hashnet.losses.pairwise import PairwiseLoss, Similarity
from hashnet.models import relax

if TYPE_CHECKING:
    from hashnet.training import TrainConfig


class DHNLoss:
    """Callable like PairwiseLoss: cross-entropy + ``quantisation`` * mean log cosh(|g| - 1).

    g = tanh(z): beta is always 1, or ``inf`` to measure the signs (where the second term is 0). As published,
    ``alpha`` is 1; an alpha that adapts to n_bits (None) is HashNet's own gain.
    """

    def __init__(
        self, similarity: Similarity, n_bits: int, *, alpha: float | None = 1.0, quantisation: float = 0.1
    ) -> None:
        self.cross_entropy = PairwiseLoss(similarity, n_bits, alpha=alpha, weights="none")
        self.quantisation = quantisation
        self.guessing: float | None = math.log(2) + quantisation * math.log(math.cosh(1))

    @classmethod
    def from_config(cls, config: TrainConfig, similarity: Similarity) -> Self:
        return cls(similarity, config.n_bits, alpha=config.alpha_value, quantisation=config.quantisation)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor:
        gap = relax(logits, beta).abs()[valid] - 1
        # log cosh x = |x| + log(1 + exp(-2|x|)) - log 2: no overflow for any x
        log_cosh = gap.abs() + functional.softplus(-2 * gap.abs()) - math.log(2)
        mean = log_cosh.sum() / max(log_cosh.numel(), 1)  # 0, not NaN, where no row counts
        return self.cross_entropy(logits, rows, valid, beta) + self.quantisation * mean
