"""output=codes,features: both stores from one pass, resumed together, indexed together."""

import numpy as np
import pytest

from cluster.build_index import IndexConfig, build_index
from cluster.encode import EncodeConfig, encode_database
from hashnet import Encoder, Run
from hashnet.data import Manifest, feature_matrix
from hashnet.data.sources import make_manifest
from hashnet.errors import LineageMismatch
from hashnet.io import storage
from tests.support.small_run import make_model


@pytest.fixture
def run(tmp_path):
    manifest = make_manifest(
        "digits", f"{tmp_path}/manifest.parquet", modality="features", n_query=1397, n_train=100
    )
    make_model(f"{tmp_path}/model", manifest.n_features)
    return str(tmp_path)


def encode(run, **keys):
    return encode_database(
        EncodeConfig(run=run, output="codes,features", rows_per_shard=150, device="cpu", **keys)
    )


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_codes_and_features_of_the_same_rows(run, dtype):
    result = encode(run, features_dtype=dtype)
    codes, features = Run(run).codes.open(), Run(run).store("features", "database").open()
    assert (result["output"], result["features"]["output"]) == ("codes", "features")
    assert codes.ids().tolist() == features.ids().tolist()
    assert [s.rows for s in codes.shards] == [s.rows for s in features.shards]
    rows = Manifest.open(f"{run}/manifest.parquet").read("database")
    encoder = Encoder.load(f"{run}/model", engine=codes.lineage["engine"])
    assert np.array_equal(codes.codes(), encoder.encode(feature_matrix(rows)))
    exact = encoder.features(feature_matrix(rows))
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(features.features() - exact) <= largest * {"float16": 1e-3, "int8": 1 / 250}[dtype]).all()
    assert Run(run).store("features", "database").verify() == []
    encode(run, features_dtype=dtype)  # nothing is left to do
    with pytest.raises(LineageMismatch, match="was made with dtype"):
        encode(run, features_dtype="float32")


def test_what_one_of_the_stores_lacks_is_encoded_again(run):
    encode(run)
    store = Run(run).store("features", "database").open()
    before = store.sha256
    for name in (store.shards[1].file, "_records/" + store.shards[1].name + ".json", "_SUCCESS"):
        storage.delete(f"{store.uri}/{name}")
    assert encode(run)["rows_encoded_now"] == store.shards[1].rows
    assert Run(run).store("features", "database").open().sha256 == before


def test_the_index_of_both_rescores(run):
    encode(run)
    result = build_index(IndexConfig(run=run, recall=0.9))
    assert result["features"]["dtype"] == "float16"
    assert result["tuned"]["rescored_recall"] >= 0.9
    index, features = Run(run).index.open(), Run(run).store("features", "database").open()
    vectors, ids = features.features(), features.ids()
    hits = index.search(Run(run).codes.open().codes()[:3], k=1, rescore="features", features=vectors[:3])
    assert hits.ids[:, 0].tolist() == ids[:3].tolist()
    assert build_index(IndexConfig(run=run, recall=0.9))["reused"]
    assert build_index(IndexConfig(run=run, features=False))["features"] is None
