"""The training history: one row a step, one record a stage, kept as columns of JSON.

    steps   step, epoch, stage, beta, lr, J, L, quantisation, distinct, balance, entropy, rows_per_s
    stages  stage, beta, lr at its beginning, epochs, steps, J, L, … means over its last epoch, seconds

J is the loss of the relaxed codes, L of the signs (None where it was not measured), ``quantisation`` is
mean(1 - |g|), ``balance`` the largest share of equal bits in one bit position (0.5 is perfect, 1 a dead bit),
``entropy`` the mean entropy of the bit positions in bits (1 is perfect); the last three look at one batch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hashnet import storage
from hashnet.codes import bit_balance, distinct, pack_signs
from hashnet.models.heads import relax

KIND, FORMAT_VERSION, FILE = "history", 1, "history.json"
COLUMNS = (
    "step", "epoch", "stage", "beta", "lr", "J", "L", "quantisation", "distinct", "balance", "entropy",
    "rows_per_s",
)  # fmt: skip


@dataclass
class History:
    """Columns of numbers by name, and the records of the finished stages."""

    steps: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    stages: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        for name in COLUMNS:
            value = row.get(name)
            self.steps[name].append(_short(value) if isinstance(value, float) else value)

    def __len__(self) -> int:
        return len(self.steps["step"])

    def since(self, step: int) -> dict[str, np.ndarray]:
        """The columns from ``step`` on as float arrays, NaN where nothing was measured."""
        first = int(np.searchsorted(np.asarray(self.steps["step"]), step))
        return {name: np.array(column[first:], dtype=np.float64) for name, column in self.steps.items()}

    def to_dict(self) -> dict[str, Any]:
        return {"kind": KIND, "format_version": FORMAT_VERSION, "steps": self.steps, "stages": self.stages}

    @classmethod
    def from_dict(cls, about: dict[str, Any], uri: str) -> History:
        storage.check_format(about, uri, KIND, FORMAT_VERSION)
        return cls(about["steps"], about["stages"])


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_history(uri: str, history: History) -> None:
    """Writes ``history.json`` into the folder ``uri``."""
    text = json.dumps(history.to_dict(), separators=(",", ":"))  # compact: a number a line would be long
    storage.write_bytes(storage.join(uri, FILE), text.encode())


def read_history(uri: str) -> History:
    """The history kept in a model bundle or a checkpoint."""
    path = storage.join(uri, FILE)
    return History.from_dict(storage.read_json(path), path)


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
