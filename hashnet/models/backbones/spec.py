"""What a backbone takes and gives (BackboneSpec), and how a family of backbones is registered."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hashnet.errors import HashnetError, ModelError
from hashnet.io import storage

if TYPE_CHECKING:
    from torch import nn

    from hashnet.data import Preprocess

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class BackboneSpec:
    """Modality (``image``, ``features``, or ``activations`` for the last blocks), ``n_features``, the number
    of values a row has when it reaches the head, and preprocessing, which is None except for ``image``."""

    modality: str
    n_features: int
    preprocess: Preprocess | None = None


@dataclass(frozen=True)
class BackboneRequest:
    """A backbone to make: ``weights`` is ``random``, ``pretrained`` or a file, ``n_inputs`` a row's width."""

    name: str
    weights: str = "random"
    download: bool = False
    n_inputs: int | None = None


@dataclass(frozen=True)
class BackboneFamily:
    """Backbones that one function makes: those of ``names()``, and all whose name starts with ``prefix``."""

    names: Callable[[], Sequence[str]]
    make: Callable[[BackboneRequest], tuple[nn.Module, BackboneSpec]]
    prefix: str | None = None

    def __contains__(self, name: str) -> bool:
        return (self.prefix is not None and name.startswith(self.prefix)) or name in self.names()


# ---------------------------------------------------------------- weights
# Weights into a backbone: a file, torchvision's or the pip packages' pretrained ones, or none.
#
# Pickles are read with ``weights_only=True``: a file cannot run code.

SHOWN_KEYS = 5


def read_weights(uri: str) -> dict[str, torch.Tensor]:
    """The tensors of a ``.pth``/``.pt``/``.safetensors`` file, wrappers and ``module.`` removed."""
    if not storage.exists(uri):
        raise ModelError(f"the weights file {uri} does not exist")
    with storage.local_copy(uri) as path:
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                state: Any = load_file(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
        except HashnetError:
            raise
        except Exception as error:  # unpickling fails in many ways, which all mean the same to the user
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{uri} does not hold plain tensors ({reason}); save a state_dict") from error
    for wrapper in ("state_dict", "model", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ModelError(f"{uri} holds {type(state).__name__}, not a state_dict of tensors")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def fit_weights(
    module: nn.Module, state: dict[str, torch.Tensor], source: str, optional: tuple[str, ...] = ()
) -> None:
    """Loads ``state`` into ``module``; ModelError names the keys that do not fit.

    Keys that start with one of ``optional`` (the classifier that was cut off, auxiliary heads) may be
    there or not.
    """
    expected = module.state_dict()
    # BatchNorm's counters are absent from old files and unused with a fixed momentum
    missing = [k for k in expected if k not in state and not k.endswith("num_batches_tracked")]
    extra = [k for k in state if k not in expected and not k.startswith(optional)]
    shapes = [
        f"{k} is {tuple(state[k].shape)}, the model has {tuple(expected[k].shape)}"
        for k in expected
        if k in state and state[k].shape != expected[k].shape
    ]
    if missing or extra or shapes:
        parts = [
            f"{what} {_some(keys)}"
            for what, keys in (("missing", missing), ("unexpected", extra), ("other shape:", shapes))
            if keys
        ]
        raise ModelError(f"the weights of {source} do not fit: {'; '.join(parts)}")
    module.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=False)


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return ", ".join(keys[:SHOWN_KEYS]) + more


def hub_file(url: str, name: str, download: bool) -> str:
    """Where torch keeps the file of ``url``; fetched only with ``download=True``."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / os.path.basename(url)
    if path.exists():
        return str(path)
    if not download:
        raise ModelError(
            f"no pretrained weights for {name} on this machine: put {path.name} into {folder} on every node "
            f"(it comes from {url}), give weights=FILE, or allow the download with download=true"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=_hash_in(path.stem), progress=False)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"cannot download {url} to {path}: {error}; put the file there by hand") from error
    return str(path)


def _hash_in(stem: str) -> str | None:
    """The sha256 prefix torch writes at the end of a file name (``alexnet-owt-7be5be79``)."""
    tail = stem.rpartition("-")[2]
    return tail if len(tail) == 8 and all(c in "0123456789abcdef" for c in tail) else None
