"""The scale of features: one number that a rotation, and dropping weak components, hardly change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hashnet.models.hash_model import build_model
from hashnet.training.frozen_backbone import TYPICAL, standardise, typical_deviation


def _centred(n=400, d=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * np.linspace(5, 0.1, d)
    return x - x.mean(axis=0)


def test_typical_deviation_is_that_of_the_covariance():
    x = _centred()
    C = x.T @ x / len(x)
    variances = np.linalg.eigvalsh(C)
    expected = np.sqrt((variances**2).sum() / variances.sum())
    # the Gram matrix without its diagonal does without the bias of a sample
    assert typical_deviation(torch.from_numpy(x)) == pytest.approx(expected, rel=0.1)


def test_typical_deviation_does_not_depend_on_the_basis():
    x = _centred()
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(60, 60)))[0]
    whole = typical_deviation(torch.from_numpy(x))
    assert typical_deviation(torch.from_numpy(x @ rotation)) == pytest.approx(whole)
    assert typical_deviation(torch.from_numpy(x[:, :40])) == pytest.approx(whole, rel=0.05)


def test_a_rotation_of_the_features_rotates_what_the_head_sees():
    x = _centred().astype(np.float32)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(60, 60)))[0].astype(np.float32)
    seen = []
    for rows in (x, x @ rotation):
        model = build_model("features", 8, n_features=60).eval()
        standardise(model, rows)
        seen.append(model.features(torch.from_numpy(rows)))
    torch.testing.assert_close(seen[0] @ torch.from_numpy(rotation), seen[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_features_of_any_scale_become_alike(scale):
    x = (_centred() * scale + 7 * scale).astype(np.float32)
    model = build_model("features", 8, n_features=60).eval()
    standardise(model, x)
    scaled = model.features(torch.from_numpy(x))
    assert scaled.mean(dim=0).abs().max() < 1e-2
    assert typical_deviation(scaled.double()) == pytest.approx(TYPICAL, rel=1e-3)


def test_constant_features_keep_their_scale():
    model = build_model("features", 8, n_features=3)
    standardise(model, np.ones((5, 3), dtype=np.float32))
    assert model.feature_std.tolist() == pytest.approx([1 / TYPICAL] * 3)
