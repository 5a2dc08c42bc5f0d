"""From features to logits, from logits to relaxed codes and to signs.

    features (n, d)  →  logits z (n, n_bits)  →  relaxed tanh(beta z)  →  signs (z >= 0 is +1)

The hash layer ``fch`` is linear in HashNet, DHN and CNNH. DNNH cuts the features into one slice per bit.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hashnet.errors import ModelError

FCH_STD = 0.01  # fch starts as N(0, 0.01): logits near 0, where tanh and sigmoid have their slope


class LinearHead(nn.Module):
    """The hash layer ``fch``: weights N(0, 0.01), bias 0."""

    def __init__(self, n_features: int, n_bits: int) -> None:
        super().__init__()
        self.fch = nn.Linear(n_features, n_bits)
        nn.init.normal_(self.fch.weight, std=FCH_STD)
        nn.init.zeros_(self.fch.bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (n, d) → (n, n_bits)
        return self.fch(features)


class SliceHead(nn.Module):
    """Divide and encode (DNNH): a layer of ``width`` units per bit, each slice → one unit.

    Its logits go through a sigmoid in DNNH's loss; a bit is 1 where the sigmoid is >= 0.5, which is
    where the logit is >= 0, as everywhere else. There is nothing between the two layers, so they are
    multiplied first: a batch then passes ``width`` times fewer weights, with the same gradient.
    """

    def __init__(self, n_features: int, n_bits: int, width: int = 50) -> None:
        super().__init__()
        self.n_bits, self.width = n_bits, width
        self.divide = nn.Linear(n_features, n_bits * width)
        self.weight = nn.Parameter(torch.empty(n_bits, width))
        self.bias = nn.Parameter(torch.zeros(n_bits))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (n, d) → (n, n_bits)
        of_bit = self.weight[:, None]  # (n_bits, 1, width)
        weight = of_bit @ self.divide.weight.unflatten(0, (self.n_bits, self.width))  # (n_bits, 1, d)
        bias = (self.weight * self.divide.bias.unflatten(0, (self.n_bits, self.width))).sum(dim=1)
        return functional.linear(features, weight[:, 0], bias + self.bias)


HEADS = {"linear": LinearHead, "slices": SliceHead}


def make_head(name: str, n_features: int, n_bits: int) -> nn.Module:
    """The head called ``name``: ``linear`` or ``slices``."""
    if name not in HEADS:
        raise ModelError(f"unknown head {name!r}; there are {', '.join(HEADS)}")
    return HEADS[name](n_features, n_bits)


def relax(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """Relaxed codes g = tanh(beta z) in (-1, 1); ``beta=inf`` gives the signs themselves."""
    return to_signs(logits) if beta == float("inf") else torch.tanh(beta * logits)


def to_signs(logits: torch.Tensor) -> torch.Tensor:
    """h = sgn(z) as ±1 in the same dtype, with sgn(0) = +1 (torch.sign would give 0)."""
    return (logits >= 0).to(logits.dtype) * 2 - 1
