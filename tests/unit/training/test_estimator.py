"""HashNet on arrays: learns, encodes, saves what Encoder opens; mistakes are told before work starts."""

from __future__ import annotations

import numpy as np
import pytest

import hashnet
from hashnet.errors import ConfigError, DataError, HashnetError, LineageMismatch

QUICK = {"stages": 2, "first_epochs": 3, "stage_epochs": 1, "lr": 0.02, "hidden": 0, "noise": 0}


@pytest.fixture(scope="module")
def clusters():
    rng = np.random.default_rng(0)
    y = np.arange(240) % 4
    return rng.normal(size=(4, 10))[y] * 3 + rng.normal(size=(240, 10)), y


@pytest.fixture(scope="module")
def fitted(clusters):
    return hashnet.HashNet(16, **QUICK).fit(*clusters)


def test_codes_are_the_signs_of_logits_and_tell_classes_apart(fitted, clusters):
    X, y = clusters
    codes = fitted.encode(X)
    assert codes.shape == (240, 2)
    assert (codes == np.packbits(fitted.logits(X) >= 0, axis=1)).all()
    assert hashnet.evaluate(codes[:40], y[:40], codes[40:], y[40:], k=50).map > 0.9  # chance is 0.25
    assert fitted.summary_.train_rows == 240


def test_results_repeat(clusters, fitted):
    again = hashnet.HashNet(16, **QUICK).fit(*clusters)
    assert (again.encode(clusters[0]) == fitted.encode(clusters[0])).all()


def test_a_saved_model_is_an_encoder(fitted, clusters, tmp_path):
    fitted.save(str(tmp_path / "model"))
    loaded = hashnet.Encoder.load(str(tmp_path / "model"))
    assert (loaded.encode(clusters[0]) == fitted.encode(clusters[0])).all()


def test_multi_hot_labels_and_lists(clusters):
    X, y = clusters
    one_hot = np.eye(4, dtype=bool)[y]
    assert hashnet.HashNet(8, **QUICK).fit(X.tolist(), one_hot).encode(X[:1].tolist()).shape == (1, 1)


def test_labels_by_name(clusters, fitted):
    X, y = clusters
    names = np.array(["ant", "bee", "cat", "dog"])[y]
    for labels in (names, names.tolist(), [[name] for name in names]):
        model = hashnet.HashNet(16, **QUICK).fit(X, labels)
        assert (model.encode(X) == fitted.encode(X)).all()
        assert model.encoder_.info.class_names == ["ant", "bee", "cat", "dog"]
    with pytest.raises(DataError, match="label 7 of row 1 is no name"):
        hashnet.HashNet(16).fit(X[:2], ["ant", 7])


def test_it_is_shown_with_its_settings(fitted):
    assert repr(hashnet.HashNet(48)) == "HashNet(n_bits=48, seed=0, variant='auto')"
    assert repr(fitted).endswith("lr=0.02, hidden=0, noise=0), fitted on 240 rows")


def test_a_run_folder_keeps_everything(clusters, tmp_path):
    run = str(tmp_path / "run")
    hashnet.HashNet(8, run=run, **QUICK).fit(*clusters)
    assert hashnet.Run(run).model.info().n_bits == 8
    assert len(hashnet.Run(run).manifest.open()) == 240
    with pytest.raises((HashnetError, LineageMismatch), match="use another"):
        hashnet.HashNet(8, run=run, **QUICK).fit(*clusters)


def test_pictures_by_path(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    paths, y = [], np.arange(12) % 2
    for place, label in enumerate(y):
        paths.append(tmp_path / f"{place}.png")
        pixels = rng.integers(0, 80, (20, 20, 3)) + 150 * label
        Image.fromarray(pixels.astype(np.uint8)).save(paths[-1])
    model = hashnet.HashNet(8, backbone="small_cnn", crop=16, resize=16, head_epochs=0, **QUICK)
    assert model.fit(paths, y).encode(paths).shape == (12, 1)


def test_mistakes_are_told_at_once(clusters):
    X, y = clusters
    with pytest.raises(ConfigError, match="stage_epochs"):
        hashnet.HashNet(16, stage_epoch=1)
    with pytest.raises(ConfigError, match="multiple of 8"):
        hashnet.HashNet(12)
    with pytest.raises(DataError, match="240 rows, but labels of 239"):
        hashnet.HashNet(16).fit(X, y[:-1])
    with pytest.raises(DataError, match="there is 1 row to learn from; give at least two"):
        hashnet.HashNet(16).fit(X[:1], y[:1])
    with pytest.raises(DataError, match=r"numbers \(n, d\)"):
        hashnet.HashNet(16).fit(X[0], y[:10])
    with pytest.raises(HashnetError, match="call fit"):
        hashnet.HashNet(16).encode(X)
    with pytest.raises(DataError, match="NaN"):
        hashnet.HashNet(16).fit(np.where(np.eye(240, 10), np.nan, X), y)


def test_a_row_out_of_all_proportion_leaves_the_others_apart(caplog):
    rng = np.random.default_rng(0)
    y = np.arange(240) % 4
    X = (3 * rng.normal(size=(4, 12))[y] + rng.normal(size=(240, 12))).astype(np.float32)
    others = np.delete(np.arange(240), 7)
    mean = X[others].mean(axis=0)
    X[7] *= 1e5
    settings = {"lr": 0.02, "noise": 0.4, "hidden": 0, "first_epochs": 40, "stages": 2}
    fitted = hashnet.HashNet(16, **settings).fit(X, y)
    model, _ = fitted._bundle
    assert model.feature_mean.numpy() == pytest.approx(mean, abs=1e-4)
    assert "1 of 240 training rows are over 100 times as large" in caplog.text
    assert "the first is row 7" in caplog.text
    bits = np.unpackbits(fitted.encode(X[others]), axis=1)
    away = (bits[:, None] != bits[None, :]).sum(axis=2)
    same = y[others][:, None] == y[others][None, :]
    assert away[~same].mean() > away[same].mean() + 4


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_constant_rows_are_refused(value):
    with pytest.raises(DataError, match="all 5 columns of the features are constant in 60 rows"):
        hashnet.HashNet(16).fit(np.full((60, 5), value), np.arange(60) % 3)


@pytest.mark.parametrize(("offset", "warned"), [(1e8, True), (1e3, False)])
def test_an_offset_that_float32_has_no_digits_for_is_told(caplog, offset, warned):
    """Near 1e8, float32 has steps of 8: a column of deviation 4 has two or three values."""
    rng = np.random.default_rng(0)
    X = offset + 4 * rng.normal(size=(60, 6))
    hashnet.HashNet(8, **QUICK).fit(X, np.arange(60) % 3)
    assert ("6 of 6 columns of the features vary by hardly more than" in caplog.text) == warned
