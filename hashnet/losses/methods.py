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
    import numpy as np
    import torch

    from hashnet.losses.pairwise import Similarity
    from hashnet.training import TrainConfig


class Loss(Protocol):
    """Anything the training loop can minimise.

    ``rows`` are positions in the training set the loss was made for, ``valid`` is false for padding, and
    ``beta=inf`` gives the loss of the signs themselves. ``guessing`` is the loss of relaxed codes of 0, which
    have learnt nothing; None where it says nothing about learning. A loss with weights of its own has them in
    an attribute ``module``, which is trained with the model.
    """

    guessing: float | None

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor: ...


# Settings worth trying on held-out training rows, besides the learning rates of the kind of backbone. All
# networks are trained for the same number of epochs. alpha * n_bits, unlike alpha, suits other lengths too.
_PAIRWISE_GRID: Mapping[str, list[Any]] = {"alpha_n_bits": [10, 15]}


@dataclass(frozen=True)
class DeepMethod:
    """A method that ``variant=NAME`` trains: its loss, its head, and what unset keys become.

    ``loss`` names a class as "module:Class" in this package. ``labels_only`` says that the loss is defined on
    the labelled training rows alone: neither on a pairs table nor on other rows. ``alpha`` None is
    10 / n_bits, ``jaccard_power`` is that of c_ij, ``threshold`` of pairs is 0 in the paper (see
    ``hashnet.losses.pairwise``). ``own`` marks variants that are not in the paper and stay
    out of its tables.
    """

    title: str  # in tables and figures
    full_name: str  # for the reader who meets the title for the first time
    loss: str
    schedule: str = "plain"
    class_weights: str = "none"
    continuous: bool = False
    head: str = "linear"
    grid: Mapping[str, list[Any]] = field(default_factory=lambda: _PAIRWISE_GRID)
    labels_only: bool = False
    alpha: float | None = None
    jaccard_power: float = 1.0
    threshold: float = 0.0
    own: bool = False

    def defaults(self) -> dict[str, Any]:
        """Configuration keys that the method sets where the user does not."""
        return {
            "schedule": self.schedule, "class_weights": self.class_weights, "continuous": self.continuous
        }  # fmt: skip


PAIRWISE, LABEL_TERM = "pairwise:PairwiseLoss", "label_term:LabelTermLoss"
METHODS: dict[str, DeepMethod] = {  # in the order of the paper's tables; the first four are its Table 3
    "hashnet+c": DeepMethod(
        "HashNet+C", "HashNet with graded similarity of label sets (Cao et al., 2017)",
        PAIRWISE, "staged", "global", continuous=True,
    ),
    "hashnet": DeepMethod(
        "HashNet", "deep learning to hash by continuation (Cao et al., 2017)", PAIRWISE, "staged", "global"
    ),
    "hashnet-w": DeepMethod("HashNet-W", "HashNet without weights for rare pairs", PAIRWISE, "staged"),
    "hashnet-sgn": DeepMethod(
        "HashNet-sgn", "HashNet without continuation", PAIRWISE, class_weights="global"
    ),
    "dhn": DeepMethod(
        "DHN", "Deep Hashing Network (Zhu et al., 2016)", "dhn:DHNLoss", alpha=1.0,
        grid={"quantisation": [0.01, 0.1, 1.0]},
    ),
    "dnnh": DeepMethod(
        "DNNH", "Deep Neural Network Hashing (Lai et al., 2015)", "dnnh:DNNHLoss", head="relu_slices",
        grid={"margin": [1.0, 2.0, 4.0]},
    ),
    "cnnh": DeepMethod(
        "CNNH", "Convolutional Neural Network Hashing (Xia et al., 2014)", "cnnh:CNNHLoss", grid={},
        labels_only=True,
    ),
    # Not the paper's: labels beside the pairs, with a threshold, which pays most where rows have several
    # (docs/defaults.md); DHN with HashNet's alpha, which is HashNet without weights and continuation.
    "hashnet+c+l": DeepMethod(
        "HashNet+C+L", "HashNet+C with a label term, not in the paper", LABEL_TERM, "staged", "global",
        continuous=True, jaccard_power=2.0, threshold=3.0, labels_only=True, own=True,
    ),
    "hashnet+l": DeepMethod(
        "HashNet+L", "HashNet with a label term, not in the paper", LABEL_TERM, "staged", "global",
        threshold=1.5, labels_only=True, own=True,
    ),
    "dhn+a": DeepMethod(
        "DHN, adaptive alpha", "Deep Hashing Network with HashNet's alpha", "dhn:DHNLoss",
        grid={"quantisation": [0.01, 0.1, 1.0]}, own=True,
    ),
}  # fmt: skip
AUTO = "auto"  # as a variant: the one that suits the data


MULTI_LABEL = 1.1  # mean number of labels of a labelled row above which data counts as multi-label


def variant_for(labels: np.ndarray | None) -> str:
    """The variant that suits the training rows' multi-hot labels; None where there are only pairs.

    A few rows with two labels among many with one do not make the data multi-label.

    >>> import numpy as np
    >>> variant_for(None), variant_for(np.eye(3)), variant_for(np.tri(3))
    ('hashnet', 'hashnet+l', 'hashnet+c+l')
    """
    if labels is None:
        return "hashnet"
    several = labels.sum() > MULTI_LABEL * labels.any(axis=1).sum()
    return "hashnet+c+l" if several else "hashnet+l"


def make_loss(config: TrainConfig, similarity: Similarity, *, trained: bool = True) -> Loss:
    """The loss of the configured method for rows of that similarity.

    ``trained=False`` measures other rows: without the label term, whose classifier is not at hand.
    """
    loss = config.method.loss
    module, _, name = (PAIRWISE if loss == LABEL_TERM and not trained else loss).partition(":")
    return getattr(importlib.import_module(f"hashnet.losses.{module}"), name).from_config(config, similarity)
