"""Models: backbones by name, the hash layer, tanh(beta z) → sgn."""

from hashnet.models.backbones import backbone_names, check_backbone, make_backbone
from hashnet.models.hash_model import HashModel, build_model
from hashnet.models.heads import HEADS, relax, to_signs
from hashnet.models.spec import BackboneSpec

__all__ = [
    "HEADS",
    "BackboneSpec",
    "HashModel",
    "backbone_names",
    "build_model",
    "check_backbone",
    "make_backbone",
    "relax",
    "to_signs",
]
