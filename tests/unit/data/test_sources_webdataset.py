"""Tars of pictures with their labels beside them."""

from __future__ import annotations

import json
import tarfile

import pytest

from hashnet.data.fetch import fetch_images
from hashnet.data.sources import make_manifest
from hashnet.errors import DataError
from tests.support.source_files import jpeg, rows_of, tar_of


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_webdataset_cls_and_json(tmp_path, kind):
    for shard in range(3):
        members = []
        for i in range(10):
            key = (
                f"dir/{shard}-{i:03d}" if kind == tarfile.USTAR_FORMAT else f"{'long' * 40}/{shard}-{i:03d}-é"
            )
            about = json.dumps({"labels": [i % 3, 3]}).encode() if shard else b"1"
            members += [(f"{key}.jpg", jpeg(10 * shard + i)), (f"{key}.{'json' if shard else 'cls'}", about)]
        tar_of(tmp_path / f"shard-{shard:04d}.tar", members, kind=kind)
    path = f"{tmp_path}/shard-{{0000..0002}}.tar"
    manifest = make_manifest("webdataset", str(tmp_path / "m"), path=path, n_query=3, n_train=20)
    assert fetch_images(manifest.read()) == [jpeg(i) for i in range(30)]
    labels = [c for (c,) in rows_of(manifest, "labels")]
    assert labels[:2] == [[1], [1]]
    assert labels[10:12] == [[0, 3], [1, 3]]
    assert manifest.n_classes == 4
    folder = make_manifest("webdataset", str(tmp_path / "n"), path=str(tmp_path), n_query=3, n_train=20)
    assert folder.sha256 == manifest.sha256


def test_webdataset_names_and_samples_without_a_picture(tmp_path):
    members = [
        ("a.cls", b"dog"),
        ("a.jpg", jpeg(1)),
        ("b.txt", b"no picture"),
        ("c.seg.png", b"png"),
        ("c.cls", b"cat\n"),
    ]
    tar_of(tmp_path / "x.tar", members)
    manifest = make_manifest(
        "webdataset", str(tmp_path / "m"), path=str(tmp_path / "x.tar"), all_in=["database"]
    )
    assert manifest.class_names == ("cat", "dog")
    assert [c for (c,) in rows_of(manifest, "labels")] == [[1], [0]]


def test_webdataset_names_of_several_words_and_what_macos_adds(tmp_path):
    members = [
        ("d/a.jpg", jpeg(1)),
        ("d/._a.jpg", b"no picture"),
        ("d/a.cls", b"golden retriever\ntabby cat\n"),
        ("d/b.jpg", jpeg(2)),
        ("d/b.cls", "²".encode()),  # a digit to str.isdigit, no number to int
    ]
    tar_of(tmp_path / "x.tar", members)
    path = str(tmp_path / "x.tar")
    manifest = make_manifest("webdataset", str(tmp_path / "m"), path=path, all_in=["database"])
    assert manifest.class_names == ("golden retriever", "tabby cat", "²")
    assert [c for (c,) in rows_of(manifest, "labels")] == [[0, 1], [2]]
    assert fetch_images(manifest.read()) == [jpeg(1), jpeg(2)]


def test_webdataset_several_class_ids_a_line(tmp_path):
    tar_of(
        tmp_path / "x.tar", [("a.jpg", jpeg(1)), ("a.cls", b"3 1\n0\n"), ("b.jpg", jpeg(2)), ("b.cls", b"-1")]
    )
    path = str(tmp_path / "x.tar")
    manifest = make_manifest("webdataset", str(tmp_path / "m"), path=path, all_in=["database"])
    assert [c for (c,) in rows_of(manifest, "labels")] == [[0, 1, 3], []]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("caf\udce9.jpg", b"1")], "the name of .* in .*x.tar is not UTF-8; rename the file"),
        ([("a.jpg", b"1"), ("a.cls", b"9999999999")], "x.tar: a.cls holds class 9999999999; number classes"),
        ([("a.jpg", b"1"), ("a.json", b"[1000000]")], "x.tar: a.json holds class 1000000; number classes"),
    ],
)
def test_webdataset_names_and_classes_that_cannot_be(tmp_path, members, message):
    tar_of(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=message):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "x.tar"), all_in=["database"])


def test_webdataset_mistakes(tmp_path):
    tar_of(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")])
    with pytest.raises(DataError, match="rows 0 and 2 both have id 'a'"):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "x.tar"))
    tar_of(tmp_path / "y.tar.gz", [("a.jpg", b"1")], mode="w:gz")
    with pytest.raises(DataError, match=r"is not a plain tar .* unpack .gz first"):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "y.tar.gz"))
    tar_of(tmp_path / "z.tar", [("a.jpg", b"1"), ("a.json", b"{")])
    with pytest.raises(DataError, match=r"z.tar: a.json is not JSON"):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "z.tar"))


def test_webdataset_reads_what_synthetic_writes(tmp_path):
    drawn = make_manifest(
        "synthetic", str(tmp_path / "s.parquet"), n_images=50, store="tar", labels_per_image=3, side=16
    )
    read = make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "s-images"), n_classes=10)
    assert rows_of(read, "uri", "labels") == rows_of(drawn, "uri", "labels")


def test_webdataset_keys(tmp_path):
    """`__key__` as WebDataset has it: the member's name up to the first dot of its file name."""
    tar_of(tmp_path / "0.tar", [("d.1/a.jpg", jpeg(0)), ("d.1/a.cls", b"1"), ("b.txt", b"no picture")])
    tar_of(tmp_path / "1.tar", [("a.small.jpg", jpeg(1)), ("a.cls", b"0")])
    options = {"path": str(tmp_path), "all_in": ["database"], "key": "__key__"}
    manifest = make_manifest("webdataset", str(tmp_path / "m"), **options)
    assert rows_of(manifest, "key", "labels") == [("d.1/a", [1]), ("a", [0])]
    tar_of(tmp_path / "2.tar", [("a.jpg", jpeg(2))])
    with pytest.raises(DataError, match="rows 1 and 2 both have id 'a'"):
        make_manifest("webdataset", str(tmp_path / "n"), **options)
