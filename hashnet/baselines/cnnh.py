"""CNNH: supervised hashing via image representation learning (Xia, Pan, Lai, Liu & Yan, AAAI 2014)."""

from __future__ import annotations

import numpy as np

from hashnet.baselines.deep import DeepBaseline
from hashnet.losses import CNNHLoss, similarity_codes


class CNNH(DeepBaseline):
    """Codes H of the training rows that imitate their similarity, then a network that regresses H.

    ``history_`` is the first stage's objective |S - H H^T / n_bits|^2, which never increases;
    ``losses_`` the mean squared difference of each epoch of the second.
    """

    name = "cnnh"
    monotone = True

    losses_: list[float]

    def _loss(self, y: np.ndarray) -> CNNHLoss:
        codes, self.history_ = similarity_codes(y, self.n_bits, self.seed)
        return CNNHLoss(codes)

    def _keep(self, epochs: list[float]) -> None:
        self.losses_ = epochs
