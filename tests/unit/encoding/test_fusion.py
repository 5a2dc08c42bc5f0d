"""A fused network computes what the network itself does, within rounding; the network stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hashnet.encoding.engines import FusedConvolution, fuse


def with_statistics(network: nn.Module) -> nn.Module:
    """The network in eval mode, its batch norms with means and variances that matter."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return network.eval()


class Branches(nn.Module):
    """A convolution whose output has two users, a functional activation, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8, affine=False)

    def forward(self, x):
        first = self.a(x)
        return functional.relu(self.norm(self.b(first))) + first


class OwnConvolution(nn.Conv2d):
    """A subclass that calls conv2d itself, as EfficientNet-Lite's does."""

    def forward(self, x):
        return functional.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class DependsOnData(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


CASES = {
    "norm and ReLU6": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6()), 1),
    "bias and ReLU": (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True)), 1),
    "SiLU": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.SiLU()), 1),
    "Hardswish": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.Hardswish()), 1),
    "depthwise": (nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)), 1),
    "zeros on both sides": (nn.Sequential(nn.ZeroPad2d((2, 2, 1, 1)), nn.Conv2d(3, 4, 3)), 1),
    "zeros on one side": (nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3)), 1),
    "its own convolution": (nn.Sequential(OwnConvolution(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6()), 1),
    "branches": (Branches(), 2),
    "padding by mirrors": (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")), 0),
    "an activation oneDNN lacks": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softsign()), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_outputs(name):
    network, n_fused = CASES[name]
    network = with_statistics(copy.deepcopy(network))
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        wanted = network(x)
        fused, n = fuse(network)
        found = fused(x)
        assert torch.equal(network(x), wanted)
    assert n == n_fused == sum(isinstance(module, FusedConvolution) for module in fused.modules())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_traced_is_returned_itself():
    network = DependsOnData()
    assert fuse(network) == (network, 0)
