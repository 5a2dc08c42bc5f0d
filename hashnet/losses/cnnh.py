"""CNNH (Xia et al., AAAI 2014): codes that reproduce the similarities, then a network that regresses them.

Stage 1 minimises |S - H H^T / K|_F^2 over H in [-1, 1]^(n x K), S = +1 for similar and -1 for dissimilar
rows, one entry at a time by a Newton step, and takes signs. With the rest fixed, row h of H costs

    f(h) = 2/K^2 h^T G h - 4/K b^T h + (|h|^2 / K - 1)^2,    G = sum H_j H_j^T,  b = sum S_ij H_j  over j != i

so no n x n matrix is needed: G (K x K) is updated and b follows from packed label sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from hashnet.kernels import compiled
from hashnet.labels import as_multi_hot, pack_labels
from hashnet.losses.pairwise import LabelSimilarity, Similarity
from hashnet.models import relax

if TYPE_CHECKING:
    from hashnet.training import TrainConfig

MAX_SWEEPS, STOP_BELOW = 20, 1e-3  # stop when a sweep over all entries gains less than a thousandth


class CNNHLoss:
    """Mean squared difference between tanh(beta z) and the target signs; callable like every loss.

    ``targets`` int8 (n, n_bits) are ±1: row i is the target of row i of the training set, however batches
    are drawn. ``history`` is the objective of stage 1, which made them.
    """

    guessing = None

    def __init__(
        self, targets: Any, device: torch.device | str = "cpu", history: Sequence[float] = ()
    ) -> None:
        self.targets = torch.as_tensor(np.asarray(targets, dtype=np.int8)).to(device)
        self.history = list(history)

    @classmethod
    def from_config(cls, config: TrainConfig, similarity: Similarity) -> Self:
        """The loss for rows with labels; stage 1 runs here."""
        assert isinstance(similarity, LabelSimilarity)
        codes, history = similarity_codes(similarity.labels.cpu().numpy(), config.n_bits, config.seed)
        return cls(codes, similarity.labels.device, history)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor:
        targets = self.targets[rows].to(logits.dtype)  # (n, n_bits)
        squared = (relax(logits, beta) - targets).square().mean(dim=1)  # (n,)
        return (squared * valid).sum() / valid.sum().clamp(min=1)


def similarity_codes(labels: Any, n_bits: int, seed: int = 0) -> tuple[np.ndarray, list[float]]:
    """(signs int8 (n, n_bits), history): stage 1 for these labels.

    ``history`` holds |S - H H^T / K|_F^2 of the relaxed H at the start and after each sweep; it never rises.
    """
    words = pack_labels(as_multi_hot(labels))
    rng = np.random.default_rng(seed)
    H = rng.uniform(-1, 1, size=(len(words), n_bits))
    G = H.T @ H
    history = [float(objective(words, H))]
    for _ in range(MAX_SWEEPS):
        gain = newton_sweep(words, H, G, rng.permutation(len(H)))
        history.append(history[-1] - gain)
        if gain <= STOP_BELOW * history[-1]:
            break
    return np.where(H >= 0, 1, -1).astype(np.int8), history


@compiled
def pull(words: np.ndarray, H: np.ndarray, i: int, everything: np.ndarray) -> np.ndarray:
    """b = sum over j != i of S_ij H_j, (K,); ``everything`` is the sum of all rows of H."""
    similar = np.zeros(H.shape[1])
    for j in range(len(H)):
        shared = False
        for w in range(words.shape[1]):
            shared |= (words[i, w] & words[j, w]) != 0
        if shared and j != i:
            similar += H[j]
    return 2 * similar - (everything - H[i])


@compiled
def objective(words: np.ndarray, H: np.ndarray) -> float:
    """|S - H H^T / K|_F^2 with S_ii = 1."""
    n, K = H.shape
    everything = H.sum(axis=0)
    G = H.T @ H
    total = n * n + (G * G).sum() / K**2
    for i in range(n):
        own = H[i] @ H[i]
        total -= 2 / K * (own + pull(words, H, i, everything) @ H[i])
    return total


@compiled
def newton_sweep(words: np.ndarray, H: np.ndarray, G: np.ndarray, order: np.ndarray) -> float:
    """The gain of one Newton step for every entry, rows in ``order``; H and G = H^T H change in place."""
    K = H.shape[1]
    everything = H.sum(axis=0)
    gained = 0.0
    for i in order:
        h = H[i].copy()
        b = pull(words, H, i, everything)
        rest = G - np.outer(h, h)  # G without row i
        Gh = rest @ h
        q = h @ h / K - 1
        for k in range(K):  # f'(h_k) and f''(h_k), then a Newton step clipped to [-1, 1]
            slope = 4 / K**2 * Gh[k] - 4 / K * b[k] + 4 / K * q * h[k]
            curve = 4 / K**2 * rest[k, k] + 4 / K * q + 8 / K**2 * h[k] ** 2
            step = -slope / curve if curve > 0 else -np.sign(slope) * 2
            step = min(max(h[k] + step, -1.0), 1.0) - h[k]
            for _ in range(8):  # f is of degree 4 in one entry: a step that increases it is halved
                q_new = q + (2 * h[k] * step + step**2) / K
                change = (
                    4 / K**2 * Gh[k] * step
                    + 2 / K**2 * rest[k, k] * step**2
                    - 4 / K * b[k] * step
                    + q_new**2
                    - q**2
                )
                if change <= 0:
                    h[k] += step
                    Gh += rest[:, k] * step
                    q = q_new
                    gained -= change
                    break
                step /= 2
        everything += h - H[i]
        G[:] = rest + np.outer(h, h)
        H[i] = h
    return gained
