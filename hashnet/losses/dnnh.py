"""DNNH's triplet loss on almost binary codes (Lai et al., CVPR 2015)."""

from __future__ import annotations

import math

import torch

from hashnet.losses.pairwise import Similarity, check_pairs


class DNNHLoss:
    """Mean over triplets of max(0, margin + |F_a - F_p|^2 - |F_a - F_n|^2); callable like every loss.

    F = threshold(sigmoid(z)) in [0, 1]: 0 below 0.5 - epsilon, 1 above 0.5 + epsilon, the sigmoid between.
    p is similar to a, n dissimilar, both known; all triplets of the batch count. beta scales z as
    everywhere, and ``inf`` gives the loss of the bits themselves.
    """

    def __init__(self, similarity: Similarity, *, margin: float = 1.0, epsilon: float = 0.4) -> None:
        check_pairs(similarity.counts)
        self.similarity, self.margin, self.epsilon = similarity, margin, epsilon

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
    """Mean of max(0, margin + d_ap - d_an) over all triplets, in O(n^2 log n) time and O(n^2) memory.

    With the negatives of an anchor sorted, those that violate the margin of a positive come first: their
    number and the sum of their distances give its part of the loss.
    """
    far = torch.where(negative, distance, torch.inf)
    order = far.argsort(dim=1)
    sorted_far = far.gather(1, order)
    # running sums with a leading 0: the inf behind the last negative never gets in
    sums = torch.where(torch.isinf(sorted_far), 0.0, sorted_far).cumsum(dim=1)
    sums = torch.cat([torch.zeros_like(sums[:, :1]), sums], dim=1)
    reach = margin + distance  # (n, n): negatives nearer than this violate
    violating = torch.searchsorted(sorted_far.detach(), reach.detach().contiguous())
    parts = (violating * reach - sums.gather(1, violating)) * positive
    n_triplets = (positive.sum(dim=1) * negative.sum(dim=1)).sum()
    return parts.sum() / n_triplets.clamp(min=1)
