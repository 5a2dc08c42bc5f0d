"""Models: backbones by name, the hash layer, tanh(beta z) → sgn, and the bundle a model is stored as."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.models.backbones import backbone_names, check_backbone, make_backbone, try_crop
    from hashnet.models.backbones.spec import BackboneSpec
    from hashnet.models.blocks import DividedBackbone, divide
    from hashnet.models.bundle import BundleInfo, ModelArtefact, bundle_info, load_bundle, save_bundle
    from hashnet.models.hash_model import HEADS, HashModel, build_model, relax, to_signs
    from hashnet.models.inference import (
        BatchedInference,
        OutputModule,
        Submit,
        as_tensor,
        device_memory,
        make_copies,
        out_of_memory,
    )

__all__, __getattr__ = lazy_names(__name__)
