"""HashModel: backbone → standardised features → dropout → hash layer → logits → relaxed codes or signs.

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
    """Divide and encode (DNNH): a layer of ``width`` units per bit, each slice → one unit.

    Its logits go through a sigmoid in DNNH's loss; a bit is 1 where the sigmoid is >= 0.5, which is
    where the logit is >= 0, as everywhere else. There is nothing between the two layers, so they are
    multiplied first: a batch then passes ``width`` times fewer weights, with the same gradient.
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


HEADS = {"linear": LinearHead, "slices": SliceHead}


def make_head(name: str, n_features: int, n_bits: int) -> nn.Module:
    """The head called ``name``: ``linear`` or ``slices``."""
    if name not in HEADS:
        raise ModelError(f"unknown head {name!r}; there are {', '.join(HEADS)}")
    return HEADS[name](n_features, n_bits)


def relax(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """Relaxed codes g = tanh(beta z) in (-1, 1); ``beta=inf`` gives the signs themselves."""
    return to_signs(logits) if beta == float("inf") else torch.tanh(beta * logits)


def to_signs(logits: torch.Tensor) -> torch.Tensor:
    """h = sgn(z) as ±1 in the same dtype, with sgn(0) = +1 (torch.sign would give 0)."""
    return (logits >= 0).to(logits.dtype) * 2 - 1


ROUNDING = 1e-7  # of single precision, as a share of a value


class RowDropout(nn.Module):
    """Dropout whose mask is a slice of the whole batch's mask, after ``begin``.

    Workers then drop what one worker with the whole batch would, and a resumed step drops what the
    interrupted one did. Without ``begin`` it is ordinary dropout.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._step: tuple[int, int, int] | None = None

    def begin(self, seed: int, first: int, total: int) -> None:
        """The next batch is rows ``first``… of ``total``, and its mask follows from ``seed``."""
        self._step = seed, first, total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if self._step is None:
            return functional.dropout(x, self.p)
        seed, first, total = self._step
        width = x[0].numel()
        # Sixteen random bits per value: four times as fast as one float each
        drawn = np.frombuffer(np.random.default_rng(seed).bytes(2 * total * width), dtype=np.uint16)
        mine = drawn.reshape(total, width)[first : first + len(x)] >= round(self.p * 65_536)
        keep = torch.from_numpy(mine).to(x.device, x.dtype).view_as(x)
        return x * keep / (1 - self.p)


class HashModel(nn.Module):
    """Logits (n, n_bits) of uint8 pictures (n, 3, h, w) or of float rows (n, n_inputs).

    The pixels' mean and standard deviation and the training features' (``feature_mean``,
    ``feature_std``) are buffers: the weights file is complete. ``arguments`` are those of ``build_model``,
    without weights, from which an equal untrained model is built.
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
        head: str = "linear",
        dropout: float = 0.0,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.n_bits, self.spec = check_n_bits(n_bits), spec
        self.arguments = arguments or {}
        self.backbone = backbone
        self.dropout = RowDropout(dropout)
        self.head = make_head(head, spec.n_features, n_bits)
        # A row of the `features` backbone is standardised before the hidden layer, a picture's features
        # after the backbone: in both cases where values of unknown scale come in.
        width = spec.n_inputs if spec.modality == "features" else spec.n_features
        self.register_buffer("feature_mean", torch.zeros(width or 0))
        self.register_buffer("feature_std", torch.ones(width or 0))
        if spec.preprocess is not None:  # in units of 0..255, what uint8 pictures come in
            self.register_buffer("pixel_mean", torch.tensor(spec.preprocess.mean).view(1, 3, 1, 1) * 255)
            self.register_buffer("pixel_std", torch.tensor(spec.preprocess.std).view(1, 3, 1, 1) * 255)

    @property
    def modality(self) -> str:
        return self.spec.modality

    def raw_features(self, x: torch.Tensor) -> torch.Tensor:
        """The values that are standardised: the rows themselves, or the backbone's output for pictures."""
        if self.spec.modality == "features":
            return x.to(self.feature_mean.dtype)
        return self.backbone((x.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The hash layer's input before dropout, float (n, spec.n_features)."""
        features = (self.raw_features(x) - self.feature_mean) / self.feature_std
        return self.backbone(features) if self.spec.modality == "features" else features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.features(x)))

    def set_standardisation(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        """Keeps the training features' mean and standard deviation (a constant column keeps std 1)."""
        if mean.shape != self.feature_mean.shape or std.shape != self.feature_std.shape:
            raise ModelError(
                f"standardisation of {tuple(mean.shape)} values for features of "
                f"{tuple(self.feature_mean.shape)}"
            )
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(usable_std(mean, std))


def usable_std(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """``std``, except for columns that are nearly constant relative to their mean or to other columns.

    Such a column stays small: a unit that hardly ever fires would otherwise outweigh all others when it does.
    """
    moving = std[std > 0]
    typical = moving.median() if len(moving) else std.new_zeros(())
    beside = torch.maximum(mean.abs(), typical)
    return torch.where(std > ROUNDING * beside, std, beside.clamp(min=1))


def build_model(
    backbone: str,
    n_bits: int,
    *,
    n_features: int | None = None,
    hidden: int | None = None,
    weights: str = "random",
    download: bool = False,
    dropout: float = 0.0,
    head: str = "linear",
    resize: int | None = None,
    crop: int | None = None,
    flip: bool | None = None,
) -> HashModel:
    """A HashModel with the backbone of that name (see ``hashnet.models.backbones``) in train mode.

    ``n_features`` is the width of the input rows of the backbone ``features`` and unused otherwise.
    The random parts follow torch's global seed.
    """
    check_n_bits(n_bits)
    arguments = {
        "backbone": backbone, "n_bits": n_bits, "n_features": n_features, "hidden": hidden,
        "dropout": dropout, "head": head, "resize": resize, "crop": crop, "flip": flip,
    }  # fmt: skip
    module, spec = make_backbone(
        backbone,
        n_inputs=n_features,
        hidden=hidden,
        weights=weights,
        download=download,
        resize=resize,
        crop=crop,
        flip=flip,
    )
    return HashModel(module, spec, n_bits, head=head, dropout=dropout, arguments=arguments)
