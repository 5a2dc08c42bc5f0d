"""HashNet's pair loss beside a classifier of the relaxed codes: a variant of our own, not the paper's.

    J = J_pairs + weight * mean over rows of sum_c BCE(v_c . g + b_c, y_c) / (mean number of labels)

A linear classifier on g = tanh(beta z) says which labels a row has; codes from which the labels can be read
off also rank by them better. DSDH (Li et al., NIPS 2017) and SDH do the like. It needs labels: a table of
pairs has none. The classifier is trained with the model and left out of the model bundle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import nn
from torch.nn import functional

from hashnet.losses.pairwise import LabelSimilarity, PairwiseLoss, Similarity
from hashnet.models import relax

if TYPE_CHECKING:
    from hashnet.training import TrainConfig


class LabelTermLoss:
    """Callable like PairwiseLoss; ``module`` is the classifier, which the loop trains with the model."""

    guessing = None  # the label term has no value of its own that means "nothing learnt"

    def __init__(self, pairs: PairwiseLoss, labels: torch.Tensor, n_bits: int, weight: float) -> None:
        self.pairs, self.labels, self.weight = pairs, labels, weight
        self.per_row = max(float(labels.sum()) / max(len(labels), 1), 1e-9)
        self.module = nn.Linear(n_bits, labels.shape[1]).to(labels.device)
        nn.init.zeros_(self.module.weight)  # the first codes say nothing about labels
        nn.init.zeros_(self.module.bias)

    @classmethod
    def from_config(cls, config: TrainConfig, similarity: Similarity) -> Self:
        assert isinstance(similarity, LabelSimilarity)
        pairs = PairwiseLoss.from_config(config, similarity)
        return cls(pairs, similarity.labels, config.n_bits, config.label_weight)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor:
        y = self.labels[rows].to(logits.dtype)  # (n, n_classes)
        scores = self.module(relax(logits, beta))
        losses = functional.binary_cross_entropy_with_logits(scores, y, reduction="none").sum(dim=1)  # (n,)
        term = (losses * valid).sum() / (valid.sum().clamp(min=1) * self.per_row)
        return self.pairs(logits, rows, valid, beta) + self.weight * term
