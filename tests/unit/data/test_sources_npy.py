"""Arrays of features: one .npy, or an .npz with splits."""

from __future__ import annotations

import numpy as np
import pytest

from hashnet.data.columns import feature_matrix
from hashnet.data.sources import make_manifest
from hashnet.errors import DataError
from tests.support.source_files import rows_of


def test_npy_features_with_labels(tmp_path):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(200, 5))
    np.save(tmp_path / "f.npy", matrix)
    np.save(tmp_path / "l.npy", np.arange(200) % 7)
    path, labels = str(tmp_path / "f.npy"), str(tmp_path / "l.npy")
    manifest = make_manifest("npy", str(tmp_path / "m"), path=path, labels=labels, n_query=10, n_train=50)
    assert (manifest.modality, manifest.n_features, manifest.n_classes) == ("features", 5, 7)
    np.testing.assert_array_equal(feature_matrix(manifest.read()), matrix.astype(np.float32))
    np.testing.assert_array_equal(manifest.labels().argmax(1), np.arange(200) % 7)
    plain = make_manifest("npy", str(tmp_path / "n"), path=path, scale=0.5)
    assert plain.splits == {"database": 200}
    np.testing.assert_array_equal(feature_matrix(plain.read()), matrix.astype(np.float32) * np.float32(0.5))


def test_npz_with_splits_joined_by_id(tmp_path):
    rng = np.random.default_rng(0)
    everything = rng.integers(0, 256, (30, 4), dtype=np.uint8)
    labels = rng.integers(0, 2, (30, 3), dtype=np.uint8)
    parts = {"query": [0, 1], "database": list(range(5, 20)), "train": [5, 6, 20, 21]}
    arrays = {"scale": np.float32(0.25)}
    for name, rows in parts.items():
        arrays |= {
            f"{name}_features": everything[rows],
            f"{name}_labels": labels[rows],
            f"{name}_ids": np.array(rows) + 100,
        }
    np.savez(tmp_path / "f.npz", **arrays)
    manifest = make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npz"))
    assert manifest.splits == {"train": 4, "query": 2, "database": 15}
    by_id = dict(zip((u for (u,) in rows_of(manifest, "uri")), feature_matrix(manifest.read()), strict=True))
    assert set(by_id) == {str(i + 100) for rows in parts.values() for i in rows}
    for uri, vector in by_id.items():
        np.testing.assert_array_equal(vector, everything[int(uri) - 100] * np.float32(0.25))
    splits = dict(rows_of(manifest, "uri", "splits"))
    assert splits["105"] == ["train", "database"]
    assert splits["120"] == ["train"]
    np.testing.assert_array_equal(manifest.labels("query"), labels[[0, 1]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"features": np.zeros((3, 2)), "labels": np.zeros(2, int)},
            "has 3 rows, its labels have 2; they must be",
        ),
        ({"features": np.zeros((3, 2)), "ids": np.array([1, 2, 1])}, "rows 0 and 2 both have id '1'"),
        ({"features": np.zeros(3)}, r"must be numbers of shape \(n, d\), got float64 \(3,\)"),
        ({"x": np.zeros((3, 2))}, "has neither 'features' nor 'train_features'.*; it has x"),
        ({"features": np.array([[1.0], [np.nan]])}, "row 1 holds NaN"),
        ({"features": np.zeros((3, 2)), "labels": 1}, r"must be an array \(n,\) or \(n, n_classes\)"),
        ({"features": np.zeros((3, 2)), "labels": [0, 1, 10**6]}, "class 1000000; number classes from 0"),
        (
            {"features": np.zeros((3, 2)), "scale": [1.0, 2.0, 3.0]},
            "scale of .* has 3 numbers; give 1 or 2",
        ),
        (
            {
                "train_features": np.zeros((2, 2)),
                "train_labels": [0, 0],
                "query_features": np.zeros((1, 2)),
            },
            "has labels, but no query_labels; give those of every split, or none",
        ),
        (
            {"features": np.zeros((2, 2)), "labels": np.array([[0, 1], [0, 3]])},
            "must hold only 0 and 1; row 1",
        ),
        (
            {"features": np.zeros((2, 2)), "labels": np.array([0.5, 1.0])},
            "must be whole numbers, got float64",
        ),
        (
            {"train_features": np.zeros((2, 2)), "query_features": np.zeros((2, 3))},
            "has 3 features, another array has 2",
        ),
        (
            {
                "database_features": np.zeros((2, 2)),
                "database_ids": [1, 2],
                "query_features": np.zeros((1, 2)),
                "query_ids": [2],
            },
            "1 ids are query and database",
        ),
    ],
)
def test_npy_mistakes(tmp_path, arrays, message):
    np.savez(tmp_path / "f.npz", **arrays)
    with pytest.raises(DataError, match=message):
        make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npz"), all_in=["database"])
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("option", ["labels", "ids"])
def test_npz_refuses_arrays_beside_it(tmp_path, option):
    np.savez(tmp_path / "f.npz", features=np.zeros((2, 2)))
    np.save(tmp_path / "x.npy", np.arange(2))
    with pytest.raises(DataError, match=f"--{option} goes with an .npy; put them into .* as '{option}'"):
        make_manifest(
            "npy", str(tmp_path / "m"), path=f"{tmp_path}/f.npz", **{option: str(tmp_path / "x.npy")}
        )


def test_npz_in_capitals(tmp_path):
    np.savez(tmp_path / "f.npz", features=np.zeros((2, 2)), scale=np.ones(2))
    (tmp_path / "f.npz").rename(tmp_path / "F.NPZ")
    assert len(make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "F.NPZ"))) == 2


def test_npy_never_unpickles(tmp_path):
    np.save(tmp_path / "f.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="without pickle"):
        make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npy"))
    with pytest.raises(DataError, match="does not exist"):
        make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "g.npy"))
