"""Checkpoints: everything that training needs to continue exactly where it was, without a pickle.

    step-00000400/tensors.safetensors   model, and momentum of the optimiser
    step-00000400/history.json          the history up to here
    step-00000400/state.json            step, stage, beta, learning rate, stopping rule, seed; written last:
                                        a checkpoint without it is incomplete

The learning rate is a function of (stage, step in the stage); the order of the rows, their augmentation and
every random number are functions of (seed, step). Those numbers are the state of schedule, data and RNG.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from hashnet.errors import FormatError, HashnetError
from hashnet.io import storage
from hashnet.training.history import History, read_history, write_history

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
    best_loss: float | None = None  # lowest mean J of an epoch of this stage
    stale_epochs: int = 0  # epochs since then


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
        self, state: TrainState, model: torch.nn.Module, optimiser: torch.optim.Optimizer, history: History
    ) -> None:
        """Writes a checkpoint and removes all but the newest ``KEEP``."""
        folder = storage.join(self.uri, f"step-{state.step:08d}")
        optimiser_tensors, optimiser_numbers = _flatten(optimiser)
        tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
        data = save_tensors({k: v.clone() for k, v in (tensors | optimiser_tensors).items()})
        storage.write_bytes(storage.join(folder, TENSORS), data)
        write_history(folder, history)
        about = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "state": asdict(state),
            "optimiser": optimiser_numbers,
        }
        storage.write_json(storage.join(folder, STATE), about)
        for step in self.steps()[:-KEEP]:
            storage.delete(storage.join(self.uri, f"step-{step:08d}"))

    def restore(
        self, model: torch.nn.Module, optimiser: torch.optim.Optimizer
    ) -> tuple[TrainState, History] | None:
        """Loads the newest undamaged checkpoint into model and optimiser; None when there is none."""
        if (found := self.newest()) is None:
            return None
        weights = {k.removeprefix("model."): v for k, v in found.tensors.items() if k.startswith("model.")}
        model.load_state_dict(weights)
        _unflatten(optimiser, found.tensors, found.numbers)
        return found.state, found.history

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
        about = storage.check_format(storage.read_json(path), path, KIND, FORMAT_VERSION)
        data = storage.read_bytes(storage.join(folder, TENSORS))
        if hashlib.sha256(data).hexdigest() != about["tensors_sha256"]:
            raise FormatError(f"{TENSORS} does not have the sha256 recorded in {STATE}")
        state = TrainState(**about["state"])
        return Checkpoint(state, load_tensors(data), about["optimiser"], read_history(folder))


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
