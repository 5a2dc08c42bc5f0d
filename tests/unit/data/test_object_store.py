"""Manifests and pictures on an S3-speaking server: the same calls, the same bytes."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hashnet.data.fetch import fetch_images
from hashnet.data.manifest import Manifest
from hashnet.data.sources import append_source, make_manifest
from hashnet.errors import BadImage, DataError
from hashnet.io import storage


def test_a_manifest_on_s3_is_the_manifest_on_disk(bucket, tmp_path):
    uri = storage.join(bucket, "demo", "manifest.parquet")
    remote = make_manifest("digits", uri)
    local = make_manifest("digits", str(tmp_path / "m"))
    assert remote.sha256 == local.sha256
    assert remote.read("query").equals(local.read("query"))
    assert Manifest.open(uri).copy_to(str(tmp_path / "copy")).sha256 == local.sha256
    assert local.copy_to(storage.join(bucket, "run", "manifest.parquet")).sha256 == local.sha256
    with pytest.raises(DataError, match="exists"):
        make_manifest("digits", uri)


@pytest.mark.parametrize("kind", ["tar", "parquet", "files"])
def test_pictures_on_s3_by_reference(bucket, tmp_path, kind):
    local = make_manifest("synthetic", str(tmp_path / "s"), n_images=30, side=8)
    pictures = fetch_images(local.read())
    out = storage.join(bucket, kind, "s.parquet")
    if kind == "tar":
        remote = make_manifest("synthetic", out, n_images=30, side=8, store="tar")
    elif kind == "parquet":
        path = storage.join(bucket, "pictures.parquet")
        with storage.open_output(path) as sink:
            pq.write_table(pa.table({"image": pictures}), sink)
        remote = make_manifest("parquet", out, path=path)
    else:
        for i, picture in enumerate(pictures):
            storage.write_bytes(storage.join(bucket, "pictures", f"{i:02d}.jpg"), picture)
        remote = make_manifest("imagefolder", out, path=storage.join(bucket, "pictures"))
    assert fetch_images(remote.read()) == pictures


def test_sources_read_from_s3(bucket, tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        storage.write_bytes(storage.join(bucket, "pets", name), file.getvalue())
    lines = "cat/1.jpg 1 0\ncat/2.jpg 1 0\ndog/none.jpg 0 1\n"
    storage.write_bytes(storage.join(bucket, "pets", "all.txt"), lines.encode())
    folder = make_manifest(
        "imagefolder", str(tmp_path / "f"), path=storage.join(bucket, "pets"), n_query=0, n_train=3
    )
    assert folder.class_names == ("cat", "dog")
    assert fetch_images(folder.read()) == [file.getvalue()] * 3
    path = storage.join(bucket, "pets", "all.txt")
    listed = make_manifest("listfile", str(tmp_path / "l"), path=path, n_query=0, n_train=3)
    pictures = fetch_images(listed.read())
    assert pictures[:2] == [file.getvalue()] * 2
    assert isinstance(pictures[2], BadImage)
    assert pictures[2].reason == "missing"
    elsewhere = storage.join(bucket, "others")
    assert append_source(listed, "listfile", path=path, root=elsewhere).count("database") == 6
    tar = storage.join(bucket, "tars")
    make_manifest("synthetic", str(tmp_path / "s.parquet"), n_images=20, side=8, store="tar", images=tar)
    read = make_manifest("webdataset", str(tmp_path / "w"), path=tar, n_classes=10)
    assert len(fetch_images(read.read())) == 20
    assert not any(isinstance(picture, BadImage) for picture in fetch_images(read.read()))


def test_overwriting_on_s3_leaves_no_part_of_the_old_manifest(bucket, monkeypatch):
    uri = storage.join(bucket, "again", "m.parquet")
    with monkeypatch.context() as patch:
        patch.setattr("hashnet.data.manifest.PART_ROWS", 40)
        patch.setattr("hashnet.data.manifest.GROUP_ROWS", 40)
        assert len(make_manifest("synthetic", uri, n_images=100, side=8).parts) == 3
    new = make_manifest("synthetic", uri, n_images=100, side=8, overwrite=True)
    assert storage.list_names(uri) == ["_manifest.json", *(part.name for part in new.parts)]
    assert len(new.parts) == 1


def test_overwriting_on_s3_keeps_the_old_manifest_until_the_new_one_is_whole(bucket, tmp_path):
    uri = storage.join(bucket, "kept", "m.parquet")
    old = make_manifest("synthetic", uri, n_images=20, side=8)
    names = storage.list_names(uri)
    np.save(tmp_path / "f.npy", np.array([[1.0], [np.nan]]))
    with pytest.raises(DataError, match="row 1 holds NaN"):
        make_manifest("npy", uri, path=str(tmp_path / "f.npy"), overwrite=True)
    assert storage.list_names(uri) == names
    assert Manifest.open(uri).read().equals(old.read())


def test_parquet_paths_keep_the_options_of_their_file(bucket, tmp_path):
    storage.write_bytes(storage.join(bucket, "table", "a.jpg"), b"picture")
    image = pa.StructArray.from_arrays([pa.nulls(1, pa.binary()), pa.array(["a.jpg"])], ["bytes", "path"])
    uri = storage.join(bucket, "table", "x.parquet")
    with storage.open_output(uri) as sink:
        pq.write_table(pa.table({"image": image}), sink)
    manifest = make_manifest("parquet", str(tmp_path / "m"), path=uri)
    assert fetch_images(manifest.read()) == [b"picture"]


def test_nothing_counts_when_writing_to_s3_fails(bucket):
    uri = storage.join(bucket, "failed", "m.parquet")
    with pytest.raises(DataError, match="900 query rows were requested"):
        make_manifest("synthetic", uri, n_images=20, side=8, store="tar", n_query=900)
    assert not storage.exists(uri)
