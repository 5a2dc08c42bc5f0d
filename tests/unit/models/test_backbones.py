"""Backbones by name: all of torchvision on the meta device, weights that fit and that do not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models as torchvision_models

from hashnet.errors import ModelError
from hashnet.models.backbones import backbone_names, make_backbone, try_crop
from hashnet.models.backbones.torchvision_models import torchvision_names
from hashnet.models.hash_model import build_model

needs_lite = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite_pytorch") is None,
    reason="extra `pretrained` is not installed",
)
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have no memory behind their parameters (torch.device("meta") breaks regnets)."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param if param is None else nn.Parameter(param.to("meta")))

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


@pytest.mark.parametrize("name", torchvision_names())
def test_every_torchvision_model_loses_its_last_layer(name):
    with parameters_on_meta():
        module, spec = make_backbone(name)
        full = torchvision_models.get_model(name, weights=None, **_sizes(name, spec))
    side = spec.preprocess.crop
    picture = torch.zeros(2, 3, side, side, device="meta")
    features = module.to("meta").eval()(picture)
    assert features.shape == (2, spec.n_features)
    # exactly the last layer is gone: the full model's other parameters are all here, with their shapes
    mine = {k: v.shape for k, v in module.named_parameters()}
    theirs = {k: v.shape for k, v in full.named_parameters() if not k.startswith(("aux", "Aux"))}
    assert len(theirs) - len(mine) in (1, 2)  # weight, and mostly a bias
    assert all(theirs[k] == shape for k, shape in mine.items())


def _sizes(name, spec):
    if name.startswith("vit_"):
        return {"image_size": spec.preprocess.crop}
    return {"init_weights": False} if name in ("googlenet", "inception_v3") else {}


def test_alexnet_keeps_fc6_and_fc7():
    with parameters_on_meta():
        module, spec = make_backbone("alexnet")
    assert spec.n_features == 4096
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linear] == [(9216, 4096), (4096, 4096)]


@needs_lite
def test_lite_takes_its_own_normalisation():
    model = build_model("lite0", 16, weights="pretrained").eval()
    picture = torch.full((1, 3, 64, 64), 255, dtype=torch.uint8)
    expected = model.backbone((picture.float() - 127) / 128)
    torch.testing.assert_close(model.raw_features(picture), expected, rtol=1e-4, atol=1e-5)
    assert model.spec.n_features == 1280


@needs_timm
def test_timm_by_name():
    module, spec = make_backbone("timm:resnet18")
    assert spec.n_features == 512
    assert spec.preprocess.crop == 224
    assert module(torch.zeros(1, 3, 64, 64)).shape == (1, 512)
    with pytest.raises(ModelError, match=r"no model 'resnet_18x'"):
        make_backbone("timm:resnet_18x")


def test_unknown_name_is_answered_with_near_ones():
    with pytest.raises(ModelError, match=r"unknown backbone 'resnet5'; did you mean .*resnet50"):
        build_model("resnet5", 16)


def test_names_hold_all_kinds():
    assert {"features", "small_cnn", "lite0", "alexnet", "resnet50"} <= set(backbone_names())
    assert len(torchvision_names()) >= 80


@pytest.mark.parametrize("side", [8, 20, 32])
def test_small_cnn_takes_tiny_pictures_and_does_not_mix_rows(side):
    module, spec = make_backbone("small_cnn", crop=side)
    pictures = torch.randn(3, 3, side, side)
    together = module(pictures)
    assert together.shape == (3, spec.n_features)
    torch.testing.assert_close(module(pictures[1:2])[0], together[1])
    assert (spec.preprocess.crop, spec.preprocess.flip) == (side, False)


@pytest.mark.parametrize(("name", "crop"), [("small_cnn", 2), ("alexnet", 32), ("vit_b_32", 64)])
def test_a_crop_that_the_backbone_cannot_take_is_said_to_be_one(name, crop):
    with pytest.raises(ModelError, match=rf"{name} cannot take crop={crop} \(.*\); leave crop out"):
        try_crop(name, make_backbone(name, crop=crop)[0], crop)


def test_trying_a_crop_leaves_no_trace():
    torch.manual_seed(0)
    plain, _ = make_backbone("small_cnn")
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    tried, _ = make_backbone("small_cnn", crop=16)
    try_crop("small_cnn", tried, 16)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(m.training for m in tried.modules())
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in tried.state_dict().items())


def test_pretrained_weights_are_never_downloaded_unasked(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *a, **k: pytest.fail("downloads"))
    with pytest.raises(ModelError, match=r"squeezenet1_1-b8a52dc0.pth into .*checkpoints.*download=true"):
        make_backbone("squeezenet1_1", weights="pretrained")


def test_pretrained_weights_are_found_where_the_message_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.manual_seed(1)
    full = torchvision_models.squeezenet1_1(weights=None)
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save(full.state_dict(), tmp_path / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth")
    module, _ = make_backbone("squeezenet1_1", weights="pretrained")
    assert torch.equal(module.features[0].weight, full.features[0].weight)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_from_a_file(tmp_path, suffix):
    source, _ = make_backbone("small_cnn")
    state = {f"module.{k}": v for k, v in source.state_dict().items()}
    path = tmp_path / f"weights.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save({"state_dict": state}, path)
    module, _ = make_backbone("small_cnn", weights=str(path))
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in module.state_dict().items())


def test_weights_that_do_not_fit_name_the_keys(tmp_path):
    source, _ = make_backbone("small_cnn")
    state = source.state_dict()
    state["layers.0.weight"] = torch.zeros(1, 2)
    state["surplus"] = state.pop("layers.1.bias")
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ModelError) as caught:
        make_backbone("small_cnn", weights=str(tmp_path / "w.pth"))
    for part in (
        "missing layers.1.bias",
        "unexpected surplus",
        "layers.0.weight is (1, 2), the model has (32, 3, 3, 3)",
    ):
        assert part in str(caught.value)


def test_weights_that_could_run_code_are_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return (print, ("pickles run code",))

    torch.save({"w": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ModelError, match="does not hold plain tensors"):
        make_backbone("small_cnn", weights=str(tmp_path / "trap.pth"))
    with pytest.raises(ModelError, match=r"none.pth does not exist"):
        make_backbone("small_cnn", weights=str(tmp_path / "none.pth"))


def test_features_need_their_width():
    with pytest.raises(ModelError, match="needs n_features"):
        build_model("features", 16)
