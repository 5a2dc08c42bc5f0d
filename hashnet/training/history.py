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

from hashnet.io import storage

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
