"""Losses, one a file, all with one signature, so that one training loop runs every deep method.

    loss(logits (n, n_bits), rows (n,) int64, valid (n,) bool, beta) → scalar tensor

``rows`` are positions in the training set the loss was built for, ``valid`` is false for padding,
and ``beta=inf`` asks for the loss of the signs themselves.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hashnet.losses.cnnh import CNNHLoss, similarity_codes
from hashnet.losses.dhn import DHNLoss
from hashnet.losses.dnnh import DNNHLoss
from hashnet.losses.pairwise import PairwiseLoss, Similarity
from hashnet.losses.similarity import LabelSimilarity, TableSimilarity


class Loss(Protocol):
    """Anything the training loop can minimise."""

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor: ...


__all__ = [
    "CNNHLoss",
    "DHNLoss",
    "DNNHLoss",
    "LabelSimilarity",
    "Loss",
    "PairwiseLoss",
    "Similarity",
    "TableSimilarity",
    "similarity_codes",
]
