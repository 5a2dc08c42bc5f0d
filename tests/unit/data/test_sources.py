"""What all sources have in common: names, appending, pictures that decode."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet.data.columns import feature_matrix
from hashnet.data.fetch import fetch_images
from hashnet.data.images import decode
from hashnet.data.manifest import Manifest
from hashnet.data.sources import append_source, load_source, make_manifest
from hashnet.errors import DataError
from tests.support.source_files import folders, rows_of, tar_of


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("imagefolder", {"path": "pets"}),
        ("imagefolder", {"path": "pets", "layout": "flat"}),
        ("webdataset", {"path": "x.tar"}),
        ("parquet", {"path": "x.parquet", "id": "id"}),
        ("npy", {"path": "f.npy", "ids": "ids.npy"}),
        ("coco", {"path": "c.json", "images": "pets"}),
    ],
)
def test_names_and_uris_of_all_rows_may_be_more_than_2_gib(tmp_path, monkeypatch, name, options):
    monkeypatch.chdir(tmp_path)
    folders(tmp_path / "pets", "cat/1.jpg", "dog/2.jpg")
    tar_of(tmp_path / "x.tar", [("a.jpg", b"1")])
    pq.write_table(pa.table({"id": ["a"], "f": [[1.0]]}), "x.parquet")
    np.save("f.npy", np.zeros((2, 2)))
    np.save("ids.npy", np.arange(2))
    coco = {
        "images": [{"id": 1, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 1, "category_id": 1}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "c.json").write_text(json.dumps(coco))
    rows = load_source(name, defaults=False, **options).rows
    uris = rows.payload(0, rows.n)["uri"]
    assert rows.names.type == uris.type == pa.large_string()
    (tmp_path / "all.txt").write_text("\n".join(rows.names.to_pylist()))
    manifest = make_manifest(name, str(tmp_path / "m"), split_files=["database=all.txt"], **options)
    assert manifest.count("database") == rows.n
    assert manifest.read()["uri"].to_pylist() == uris.to_pylist()


def test_append_a_source(tmp_path):
    first = folders(tmp_path / "a", *(f"{c}/{i}.jpg" for c in ("cat", "dog", "eel") for i in range(4)))
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=first, n_query=2, n_train=9)
    more = folders(tmp_path / "b", "eel/9.jpg", "cat/9.jpg")  # its own numbering would be cat 0, eel 1
    longer = append_source(manifest, "imagefolder", path=more)
    assert rows_of(longer, "labels", "splits")[12:] == [([0], ["database"]), ([2], ["database"])]
    assert longer.source["appended"][0]["name"] == "imagefolder"
    more = folders(tmp_path / "q", "eel/9.jpg", "cat/9.jpg")
    queries = append_source(longer, "imagefolder", path=more, all_in=["query"])
    assert queries.splits["query"] == 4
    unknown = folders(tmp_path / "c", "fox/1.jpg")
    sentence = "not in the manifest, the first is 'fox'.*; the classes of a manifest are fixed .*: make a new"
    with pytest.raises(DataError, match=sentence):
        append_source(queries, "imagefolder", path=unknown)
    with pytest.raises(DataError, match="holds image, the new rows are features"):
        append_source(queries, "digits", modality="features")
    assert Manifest.open(manifest.uri).sha256 == queries.sha256


def test_pictures_of_a_manifest_decode(tmp_path):
    manifest = make_manifest("digits", str(tmp_path / "m"))
    assert manifest.splits == {"train": 1000, "query": 197, "database": 1600}
    pictures = fetch_images(manifest.read(stop=3))
    from sklearn.datasets import load_digits

    for picture, truth in zip(pictures, load_digits().images, strict=False):
        np.testing.assert_array_equal(decode(picture)[..., 0], np.round(truth * 255 / 16))
    features = make_manifest("digits", str(tmp_path / "f"), modality="features")
    np.testing.assert_array_equal(feature_matrix(features.read()), load_digits().data.astype(np.float32) / 16)
    np.testing.assert_array_equal(features.labels("query"), manifest.labels("query"))
