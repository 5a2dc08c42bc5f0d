"""DHN: deep hashing network (Zhu, Long, Wang & Cao, AAAI 2016)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet.baselines.deep import DeepBaseline
from hashnet.losses import DHNLoss, LabelSimilarity


class DHN(DeepBaseline):
    """Unweighted pairwise cross-entropy on g = tanh(z), plus ``quantisation`` * mean log cosh(|g| - 1)."""

    name = "dhn"

    def __init__(
        self, n_bits: int = 48, *, quantisation: float = 0.1, alpha: float | None = None, **shared: Any
    ):
        super().__init__(n_bits, **shared)
        self.quantisation, self.alpha = quantisation, alpha

    def _loss(self, y: np.ndarray) -> DHNLoss:
        return DHNLoss(LabelSimilarity(y), self.n_bits, alpha=self.alpha, quantisation=self.quantisation)
