"""The hash layer, its activation, standardisation and dropout."""

from __future__ import annotations

import math

import pytest
import torch

from hashnet.errors import CodeError, ModelError
from hashnet.models.hash_model import build_model, relax, to_signs


def test_hash_layer_starts_small_and_unbiased():
    torch.manual_seed(0)
    fch = build_model("features", 64, n_features=2000).head.fch
    assert fch.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert fch.weight.mean().item() == pytest.approx(0, abs=1e-4)
    assert not fch.bias.any()


def test_sign_of_zero_is_plus_one():
    logits = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0]])
    assert to_signs(logits).tolist() == [[1, 1, 1, -1, 1, -1]]
    assert relax(logits, math.inf).tolist() == [[1, 1, 1, -1, 1, -1]]
    torch.testing.assert_close(relax(logits, 3.0), torch.tanh(3 * logits))


def test_features_are_scaled_inside_the_model():
    torch.manual_seed(0)
    x = torch.randn(50, 6) * torch.tensor([1.0, 10, 100, 1, 1, 0]) + 7
    model = build_model("features", 8, n_features=6).eval()
    plain = model.head((x - x.mean(0)) / 5)
    model.set_scaling(x.mean(0), 5.0)
    torch.testing.assert_close(model(x), plain)
    columns = torch.tensor([1.0, 2, 3, 4, 5, 6])  # models of older versions have one number per column
    plain = model.head((x - x.mean(0)) / columns)
    model.set_scaling(x.mean(0), columns)
    torch.testing.assert_close(model(x), plain)
    with pytest.raises(ModelError, match=r"\(3,\) values for features of \(6,\)"):
        model.set_scaling(torch.zeros(3), 1.0)


def test_pictures_are_normalised_on_the_device():
    model = build_model("small_cnn", 8).eval()
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    expected = model.backbone((pictures.float() / 255 - 0.5) / 0.5)
    torch.testing.assert_close(model.features(pictures), expected)


def test_dropout_of_a_slice_is_the_slice_of_the_dropout():
    model = build_model("features", 8, n_features=40, dropout=0.5)
    model.train()
    x = torch.randn(12, 40)
    model.dropout.begin(7, 0, 12)
    whole = model.dropout(x)
    parts = []
    for first in (0, 4, 8):
        model.dropout.begin(7, first, 12)
        parts.append(model.dropout(x[first : first + 4]))
    assert torch.equal(torch.cat(parts), whole)
    kept = whole != 0
    torch.testing.assert_close(whole[kept], 2 * x[kept])
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.equal(model.eval().dropout(x), x)


def test_noise_of_a_slice_is_the_slice_of_the_noise():
    model = build_model("features", 8, n_features=400, noise=0.5).train()
    x = torch.randn(12, 400)
    model.noise.begin(7, 0, 12)
    whole = model.noise(x)
    model.noise.begin(7, 4, 12)
    assert torch.equal(model.noise(x[4:8]), whole[4:8])
    assert 0.48 < (whole - x).std() < 0.52
    assert abs((whole - x).mean()) < 0.05
    assert torch.equal(model.eval().noise(x), x)


def test_dnnh_head_sees_one_slice_a_bit():
    model = build_model("features", 8, n_features=5, head="slices")
    x = torch.randn(3, 5)
    hidden = model.head.divide(x)  # (3, 8 * 50)
    width = model.head.width
    for bit in range(8):
        one = hidden[:, bit * width : (bit + 1) * width] @ model.head.weight[bit] + model.head.bias[bit]
        torch.testing.assert_close(model(x)[:, bit], one)
    with pytest.raises(ModelError, match="unknown head"):
        build_model("features", 8, n_features=5, head="round")


def test_code_length_is_checked_first():
    with pytest.raises(CodeError, match="multiple of 8, got 50"):
        build_model("resnet50", 50)


def test_dnnh_slices_follow_a_relu():
    model = build_model("features", 8, n_features=5, head="relu_slices")
    head, x = model.head, torch.randn(3, 5)
    hidden = head.divide(x).clamp(min=0)  # (3, 8 * width)
    for bit in range(8):
        mine = hidden[:, bit * head.width : (bit + 1) * head.width]
        expected = (mine * head.weight[bit]).sum(dim=1) + head.bias[bit]
        torch.testing.assert_close(model(x)[:, bit], expected)
