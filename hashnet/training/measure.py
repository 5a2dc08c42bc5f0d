"""How binary the codes are, and how good: J, L, |g|, bit statistics, MAP."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from hashnet.codes import bit_balance, dead_bits, distinct, pack_signs
from hashnet.io import Progress
from hashnet.losses import Loss
from hashnet.models import HashModel, relax
from hashnet.training.sources import Source

BINS = 100  # of |g| in [0, 1], as in the paper's histogram
BATCH = 256
BINARY = 0.99  # an entry with |g| above this counts as binary


@torch.no_grad()
def logits_of(
    model: HashModel, source: Source, rows: np.ndarray | None = None, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, np.ndarray]:
    """Logits float32 (n, n_bits) on the CPU, and which rows have finite ones; the model is left in eval."""
    rows = np.arange(len(source)) if rows is None else rows
    model.to(device).eval()
    logits, usable = [], []
    progress = Progress(len(rows), "rows", "measuring the model")
    for start in range(0, len(rows), BATCH):
        inputs, good = source.batch(rows[start : start + BATCH], epoch=0)
        logits.append(model(inputs.to(device)).float().cpu())
        usable.append(good & logits[-1].isfinite().all(dim=1).numpy())
        progress.update(len(good))
    progress.close()
    if not logits:
        return torch.zeros(0, model.n_bits), np.zeros(0, dtype=bool)
    return torch.cat(logits), np.concatenate(usable)


def measure(
    logits: torch.Tensor, beta: float, loss: Loss | None = None, classes: int | None = None
) -> dict[str, Any]:
    """J and L, the share of |g| > 0.99 and its histogram, and the statistics of the bits, as plain numbers.

    ``loss`` was built for exactly these rows, in this order; without it J and L are None. The histogram
    counts |g| = |tanh(beta z)| in 100 bins of [0, 1].
    """
    rows = torch.arange(len(logits))
    valid = torch.ones(len(logits), dtype=torch.bool)
    relaxed = relax(logits, beta).abs()
    codes = pack_signs(logits)
    ones = bit_balance(codes)
    counts, _ = np.histogram(relaxed.numpy(), bins=BINS, range=(0, 1))
    return {
        "rows": len(logits),
        "n_bits": int(logits.shape[1]),
        "classes": classes,
        "beta": beta,
        "J": float(loss(logits, rows, valid, beta)) if loss else None,
        "L": float(loss(logits, rows, valid, math.inf)) if loss else None,
        "quantisation": float((1 - relaxed).mean()),
        "binary_share": float((relaxed > BINARY).float().mean()),
        "histogram": counts.tolist(),
        "distinct": distinct(codes),
        "dead_bits": int(dead_bits(ones).sum()),
        "bit_balance": [round(float(share), 6) for share in ones],
        "entropy": float(bit_entropy(ones).mean()),
    }


def look_at(logits: torch.Tensor, beta: float) -> dict[str, float]:
    """quantisation, distinct, balance and entropy of a batch of logits (n, n_bits)."""
    logits = logits.detach()
    codes = pack_signs(logits)
    ones = bit_balance(codes)
    return {
        "quantisation": float((1 - relax(logits, beta).abs()).mean()),
        "distinct": distinct(codes),
        "balance": float(np.maximum(ones, 1 - ones).max()),
        "entropy": float(bit_entropy(ones).mean()),
    }


def bit_entropy(ones: np.ndarray) -> np.ndarray:
    """Entropy in bits of positions that are 1 with these shares."""
    p = np.clip(ones, 1e-12, 1 - 1e-12)
    return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
