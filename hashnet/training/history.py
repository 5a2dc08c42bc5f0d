"""The training history: one row per step and one record per stage, kept as columns of JSON.

J is the loss of the relaxed codes, L that of the signs (None where it was not measured), ``quantisation`` is
mean(1 - |g|), ``balance`` the largest share of equal bits in one bit position (0.5 is perfect, 1 a dead bit),
``entropy`` the mean entropy of the bit positions in bits (1 is perfect); the last three are of one batch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hashnet.io import storage

KIND, FORMAT_VERSION, FILE = "history", 1, "history.json"


@dataclass(frozen=True)
class StepRecord:
    """One step, NaN where something was not measured; ``total_steps`` of all stages, if none ends early."""

    step: int
    epoch: int
    stage: int
    beta: float
    lr: float = math.nan
    J: float = math.nan
    L: float = math.nan
    quantisation: float = math.nan
    distinct: int = 0
    balance: float = math.nan
    entropy: float = math.nan
    rows_per_s: float = math.nan
    total_steps: int = 0


@dataclass(frozen=True)
class EpochRecord:
    """The end of an epoch; J is its mean."""

    epoch: int
    step: int
    stage: int
    beta: float
    J: float


@dataclass
class StageRecord:
    """A finished stage: ``lr`` is that of its first step, J and those after it are means of its last epoch.

    ``map`` is set by the callback of a run that measures it after each stage.
    """

    stage: int
    beta: float
    lr: float
    first_step: int
    steps: int
    epochs: int
    seconds: float
    J: float | None = None
    L: float | None = None
    quantisation: float | None = None
    distinct: float | None = None
    balance: float | None = None
    entropy: float | None = None
    rows_per_s: float | None = None
    map: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "map" or value is not None}


COLUMNS = tuple(f.name for f in dataclasses.fields(StepRecord) if f.name != "total_steps")
MEANS = ("J", "L", "quantisation", "distinct", "balance", "entropy", "rows_per_s")  # of a stage's last epoch


@dataclass
class History:
    """Columns of numbers by name, and the records of the finished stages."""

    steps: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    stages: list[StageRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        for name in COLUMNS:
            value = getattr(record, name)
            self.steps[name].append(_short(value) if isinstance(value, float) else value)

    def __len__(self) -> int:
        return len(self.steps["step"])

    def means_since(self, step: int) -> dict[str, float | None]:
        """Mean of each of ``MEANS`` from ``step`` on; None where nothing was measured."""
        first = int(np.searchsorted(np.asarray(self.steps["step"]), step))
        means: dict[str, float | None] = {}
        for name in MEANS:
            column = np.array(self.steps[name][first:], dtype=np.float64)  # None becomes NaN
            known = column[np.isfinite(column)]
            means[name] = float(known.mean()) if len(known) else None
        return means


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_history(uri: str, history: History) -> None:
    """Writes ``history.json`` into the folder ``uri``."""
    stages = [stage.to_dict() for stage in history.stages]
    about = {"kind": KIND, "format_version": FORMAT_VERSION, "steps": history.steps, "stages": stages}
    text = json.dumps(about, separators=(",", ":"))  # compact: a file with one number per line would be long
    storage.write_bytes(storage.join(uri, FILE), text.encode())


def read_history(uri: str) -> History:
    """The history in a model bundle or a checkpoint."""
    path = storage.join(uri, FILE)
    about = storage.check_format(storage.read_json(path), path, KIND, FORMAT_VERSION)
    return History(about["steps"], [StageRecord(**stage) for stage in about["stages"]])
