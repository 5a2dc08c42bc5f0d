"""A divided backbone: its parts together are the backbone, and blocks are what a reader would call so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models.blocks import divide
from hashnet.models.hash_model import build_model

# backbone, side of the pictures, number of blocks: three convolutions; a stem and 4 x 2 residual blocks;
# five convolutions and two matrices; a stem, 16 MBConvs and a last convolution
CASES = [("small_cnn", 16, 3), ("resnet18", 32, 9), ("alexnet", 64, 7), ("lite0", 32, 18)]


def _backbone(name: str) -> nn.Module:
    if name.startswith("lite"):
        pytest.importorskip("efficientnet_lite_pytorch")
    torch.manual_seed(0)
    return build_model(name, 8).backbone.eval()


@pytest.mark.parametrize(("name", "side", "n_blocks"), CASES)
def test_the_parts_are_the_backbone(name, side, n_blocks):
    backbone = _backbone(name)
    x = torch.randn(2, 3, side, side)
    wanted = backbone(x)
    for n_last in (1, 2, n_blocks - 1):
        parts = divide(backbone, n_last, side)
        between = parts.lower(x)
        assert between.shape[1:] == parts.shape
        torch.testing.assert_close(parts.upper(between), wanted, rtol=1e-5, atol=1e-6)
        below, above = (set(part.parameters()) for part in (parts.lower, parts.upper))
        assert below | above == set(backbone.parameters())
        assert not below & above
    with pytest.raises(ModelError, match=f"has {n_blocks} blocks; train_last must be at most {n_blocks - 1}"):
        divide(backbone, n_blocks, side)


def test_a_block_is_not_cut_through_its_shortcut():
    parts = divide(_backbone("resnet18"), 1, 32)
    names = {name.partition(".")[0] for name, _ in parts.upper.named_parameters()}
    assert names == {"layer4"}
    assert {name.split(".")[1] for name, _ in parts.upper.named_parameters()} == {"1"}


def test_training_one_part_trains_the_backbone():
    backbone = _backbone("small_cnn")
    parts = divide(backbone, 1, 16)
    before = {name: p.detach().clone() for name, p in backbone.named_parameters()}
    parts.upper(torch.ones(1, *parts.shape)).sum().backward()
    with torch.no_grad():
        for p in parts.upper.parameters():
            p += 1
    moved = {name for name, p in backbone.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, _ in parts.upper.named_parameters()}
    assert moved == {"layers.8.weight", "layers.9.weight", "layers.9.bias"}


class DependsOnData(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_network_that_cannot_be_traced_is_refused():
    with pytest.raises(ModelError, match=r"cannot be divided into blocks .*leave train_last out"):
        divide(DependsOnData(), 1, 8)
