"""The two backbones that need no other package: a small CNN for tiny pictures, and none at all."""

from __future__ import annotations

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Three convolutions and an average: uint8 pictures from 8 x 8 up, about 0.1 M weights.

    GroupNorm looks at one picture at a time, so that the batch, and how it is cut over workers,
    changes nothing (BatchNorm would).
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_in, n_out in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.GroupNorm(8, n_out), nn.ReLU()]
            if n_out < 4 * width:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)  # 2 x 2 keeps where something is: a 6 is not a 9
        self.n_features = 4 * width * 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, 3, h, w) → (n, n_features)
        return self.pool(self.layers(x)).flatten(1)


class Identity(nn.Module):
    """The ``features`` backbone: rows come as vectors, with an optional hidden layer."""

    def __init__(self, n_inputs: int, hidden: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_inputs, hidden), nn.ReLU()) if hidden else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, n_inputs) → (n, n_features)
        return self.layers(x)
