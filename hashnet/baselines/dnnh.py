"""DNNH: simultaneous feature learning and hash coding (Lai, Pan, Liu & Yan, CVPR 2015)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet.baselines.deep import DeepBaseline
from hashnet.losses import DNNHLoss, LabelSimilarity


class DNNH(DeepBaseline):
    """Divide and encode: 50 units a bit, each slice gives one bit; triplet hinge on almost binary codes.

    ``margin`` counts bits; sigmoids within ``epsilon`` of 0.5 are left as they are, others are rounded.
    """

    name = "dnnh"
    head = "slices"

    def __init__(self, n_bits: int = 48, *, margin: float = 1.0, epsilon: float = 0.4, **shared: Any):
        super().__init__(n_bits, **shared)
        self.margin, self.epsilon = margin, epsilon

    def _loss(self, y: np.ndarray) -> DNNHLoss:
        return DNNHLoss(LabelSimilarity(y), margin=self.margin, epsilon=self.epsilon)
