import numpy as np
import pytest
import torch

from hashnet.baselines.base import Baseline, BaselineWarning
from hashnet.baselines.deep import CNNH, DHN, DNNH
from hashnet.errors import ConfigError, DataError
from hashnet.models.bundle import load_bundle


def pictures(n=48, seed=0):
    """Dark and bright noise, uint8 (n, 3, 16, 16), and class ids."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return (rng.integers(0, 100, size=(n, 3, 16, 16)) + 120 * y[:, None, None, None]).astype(np.uint8), y


@pytest.mark.parametrize("method", [CNNH, DNNH, DHN])
def test_pictures_are_taken_like_features(method, tmp_path):
    X, y = pictures()
    fitted = method(n_bits=8, epochs=4, batch_size=16, lr=0.02).fit(X, y)
    codes = fitted.encode(X)
    assert codes.shape == (48, 1)
    assert np.array_equal(fitted.encode(X[7])[0], codes[7])
    fitted.save(str(tmp_path / "fitted"))
    assert np.array_equal(Baseline.load(str(tmp_path / "fitted")).encode(X), codes)
    with pytest.raises(DataError, match=r"uint8 with shape \(n, 3, h, w\)"):
        fitted.encode(X.astype(np.float32))


def test_pictures_without_a_label_are_left_out_with_a_warning():
    X, y = pictures()
    multi_hot = np.eye(2, dtype=np.uint8)[y]
    multi_hot[:6] = 0
    settings = {"n_bits": 8, "epochs": 1, "batch_size": 16}
    with pytest.warns(BaselineWarning, match="6 of 48 rows have no label"):
        fitted = DHN(**settings).fit(X, multi_hot)
    assert np.array_equal(fitted.encode(X), DHN(**settings).fit(X[6:], y[6:]).encode(X))


@pytest.mark.parametrize(
    ("method", "head"), [(CNNH, "LinearHead"), (DNNH, "ReluSliceHead"), (DHN, "LinearHead")]
)
def test_only_loss_and_head_differ(method, head, tmp_path):
    rng = np.random.default_rng(1)
    fitted = method(n_bits=8, epochs=2, batch_size=16).fit(rng.normal(size=(40, 6)), np.arange(40) % 2)
    assert type(fitted.model_.head).__name__ == head
    fitted.save(str(tmp_path / "fitted"))
    model, info = load_bundle(str(tmp_path / "fitted" / "model"))  # the network is a bundle like any other
    assert info.n_bits == 8
    assert model.modality == "features"


def test_training_leaves_the_caller_s_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    rng = np.random.default_rng(2)
    DHN(n_bits=8, epochs=1).fit(rng.normal(size=(30, 4)), np.arange(30) % 3)
    assert torch.equal(torch.rand(3), expected)


def test_settings_of_the_shared_network_are_params_too():
    params = DHN(n_bits=16, lr=0.5, quantisation=0.2).params()
    assert params["lr"] == 0.5
    assert params["quantisation"] == 0.2
    assert DHN(**params).params() == params


def test_a_backbone_for_the_other_kind_of_input_is_refused():
    rows = np.random.default_rng(4).normal(size=(30, 4))
    with pytest.raises(ConfigError, match=r"small_cnn takes pictures \(n, 3, h, w\), got \(30, 4\)"):
        DHN(n_bits=8, backbone="small_cnn").fit(rows, np.arange(30) % 3)
    with pytest.raises(ConfigError, match=r"features takes rows \(n, d\), got \(48, 3, 16, 16\)"):
        DHN(n_bits=8, backbone="features").fit(*pictures())


@pytest.mark.parametrize("batch_size", [0, 1, 2.5])
def test_a_batch_has_at_least_two_rows(batch_size):
    with pytest.raises(ConfigError, match=f"batch_size must be a whole .* at least 2, got {batch_size}"):
        DHN(n_bits=8, batch_size=batch_size)


def test_cnnh_keeps_both_stages():
    rng = np.random.default_rng(3)
    y = np.arange(60) % 3
    fitted = CNNH(n_bits=8, epochs=5, batch_size=20).fit(
        rng.normal(size=(3, 5))[y] + rng.normal(size=(60, 5)), y
    )
    assert (np.diff(fitted.history_) <= 0).all()
    assert len(fitted.losses_) == 5
    assert fitted.losses_[-1] < fitted.losses_[0]
