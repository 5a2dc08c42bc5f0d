"""BackboneSpec: what a backbone takes in and gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashnet.data import Preprocess

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class BackboneSpec:
    """Modality (``image`` or ``features``), width of what it gives out, and preprocessing.

    ``n_features`` is the number of values a row has when it reaches the hash layer. ``n_inputs`` is the
    width of the input rows of a ``features`` backbone. ``preprocess`` is None for ``features``.
    """

    modality: str
    n_features: int
    n_inputs: int | None = None
    preprocess: Preprocess | None = None
