"""What a backbone takes and gives (BackboneSpec), and how a family of backbones is registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from hashnet.data import Preprocess

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class BackboneSpec:
    """Modality (``image``, ``features``, or ``activations`` for the last blocks), width of the output, and
    preprocessing.

    ``n_features`` is the number of values a row has when it reaches the hash layer, ``n_inputs`` the width of
    the input rows of the backbone ``features``. ``preprocess`` is None except for ``image``.
    """

    modality: str
    n_features: int
    n_inputs: int | None = None
    preprocess: Preprocess | None = None


@dataclass(frozen=True)
class BackboneRequest:
    """A backbone to make: ``weights`` is ``random``, ``pretrained`` or a file, ``n_inputs`` a row's width."""

    name: str
    weights: str = "random"
    download: bool = False
    n_inputs: int | None = None
    hidden: int | None = None


@dataclass(frozen=True)
class BackboneFamily:
    """Backbones that one function makes: those of ``names()``, and all whose name starts with ``prefix``."""

    names: Callable[[], Sequence[str]]
    make: Callable[[BackboneRequest], tuple[nn.Module, BackboneSpec]]
    prefix: str | None = None

    def __contains__(self, name: str) -> bool:
        return (self.prefix is not None and name.startswith(self.prefix)) or name in self.names()
