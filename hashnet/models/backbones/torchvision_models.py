"""Every torchvision classification model as a backbone: its classifier's last layer is removed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

from hashnet.errors import ModelError
from hashnet.models.backbones.spec import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    BackboneFamily,
    BackboneRequest,
    BackboneSpec,
    fit_weights,
    hub_file,
    read_weights,
)

# Extra arguments: auxiliary classifiers are for training on ImageNet; ``transform_input`` undoes the usual
# normalisation for weights that were ported from TensorFlow.
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "transform_input": True, "init_weights": True},
    "inception_v3": {"aux_logits": False, "transform_input": True, "init_weights": True},
}
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


@lru_cache(maxsize=1)
def torchvision_names() -> tuple[str, ...]:
    """Names of the classification models, sorted."""
    from torchvision import models

    return tuple(models.list_models(module=models))


def make_torchvision(request: BackboneRequest) -> tuple[nn.Module, BackboneSpec]:
    """The model without its last layer (AlexNet keeps fc6 and fc7), and its spec."""
    from torchvision import models

    from hashnet.data import Preprocess

    name, weights = request.name, request.weights
    known = models.get_model_weights(name)
    best = known.DEFAULT if len(known) else None
    crop, resize, mean, std = 224, 256, IMAGENET_MEAN, IMAGENET_STD
    options = dict(_OPTIONS.get(name, {}))
    if best is not None:
        about = best.transforms()
        crop, resize = about.crop_size[0], about.resize_size[0]
        mean, std = tuple(about.mean), tuple(about.std)
    if name.startswith("vit_"):
        options["image_size"] = crop  # the size of the position table follows from it
    module = models.get_model(name, weights=None, **options)
    last_name, last = [(n, m) for n, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1]
    n_features = last.in_features if isinstance(last, nn.Linear) else last.in_channels
    _replace(module, last_name, nn.Identity())
    if weights != "random":
        if weights == "pretrained":
            if best is None:
                raise ModelError(f"torchvision has no pretrained weights for {name}; give weights=FILE")
            weights = hub_file(best.url, name, request.download)
        state = _with_current_names(name, read_weights(weights))
        fit_weights(module, state, weights, optional=(f"{last_name}.", *_AUXILIARY))
    preprocess = Preprocess(resize=resize, crop=crop, mean=mean, std=std)
    return module, BackboneSpec("image", n_features, preprocess=preprocess)


def _replace(module: nn.Module, path: str, by: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, by)


def _with_current_names(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """DenseNet's files number the layers inside a block (``norm.1``), the code does not (``norm1``)."""
    if not name.startswith("densenet"):
        return state
    renamed = {}
    for key, value in state.items():
        head, dot, tail = key.partition("denselayer")
        for part in ("norm", "relu", "conv"):
            tail = tail.replace(f".{part}.1.", f".{part}1.").replace(f".{part}.2.", f".{part}2.")
        renamed[head + dot + tail] = value
    return renamed


TORCHVISION = BackboneFamily(torchvision_names, make_torchvision)
