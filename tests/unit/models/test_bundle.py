"""The model bundle: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import save

from hashnet.errors import FormatError
from hashnet.io import fingerprint, storage
from hashnet.models.bundle import (
    IDENTITY,
    WEIGHTS,
    ModelArtefact,
    bundle_info,
    load_bundle,
    save_bundle,
)
from hashnet.models.hash_model import build_model


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(3)
    model = build_model("features", 24, n_features=7, hidden=5, dropout=0.4)
    model.set_scaling(torch.randn(7), torch.rand(7) + 0.5)
    uri = str(tmp_path / "model")
    sha256 = save_bundle(uri, model, class_names=["a", "b"], summary={"steps": 3}, config={"seed": 0})
    return uri, model, sha256


def test_round_trip(saved):
    uri, model, sha256 = saved
    state = torch.get_rng_state()
    loaded, info = load_bundle(uri)
    assert torch.equal(torch.get_rng_state(), state)  # nobody's random numbers are used up
    x = torch.randn(4, 7)
    assert torch.equal(loaded(x), model.eval()(x))
    assert not loaded.training
    assert (info.sha256, info.n_bits, info.modality, info.backbone) == (sha256, 24, "features", "features")
    assert (info.n_features, info.class_names, info.summary) == (7, ["a", "b"], {"steps": 3})
    assert bundle_info(uri) == info


def test_a_hidden_layer_that_was_the_backbone_of_vectors_still_loads(saved):
    uri, model, _ = saved
    older = {"head.hidden.": "backbone.layers.", "head.head.": "head."}
    state = {
        next((old + name.removeprefix(new) for new, old in older.items() if name.startswith(new)), name): v
        for name, v in model.state_dict().items()
    }
    assert {"backbone.layers.0.weight", "head.fch.weight", "feature_mean"} <= set(state)
    weights = save(state)
    artefact = ModelArtefact(uri)
    about = artefact.read()
    about["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    sha256 = fingerprint({name: about[name] for name in IDENTITY})
    storage.write_bytes(storage.join(uri, WEIGHTS), weights)
    artefact.write_header({**about, "sha256": sha256}, sha256=sha256, lineage={})
    x = torch.randn(4, 7)
    assert torch.equal(load_bundle(uri)[0](x), model.eval()(x))


def test_pictures_carry_their_preprocessing(tmp_path):
    model = build_model("small_cnn", 8, resize=20, crop=16, flip=True)
    save_bundle(str(tmp_path), model)
    loaded, info = load_bundle(str(tmp_path))
    assert info.preprocess == model.spec.preprocess == loaded.spec.preprocess
    assert (info.preprocess.resize, info.preprocess.crop, info.preprocess.flip) == (20, 16, True)


def test_sha256_is_of_what_decides_the_codes(saved, tmp_path):
    _, model, sha256 = saved
    assert save_bundle(str(tmp_path / "b"), model, summary={"other": 1}) == sha256
    with torch.no_grad():
        model.head.head.fch.bias[0] += 1
    assert save_bundle(str(tmp_path / "c"), model) != sha256


def test_damage_is_refused(saved, tmp_path):
    uri, _, _ = saved
    weights = tmp_path / "model" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"\x00")
    with pytest.raises(FormatError, match=r"model\.safetensors is damaged: its sha256"):
        load_bundle(uri)
    weights.write_bytes(good)
    about = tmp_path / "model" / "model.json"
    changed = json.loads(about.read_text())
    changed["arguments"]["n_bits"] = 16
    about.write_text(json.dumps(changed))
    with pytest.raises(FormatError, match="was changed or damaged after it was written"):
        load_bundle(uri)
    changed["format_version"] = 99
    about.write_text(json.dumps(changed))
    with pytest.raises(FormatError, match="upgrade hashnet"):
        bundle_info(uri)
    about.unlink()
    with pytest.raises(FormatError, match=r"holds no model .*train one"):
        load_bundle(uri)


def test_other_preprocessing_is_refused(tmp_path, monkeypatch):
    save_bundle(str(tmp_path), build_model("small_cnn", 8))
    monkeypatch.setattr("hashnet.models.bundle.PREPROCESS_VERSION", "another")
    with pytest.raises(FormatError, match="preprocessing version 1, this hashnet has another"):
        load_bundle(str(tmp_path))
