"""DNNH's triplet loss on almost binary codes (Lai et al., CVPR 2015)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from hashnet.kernels import compiled
from hashnet.labels import check_pairs
from hashnet.losses.pairwise import Similarity

if TYPE_CHECKING:
    from hashnet.training import TrainConfig


class DNNHLoss:
    """Mean over triplets of max(0, margin + |F_a - F_p|^2 - |F_a - F_n|^2); callable like every loss.

    F = threshold(sigmoid(z)) in [0, 1]: 0 below 0.5 - epsilon, 1 above 0.5 + epsilon, the sigmoid between.
    p is similar to a, n dissimilar, both known; all triplets of the batch count. beta scales z as
    everywhere, and ``inf`` gives the loss of the bits themselves.
    """

    guessing = None

    def __init__(self, similarity: Similarity, *, margin: float = 1.0, epsilon: float = 0.4) -> None:
        check_pairs(similarity.counts)
        self.similarity, self.margin, self.epsilon = similarity, margin, epsilon

    @classmethod
    def from_config(cls, config: TrainConfig, similarity: Similarity) -> Self:
        return cls(similarity, margin=config.margin, epsilon=config.epsilon)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor:
        pairs = self.similarity.pairs(rows)
        counted = pairs.known & valid[:, None] & valid[None, :]
        distance = squared_distances(almost_bits(logits, beta, self.epsilon))
        return triplet_hinge(distance, counted & pairs.similar, counted & ~pairs.similar, self.margin)


def almost_bits(logits: torch.Tensor, beta: float, epsilon: float) -> torch.Tensor:
    """threshold(sigmoid(beta z)) in [0, 1]."""
    if beta == math.inf:
        return (logits >= 0).to(logits.dtype)
    s = torch.sigmoid(beta * logits)
    return torch.where(s < 0.5 - epsilon, 0.0, torch.where(s > 0.5 + epsilon, 1.0, s)).to(logits.dtype)


def squared_distances(codes: torch.Tensor) -> torch.Tensor:
    """|c_i - c_j|^2, (n, n), with a gradient that is finite at 0."""
    size = codes.square().sum(dim=1)
    return (size[:, None] + size - 2 * codes @ codes.T).clamp(min=0)


def triplet_hinge(
    distance: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, margin: float
) -> torch.Tensor:
    """Mean of max(0, margin + d_ap - d_an) over all triplets, in O(n^2) memory.

    Given which triplets violate the margin, the loss is linear in the distances: a pair counts as often as
    it occurs in one of them.
    """
    pull, push = (
        torch.from_numpy(counts).to(distance)
        for counts in violations(*(t.detach().cpu().numpy() for t in (distance, positive, negative)), margin)
    )
    n_triplets = (positive.sum(dim=1) * negative.sum(dim=1)).sum().clamp(min=1)
    return ((pull * (margin + distance)).sum() - (push * distance).sum()) / n_triplets


@compiled
def violations(distance, positive, negative, margin):  # type: ignore[no-untyped-def]
    """How many triplets with d_an < margin + d_ap contain each (a, p) and each (a, n): two int32 (n, n)."""
    n = len(distance)
    pull, push = np.zeros((n, n), dtype=np.int32), np.zeros((n, n), dtype=np.int32)
    far, place, met = (
        np.empty(n, dtype=distance.dtype),
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int32),
    )
    for a in range(n):
        m = 0  # far[:m] (m,): the distances of a's negatives, place[:m] their columns
        for j in range(n):
            if negative[a, j]:
                far[m], place[m], met[m] = distance[a, j], j, 0
                m += 1
        for j in range(n):
            if positive[a, j]:
                reach, count = distance.dtype.type(margin + distance[a, j]), np.int32(0)
                for e in range(m):  # a plain loop over 1-D arrays, which LLVM vectorises
                    nearer = np.int32(far[e] < reach)
                    met[e] += nearer
                    count += nearer
                pull[a, j] = count
        for e in range(m):
            push[a, place[e]] = met[e]
    return pull, push
