"""``features``: no backbone, as rows are vectors; an optional hidden layer."""

from __future__ import annotations

import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models.backbones.spec import BackboneFamily, BackboneRequest, BackboneSpec


class Identity(nn.Module):
    """The ``features`` backbone: rows come as vectors, with an optional hidden layer.

    ``norm`` gives every row of the hidden layer's output mean 0 and deviation 1, without which the rate that
    suits one set of rows makes another collapse (docs/reproduce.md).
    """

    def __init__(self, n_inputs: int, hidden: int | None = None, norm: bool = False) -> None:
        super().__init__()
        self.layers: nn.Module = nn.Identity()
        if hidden:
            last = [nn.LayerNorm(hidden, elementwise_affine=False)] if norm else []
            self.layers = nn.Sequential(nn.Linear(n_inputs, hidden), nn.ReLU(), *last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, n_inputs) → (n, n_features)
        return self.layers(x)


def make_features(request: BackboneRequest) -> tuple[nn.Module, BackboneSpec]:
    """No backbone, or one hidden layer, and its spec."""
    if not request.n_inputs:
        raise ModelError("the backbone 'features' needs n_features, the width of a row")
    if request.weights != "random":
        raise ModelError(f"the backbone 'features' has no weights to load, got weights={request.weights}")
    n_inputs, hidden = request.n_inputs, request.hidden
    module = Identity(n_inputs, hidden, request.hidden_norm)
    return module, BackboneSpec("features", hidden or n_inputs, n_inputs=n_inputs)


FEATURES = BackboneFamily(lambda: ["features"], make_features)
