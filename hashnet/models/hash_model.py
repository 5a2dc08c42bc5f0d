"""HashModel: backbone → scaled features → noise, dropout → head → logits → relaxed codes or signs.

The head is the hash layer, which may have a hidden layer before it.

>>> import torch
>>> model = build_model("features", n_bits=16, n_features=8)
>>> model(torch.zeros(2, 8)).shape
torch.Size([2, 16])
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hashnet.codes import check_n_bits
from hashnet.errors import ModelError
from hashnet.models.backbones import make_backbone
from hashnet.models.backbones.spec import BackboneSpec

FCH_STD = 0.01  # fch starts as N(0, 0.01): logits near 0, where tanh and sigmoid have their slope


class LinearHead(nn.Module):
    """The hash layer ``fch``: weights N(0, 0.01), bias 0."""

    def __init__(self, n_features: int, n_bits: int) -> None:
        super().__init__()
        self.fch = nn.Linear(n_features, n_bits)
        nn.init.normal_(self.fch.weight, std=FCH_STD)
        nn.init.zeros_(self.fch.bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (n, d) → (n, n_bits)
        return self.fch(features)


class SliceHead(nn.Module):
    """Divide and encode (DNNH) as older versions had it: a layer of ``width`` units per bit, slice → unit.

    There is nothing between the two layers, so they are multiplied first. Bundles with it still load.
    """

    def __init__(self, n_features: int, n_bits: int, width: int = 50) -> None:
        super().__init__()
        self.n_bits, self.width = n_bits, width
        self.divide = nn.Linear(n_features, n_bits * width)
        self.weight = nn.Parameter(torch.empty(n_bits, width))
        self.bias = nn.Parameter(torch.zeros(n_bits))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (n, d) → (n, n_bits)
        of_bit = self.weight[:, None]  # (n_bits, 1, width)
        weight = of_bit @ self.divide.weight.unflatten(0, (self.n_bits, self.width))  # (n_bits, 1, d)
        bias = (self.weight * self.divide.bias.unflatten(0, (self.n_bits, self.width))).sum(dim=1)
        return functional.linear(features, weight[:, 0], bias + self.bias)


class ReluSliceHead(SliceHead):
    """Divide and encode (DNNH): a layer of ``width`` units per bit, a ReLU, each slice → one unit.

    Its logits go through a sigmoid in DNNH's loss; a bit is 1 where the sigmoid is >= 0.5, which is
    where the logit is >= 0, as everywhere else.
    """

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (n, d) → (n, n_bits)
        slices = functional.relu(self.divide(features)).unflatten(1, (self.n_bits, self.width))
        return (slices * self.weight).sum(dim=2) + self.bias


HEADS = {"linear": LinearHead, "slices": SliceHead, "relu_slices": ReluSliceHead}


class HiddenHead(nn.Module):
    """A hidden layer of ``hidden`` units with a ReLU, and a head on it.

    ``norm`` gives every row of the hidden layer's output mean 0 and deviation 1, without which the rate that
    suits one set of rows makes another collapse (docs/defaults.md).
    """

    def __init__(self, name: str, n_features: int, n_bits: int, hidden: int, norm: bool) -> None:
        super().__init__()
        last = [nn.LayerNorm(hidden, elementwise_affine=False)] if norm else []
        self.hidden = nn.Sequential(nn.Linear(n_features, hidden), nn.ReLU(), *last)
        self.head = make_head(name, hidden, n_bits)

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (n, d) → (n, hidden) → (n, n_bits)
        return self.head(self.hidden(features))


def make_head(
    name: str, n_features: int, n_bits: int, hidden: int | None = None, norm: bool = False
) -> nn.Module:
    """The head called ``name``, a key of HEADS; with ``hidden`` behind a hidden layer."""
    if name not in HEADS:
        raise ModelError(f"unknown head {name!r}; there are {', '.join(HEADS)}")
    if hidden:
        return HiddenHead(name, n_features, n_bits, hidden, norm)
    return HEADS[name](n_features, n_bits)


def relax(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """Relaxed codes g = tanh(beta z) in (-1, 1); ``beta=inf`` gives the signs themselves."""
    return to_signs(logits) if beta == float("inf") else torch.tanh(beta * logits)


def to_signs(logits: torch.Tensor) -> torch.Tensor:
    """h = sgn(z) as ±1 in the same dtype, with sgn(0) = +1 (torch.sign would give 0)."""
    return (logits >= 0).to(logits.dtype) * 2 - 1


class RowRandomness(nn.Module):
    """What training draws at random for each row: a slice of what is drawn for the whole batch.

    Workers then draw what one worker with the whole batch would, and a resumed step draws what the
    interrupted one did.
    """

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level
        self._step: tuple[int, int, int] | None = None

    def begin(self, seed: int, first: int, total: int) -> None:
        """The next batch is rows ``first``… of ``total``, and what is drawn for it follows from ``seed``."""
        self._step = seed, first, total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.disturb(x) if self.training and self.level else x

    def disturb(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _draw(self, x: torch.Tensor, kind: type[np.generic]) -> torch.Tensor:
        """Random whole numbers over the full range of ``kind``, in the shape of x.

        Random bytes are many times as fast as one random float per value. Without ``begin`` they follow
        torch's seed.
        """
        seed, first, total = self._step or (int(torch.randint(2**62, ())), 0, len(x))
        row = x[0].numel() * np.dtype(kind).itemsize  # bytes
        drawn = bytearray(np.random.Generator(np.random.SFC64(seed)).bytes(total * row))
        mine = np.frombuffer(drawn, dtype=kind, count=x.numel(), offset=first * row)
        return torch.from_numpy(mine).view(x.shape).to(x.device)


class RowDropout(RowRandomness):
    """Dropout: ``level`` is the share of values that become 0."""

    def disturb(self, x: torch.Tensor) -> torch.Tensor:
        keep = self._draw(x, np.int16) >= round(self.level * 65_536) - 32_768
        return x * keep / (1 - self.level)


class RowNoise(RowRandomness):
    """Noise of deviation ``level`` added to every value.

    Its distribution hardly changes when the features are rotated, as it is equally strong in all directions:
    where dropout removes whole columns, the result depends on what the columns are.
    """

    def disturb(self, x: torch.Tensor) -> torch.Tensor:
        # uniform over 256 steps, whose deviation is 256 / sqrt(12)
        return x.add(self._draw(x, np.int8).to(x.dtype), alpha=self.level * 12**0.5 / 256)


class HashModel(nn.Module):
    """Logits (n, n_bits) of uint8 pictures (n, 3, h, w), of float rows (n, n_features), or of activations
    (n, …) below the last blocks of a backbone.

    The pixels' mean and standard deviation, and the training features' mean and scale (``feature_mean``,
    ``feature_std``: one number, or one per column in older models), are buffers: the weights file is
    complete. ``arguments`` are those of ``build_model``, without weights, from which an equal untrained
    model is built.
    """

    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor
    feature_mean: torch.Tensor
    feature_std: torch.Tensor

    def __init__(
        self,
        backbone: nn.Module,
        spec: BackboneSpec,
        n_bits: int,
        *,
        head: nn.Module | None = None,
        dropout: float = 0.0,
        noise: float = 0.0,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.n_bits, self.spec = check_n_bits(n_bits), spec
        self.arguments = arguments or {}
        self.backbone = backbone
        self.noise, self.dropout = RowNoise(noise), RowDropout(dropout)
        self.head = LinearHead(spec.n_features, n_bits) if head is None else head
        self.register_buffer("feature_mean", torch.zeros(spec.n_features))
        self.register_buffer("feature_std", torch.ones(spec.n_features))
        if spec.preprocess is not None:  # in units of 0..255, what uint8 pictures come in
            self.register_buffer("pixel_mean", torch.tensor(spec.preprocess.mean).view(1, 3, 1, 1) * 255)
            self.register_buffer("pixel_std", torch.tensor(spec.preprocess.std).view(1, 3, 1, 1) * 255)

    @property
    def modality(self) -> str:
        return self.spec.modality

    def raw_features(self, x: torch.Tensor) -> torch.Tensor:
        """The values that are scaled: the rows themselves, or the backbone's output."""
        if self.spec.modality == "features":
            return x.to(self.feature_mean.dtype)
        if self.spec.modality == "activations":
            return self.backbone(x.to(self.feature_mean.dtype))
        return self.backbone((x.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The head's input before dropout, float (n, spec.n_features)."""
        return self.noise((self.raw_features(x) - self.feature_mean) / self.feature_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.features(x)))

    def set_scaling(self, mean: torch.Tensor, scale: torch.Tensor | float) -> None:
        """Keeps the features' mean (d,) and what they are divided by: one number, or one per column."""
        if mean.shape != self.feature_mean.shape:
            raise ModelError(
                f"a mean of {tuple(mean.shape)} values for features of {tuple(self.feature_mean.shape)}"
            )
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(torch.as_tensor(scale).to(self.feature_std))


def build_model(
    backbone: str,
    n_bits: int,
    *,
    n_features: int | None = None,
    hidden: int | None = None,
    hidden_norm: bool = False,
    weights: str = "random",
    download: bool = False,
    dropout: float = 0.0,
    noise: float = 0.0,
    head: str = "linear",
    resize: int | None = None,
    crop: int | None = None,
    flip: bool | None = None,
    min_area: float | None = None,
    average_flip: bool | None = None,
) -> HashModel:
    """A HashModel with the backbone of that name (see ``hashnet.models.backbones``) in train mode.

    ``n_features`` is the width of the input rows of the backbone ``features`` and unused otherwise.
    ``hidden`` is the number of units of the head's hidden layer, ``hidden_norm`` whether its output is
    normalised. The random parts follow torch's global seed.
    """
    check_n_bits(n_bits)
    arguments = {
        "backbone": backbone, "n_bits": n_bits, "n_features": n_features, "hidden": hidden,
        "hidden_norm": hidden_norm, "dropout": dropout, "noise": noise, "head": head, "resize": resize,
        "crop": crop, "flip": flip, "min_area": min_area, "average_flip": average_flip,
    }  # fmt: skip
    module, spec = make_backbone(
        backbone,
        n_inputs=n_features,
        weights=weights,
        download=download,
        resize=resize,
        crop=crop,
        flip=flip,
        min_area=min_area,
        average_flip=average_flip,
    )
    layers = make_head(head, spec.n_features, n_bits, hidden, hidden_norm)
    return HashModel(module, spec, n_bits, head=layers, dropout=dropout, noise=noise, arguments=arguments)
