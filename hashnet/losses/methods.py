"""METHODS: every deep method, registered once, for training, comparison, reports and baselines alike.

A new loss is one file in this package, with a class that has the signature of ``Loss`` and a ``from_config``,
and one entry here. Reading the table imports no torch: a loss is imported when it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from hashnet.losses.pairwise import Similarity
    from hashnet.training import TrainConfig


class Loss(Protocol):
    """Anything the training loop can minimise.

    ``rows`` are positions in the training set the loss was made for, ``valid`` is false for padding, and
    ``beta=inf`` gives the loss of the signs themselves. ``guessing`` is the loss of relaxed codes of 0, which
    have learnt nothing; None where it says nothing about learning.
    """

    guessing: float | None

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor: ...


# Settings worth trying on held-out training rows. All networks are trained for the same number of epochs, and
# HashNet's variants and DHN have the same trials. alpha * n_bits, unlike alpha, suits other code lengths too.
_PAIRWISE_GRID: Mapping[str, list[Any]] = {"lr": [0.01, 0.02, 0.03], "alpha_n_bits": [10, 15]}


@dataclass(frozen=True)
class DeepMethod:
    """A method that ``variant=NAME`` trains: its loss, its head, and what unset keys become.

    ``loss`` names a class as "module:Class" in this package. ``labels_only`` says that the loss is defined on
    the labelled training rows alone: neither on a pairs table nor on other rows.
    """

    title: str  # in tables and figures
    loss: str
    schedule: str = "plain"
    class_weights: str = "none"
    continuous: bool = False
    head: str = "linear"
    grid: Mapping[str, list[Any]] = field(default_factory=lambda: _PAIRWISE_GRID)
    labels_only: bool = False

    def defaults(self) -> dict[str, Any]:
        """Configuration keys that the method sets where the user does not."""
        return {
            "schedule": self.schedule, "class_weights": self.class_weights, "continuous": self.continuous
        }  # fmt: skip


PAIRWISE = "pairwise:PairwiseLoss"
METHODS: dict[str, DeepMethod] = {  # in the order of the paper's tables; the first four are its Table 3
    "hashnet+c": DeepMethod("HashNet+C", PAIRWISE, "staged", "global", continuous=True),
    "hashnet": DeepMethod("HashNet", PAIRWISE, "staged", "global"),
    "hashnet-w": DeepMethod("HashNet-W", PAIRWISE, "staged"),
    "hashnet-sgn": DeepMethod("HashNet-sgn", PAIRWISE, class_weights="global"),
    "dhn": DeepMethod("DHN", "dhn:DHNLoss"),
    "dnnh": DeepMethod(
        "DNNH", "dnnh:DNNHLoss", head="slices", grid={"lr": [0.01, 0.02], "margin": [1.0, 2.0, 4.0]}
    ),
    "cnnh": DeepMethod(
        "CNNH", "cnnh:CNNHLoss", grid={"lr": [0.003, 0.01, 0.02, 0.03]}, labels_only=True
    ),
}  # fmt: skip


def make_loss(config: TrainConfig, similarity: Similarity) -> Loss:
    """The loss of the configured method for rows of that similarity."""
    module, _, name = METHODS[config.variant].loss.partition(":")
    return getattr(importlib.import_module(f"hashnet.losses.{module}"), name).from_config(config, similarity)
