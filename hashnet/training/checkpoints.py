"""Checkpoints and the history: what training needs to continue exactly where it was, without a pickle.

    step-00000400/tensors.safetensors   model, its average, momentum, weights of the stage's best score
    step-00000400/history.json          the history up to here
    step-00000400/state.json            step, stage, beta, learning rate, stopping rule, seed; written last:
                                        a checkpoint without it is incomplete

The learning rate is a function of (stage, step in the stage); the order of the rows, their augmentation and
every random number are functions of (seed, step). Those numbers are the state of schedule, data and RNG.

The history has one row per step and one record per stage, kept as columns of JSON. J is the loss of the
relaxed codes, L that of the signs (None where it was not measured), ``J_common`` and ``L_common`` are the
same by HashNet's loss where the method is another, ``quantisation`` is mean(1 - |g|),
``balance`` the largest share of equal bits in one bit position (0.5 is perfect, 1 a dead bit), ``entropy``
the mean entropy of the bit positions in bits (1 is perfect); the last three are of one batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from hashnet.errors import FormatError, HashnetError
from hashnet.io import read_checked, read_sealed, sealed, storage, write_sealed
from hashnet.models import ModelArtefact

HISTORY = "history.json"


@dataclass(frozen=True)
class StepRecord:
    """One step, NaN where something was not measured; ``total_steps`` if no further stage ends early."""

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
    J_common: float = math.nan
    L_common: float = math.nan
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

    def __post_init__(self) -> None:
        for name in COLUMNS:  # older versions had fewer
            self.steps.setdefault(name, [None] * len(self))

    def add(self, record: StepRecord) -> None:
        for name in COLUMNS:
            value = getattr(record, name)
            self.steps[name].append(_short(value) if isinstance(value, float) else value)

    def __len__(self) -> int:
        return len(self.steps["step"])

    def means_since(self, step: int, of_stage: int) -> dict[str, float | None]:
        """Mean of each of ``MEANS`` from ``step`` on; None where nothing was measured.

        A stage that ended early may have no row there: its last one counts. ``of_stage`` is its first step.
        """
        steps = np.asarray(self.steps["step"])
        first = int(np.searchsorted(steps, step))
        if first == len(steps) > 0 and steps[-1] >= of_stage:
            first -= 1
        means: dict[str, float | None] = {}
        for name in MEANS:
            column = np.array(self.steps[name][first:], dtype=np.float64)  # None becomes NaN
            known = column[np.isfinite(column)]
            means[name] = float(known.mean()) if len(known) else None
        return means


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_history(uri: str, history: History) -> str:
    """Writes ``history.json`` into the folder ``uri``; returns its sha256."""
    stages = [stage.to_dict() for stage in history.stages]
    about = sealed("history", FORMAT_VERSION, {"steps": history.steps, "stages": stages})
    # compact: a file with one number per line would be long
    data = json.dumps(about, separators=(",", ":")).encode()
    storage.write_bytes(storage.join(uri, HISTORY), data)
    return hashlib.sha256(data).hexdigest()


def read_history(uri: str) -> History:
    """The history in a model bundle or a checkpoint; FormatError where it is damaged."""
    model = ModelArtefact(uri)
    if model.exists() and HISTORY in model.header().files:
        model.read_file(HISTORY)  # another run's would have a seal, too
    about = read_sealed(storage.join(uri, HISTORY), "history", FORMAT_VERSION, "do without it: delete it")
    return History(about["steps"], [StageRecord(**stage) for stage in about["stages"]])


logger = logging.getLogger(__name__)
KIND, FORMAT_VERSION = "checkpoint", 1
TENSORS, STATE = "tensors.safetensors", "state.json"
KEEP = 2  # the newest, and the one before in case the newest is damaged


@dataclass
class TrainState:
    """The position of training. ``step`` counts all steps and is the position in the data."""

    seed: int
    step: int = 0
    stage: int = 0
    stage_step: int = 0
    beta: float = 1.0
    lr: float = 0.0
    epoch_loss: float = 0.0  # sum of J over the steps of this epoch so far
    best_loss: float | None = None  # lowest mean J of an epoch of this stage, or lowest negative score
    stale_epochs: int = 0  # epochs, or scores, since then


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk: ``tensors`` of model and optimiser, ``numbers`` of the optimiser."""

    state: TrainState
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]
    history: History


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        names = [name for name in storage.list_names(self.uri) if name.startswith("step-")]
        return sorted(
            int(name.removeprefix("step-"))
            for name in names
            if storage.exists(storage.join(self.uri, name, STATE))
        )

    def save(
        self,
        state: TrainState,
        modules: Mapping[str, torch.nn.Module],
        optimiser: torch.optim.Optimizer,
        history: History,
        best: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Writes a checkpoint of modules by name and removes all but the newest ``KEEP``.

        ``best`` are the weights that scored best in the stage so far.
        """
        folder = storage.join(self.uri, f"step-{state.step:08d}")
        optimiser_tensors, optimiser_numbers = _flatten(optimiser)
        tensors = {
            f"{name}.{k}": v.detach().cpu().contiguous()
            for name, module in modules.items()
            for k, v in module.state_dict().items()
        }
        tensors |= {f"best.{k}": v.detach().cpu().contiguous() for k, v in (best or {}).items()}
        data = save_tensors({k: v.clone() for k, v in (tensors | optimiser_tensors).items()})
        storage.write_bytes(storage.join(folder, TENSORS), data)
        about = {
            "history_sha256": write_history(folder, history),
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "state": asdict(state),
            "optimiser": optimiser_numbers,
        }
        write_sealed(storage.join(folder, STATE), KIND, FORMAT_VERSION, about)
        for step in self.steps()[:-KEEP]:
            storage.delete(storage.join(self.uri, f"step-{step:08d}"))

    def restore(
        self, modules: Mapping[str, torch.nn.Module], optimiser: torch.optim.Optimizer
    ) -> tuple[TrainState, History, dict[str, torch.Tensor] | None] | None:
        """Loads the newest undamaged checkpoint into modules and optimiser; None when there is none.

        Returns the state, the history, and the best weights of a stage that has some.
        """
        if (found := self.newest()) is None:
            return None
        for name, module in modules.items():
            prefix = f"{name}."
            weights = {k.removeprefix(prefix): v for k, v in found.tensors.items() if k.startswith(prefix)}
            try:
                if weights:  # an older version kept no average
                    module.load_state_dict(weights)
            except RuntimeError as error:
                raise FormatError(
                    f"the checkpoints in {self.uri} are of a model with other layers, as an older version "
                    "made them; finish that training with that version, or use another run folder"
                ) from error
        _unflatten(optimiser, found.tensors, found.numbers)
        best = {k.removeprefix("best."): v for k, v in found.tensors.items() if k.startswith("best.")}
        return found.state, found.history, best or None

    def newest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None when there is none."""
        for step in reversed(self.steps()):
            folder = storage.join(self.uri, f"step-{step:08d}")
            try:
                return self._read(folder)
            except HashnetError as error:
                logger.warning("checkpoint %s cannot be used (%s); trying the one before", folder, error)
        return None

    def _read(self, folder: str) -> Checkpoint:
        path = storage.join(folder, STATE)
        about = read_sealed(path, KIND, FORMAT_VERSION, "delete the folder")
        data = read_checked(storage.join(folder, TENSORS), about["tensors_sha256"], "delete the folder")
        if "history_sha256" in about:  # that of another checkpoint would have a seal, too
            read_checked(storage.join(folder, HISTORY), about["history_sha256"], "delete the folder")
        state = TrainState(**about["state"])
        return Checkpoint(state, load_tensors(data.to_pybytes()), about["optimiser"], read_history(folder))


def _flatten(optimiser: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The optimiser's tensors and its plain numbers, both by name."""
    tensors, numbers = {}, {}
    for parameter, values in optimiser.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimiser.{parameter}.{name}"] = value.detach().cpu().contiguous()
            else:
                numbers[f"{parameter}.{name}"] = value
    return tensors, numbers


def _unflatten(
    optimiser: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], numbers: dict[str, float]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    flat: dict[str, Any] = {
        k.removeprefix("optimiser."): v for k, v in tensors.items() if k.startswith("optimiser.")
    }
    for path, value in (flat | numbers).items():
        parameter, _, name = path.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    groups = optimiser.state_dict()["param_groups"]  # learning rates are set at every step
    optimiser.load_state_dict({"state": state, "param_groups": groups})
    for weights, values in optimiser.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == weights.shape:
                # a fused step walks both in memory order, so their layouts must match (channels_last)
                values[name] = torch.empty_like(weights).copy_(value)
