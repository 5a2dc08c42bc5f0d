"""Lists of pictures with their labels: one list, or those of three splits."""

from __future__ import annotations

import pyarrow as pa
import pytest

from hashnet.data.sources import load_source, make_manifest
from hashnet.errors import ConfigError, DataError
from tests.support.source_files import rows_of


def test_listfile_one_list_is_split_by_the_protocol(tmp_path):
    lines = [f"images/{i}.jpg {' '.join('1' if i % 4 == c else '0' for c in range(4))}" for i in range(100)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    manifest = make_manifest(
        "listfile", str(tmp_path / "m"), path=str(tmp_path / "all.txt"), n_query=10, n_train=50
    )
    assert manifest.splits == {"train": 50, "query": 10, "database": 90}
    assert manifest.n_classes == 4
    assert rows_of(manifest, "uri", "labels")[6] == (f"{tmp_path}/images/6.jpg", [2])


def three_lists(
    folder, query=("q1.jpg 1 0",), train=("a.jpg 1 0", "b.jpg 1 1"), database=("a.jpg 1 0", "c.jpg 0 1")
):
    for name, lines in (("query", query), ("train", train), ("database", database)):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_listfile_three_lists_are_joined_by_path(tmp_path):
    path = three_lists(tmp_path)
    manifest = make_manifest(
        "listfile", str(tmp_path / "m"), path=path, root="/data", class_names=["cat", "dog"]
    )
    assert rows_of(manifest, "uri", "labels", "splits") == [
        ("/data/a.jpg", [0], ["train", "database"]),
        ("/data/c.jpg", [1], ["database"]),
        ("/data/b.jpg", [0, 1], ["train"]),
        ("/data/q1.jpg", [0], ["query"]),
    ]
    assert manifest.class_names == ("cat", "dog")
    given = {name: f"{path}/{name}.txt" for name in ("train", "query", "database")}
    again = make_manifest("listfile", str(tmp_path / "n"), root="/data", class_names=["cat", "dog"], **given)
    assert again.sha256 == manifest.sha256


def test_listfile_without_a_database_list_searches_the_training_images(tmp_path):
    three_lists(tmp_path)
    (tmp_path / "database.txt").unlink()
    (tmp_path / "query.txt").rename(tmp_path / "test.txt")
    manifest = make_manifest("listfile", str(tmp_path / "m"), path=str(tmp_path))
    assert manifest.splits == {"train": 2, "query": 1, "database": 2}


def test_listfile_absolute_paths_and_a_foreign_prefix(tmp_path):
    (tmp_path / "all.txt").write_text("/home/author/x/a.jpg 0\nb.jpg 0\ns3://bucket/c.jpg 0\n")
    path = str(tmp_path / "all.txt")
    uris = ["/home/author/x/a.jpg", "/data/b.jpg", "s3://bucket/c.jpg"]
    plain = make_manifest("listfile", str(tmp_path / "m"), path=path, root="/data", all_in=["database"])
    assert [uri for (uri,) in rows_of(plain, "uri")] == uris
    stripped = make_manifest(
        "listfile", str(tmp_path / "n"), path=path, root="/data/", strip="/home/author/", all_in=["database"]
    )
    assert rows_of(stripped, "uri")[0] == ("/data/x/a.jpg",)


def test_listfile_queries_in_the_database(tmp_path):
    path = three_lists(tmp_path, query=("q1.jpg 1 0", "c.jpg 0 1"))
    with pytest.raises(
        DataError, match=r"1 paths of .*query.txt are also in the database .* 'c.jpg'; a query in"
    ):
        make_manifest("listfile", str(tmp_path / "m"), path=path)
    manifest = make_manifest("listfile", str(tmp_path / "m"), path=path, overlap="drop")
    assert ("c.jpg", ["query"]) in [(uri[-5:], s) for uri, s in rows_of(manifest, "uri", "splits")]
    assert manifest.source["queries_dropped_from_database"] == 1


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"train": ("a.jpg 1 0", "b.jpg 1 1", "a.jpg 1 0")},
            r"train.txt line 3 repeats 'a.jpg' of line 1 \(1 dupl",
        ),
        (
            {"train": ("a.jpg 1 1", "b.jpg 1 1")},
            r"train.txt line 1: 'a.jpg' has other labels here than in another",
        ),
        ({"train": ("b.jpg 1 1", "a.jpg 0 1")}, r"train.txt line 2: 'a.jpg' has other labels"),
        ({"query": ("q.jpg 1 0 0",)}, "label columns, .* has 3; they must be equal"),
        ({"query": ("q.jpg 1",)}, "label columns, .* has 1; they must be equal"),
        ({"query": ("q.jpg",)}, "label columns, .* has 0; they must be equal"),
    ],
)
def test_listfile_lists_that_do_not_fit(tmp_path, lists, message):
    with pytest.raises(DataError, match=message):
        make_manifest("listfile", str(tmp_path / "m"), path=three_lists(tmp_path, **lists))
    assert not (tmp_path / "m").exists()


def test_listfile_other_mistakes(tmp_path):
    path = three_lists(tmp_path)
    with pytest.raises(DataError, match="class_names has 3 names, the lists have 2 classes"):
        make_manifest("listfile", str(tmp_path / "m"), path=path, class_names=["a", "b", "c"])
    with pytest.raises(DataError, match="not both"):
        make_manifest("listfile", str(tmp_path / "m"), path=path, train=f"{path}/train.txt")
    with pytest.raises(DataError, match="no list was given"):
        make_manifest("listfile", str(tmp_path / "m"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"must hold query.txt \(or test.txt\) and train.txt or database.txt"):
        make_manifest("listfile", str(tmp_path / "m"), path=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="listfile has no option 'rooot'; did you mean 'root'"):
        make_manifest("listfile", str(tmp_path / "m"), path=path, rooot="x")
    with pytest.raises(DataError, match="there is no data source 'listfil'; did you mean 'listfile'"):
        make_manifest("listfil", str(tmp_path / "m"), path=path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"all": "/theirs/a.jpg 0\na.jpg 0\n"}, "line 2 repeats 'a.jpg' of line 1"),
        (
            {"query": "/theirs/a.jpg 0\n", "database": "a.jpg 0\nb.jpg 0\n"},
            "1 paths of .*query.txt are also in the database or training list, the first is 'a.jpg'",
        ),
        (
            {"query": "q.jpg 0\n", "train": "/theirs/a.jpg 0\n", "database": "a.jpg 1\n"},
            "train.txt line 1: 'a.jpg' has other labels here",
        ),
    ],
)
def test_a_path_with_and_without_the_beginning_is_one_picture(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)
    given = {"path" if name == "all" else name: str(tmp_path / f"{name}.txt") for name in files}
    with pytest.raises(DataError, match=message):
        make_manifest("listfile", str(tmp_path / "m"), strip="/theirs/", **given)


@pytest.mark.parametrize("strip", ["", "theirs/"])
def test_names_are_large_strings_and_blocks_fit_a_manifest(tmp_path, strip):
    (tmp_path / "all.txt").write_text("theirs/a.jpg\nb.jpg\n")
    rows = load_source("listfile", path=str(tmp_path / "all.txt"), root="/data", strip=strip).rows
    assert rows.names.type == pa.large_string()
    block = rows.payload(0, 2)["uri"]
    assert block.type == pa.string()
    assert block.to_pylist() == ["/data/a.jpg" if strip else "/data/theirs/a.jpg", "/data/b.jpg"]
