"""Every timm model as a backbone, under the name ``timm:NAME``, where timm is installed."""

from __future__ import annotations

import math

from torch import nn

from hashnet.errors import ModelError
from hashnet.models.backbones.spec import (
    BackboneFamily,
    BackboneRequest,
    BackboneSpec,
    fit_weights,
    read_weights,
)

PREFIX = "timm:"


def make_timm(request: BackboneRequest) -> tuple[nn.Module, BackboneSpec]:
    """timm's model of that name (after ``timm:``) without its classifier, and its spec."""
    from hashnet.data import Preprocess

    name, weights = request.name.removeprefix(PREFIX), request.weights
    try:
        import timm
        from timm.data import resolve_model_data_config
    except ImportError:
        raise ModelError(f"timm:{name} needs timm: pip install timm") from None
    if not timm.is_model(name.partition(".")[0]):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:3]
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise ModelError(f"timm has no model {name!r}{hint}")
    if weights == "pretrained" and not request.download:
        raise ModelError(
            f"timm downloads the weights of {name} unless they are in its cache: allow it with "
            "download=true, or give weights=FILE"
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


TIMM = BackboneFamily(list, make_timm, PREFIX)
