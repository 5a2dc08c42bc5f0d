"""``small_cnn``: a small CNN for tiny pictures (digits, CIFAR)."""

from __future__ import annotations

import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models.backbones.spec import (
    BackboneFamily,
    BackboneRequest,
    BackboneSpec,
    fit_weights,
    read_weights,
)


class SmallCNN(nn.Module):
    """Three convolutions and an average: uint8 pictures from 8 x 8 up, about 0.1 M weights.

    GroupNorm normalises each picture alone, so that results depend neither on the batch nor on how it is
    divided among workers (with BatchNorm they would).
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_in, n_out in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.GroupNorm(8, n_out), nn.ReLU()]
            if n_out < 4 * width:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)  # 2 x 2 keeps some position: a 6 is not a 9
        self.n_features = 4 * width * 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, 3, h, w) → (n, n_features)
        return self.pool(self.layers(x)).flatten(1)


def make_small(request: BackboneRequest) -> tuple[nn.Module, BackboneSpec]:
    """The small CNN and its spec."""
    from hashnet.data import Preprocess

    if request.weights == "pretrained":
        raise ModelError("small_cnn has no pretrained weights; use weights=random or weights=FILE")
    module = SmallCNN()
    if request.weights != "random":
        fit_weights(module, read_weights(request.weights), request.weights)
    preprocess = Preprocess(resize=36, crop=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), flip=False)
    return module, BackboneSpec("image", module.n_features, preprocess=preprocess)


SMALL_CNN = BackboneFamily(lambda: ["small_cnn"], make_small)
