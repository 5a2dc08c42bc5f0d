"""The source ``listfile``: lists are joined by path, and parsed as a slow loop reads them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashnet.data.sources import listfile, load_source, make_manifest
from hashnet.data.sources.listfile import read_list
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


def written(folder, text: str | bytes, name: str = "list.txt") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def slow(text: str) -> list[tuple[str, list[int]]]:
    """One line at a time."""
    rows = []
    for line in text.splitlines():
        if line.strip():
            path, *words = line.split()
            rows.append((path, [i for i, word in enumerate(words) if word == "1"]))
    return rows


@given(
    rows=st.lists(
        st.tuples(
            st.text("abcé/_0 1", min_size=1, max_size=12),
            st.lists(st.sampled_from("01"), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=30,
    ),
    chunk=st.integers(1, 200),
    newline=st.sampled_from(["\n", "\r\n"]),
    gap=st.sampled_from([" ", "  ", "\t"]),
    end=st.sampled_from(["", " ", "\n", "\n\n"]),
)
def test_multi_hot_lists_are_what_a_loop_reads(tmp_path_factory, rows, chunk, newline, gap, end):
    rows = [("x" + "".join(path.split()) + ".jpg", labels) for path, labels in rows]
    text = newline.join(path + gap + gap.join(labels) for path, labels in rows) + end
    folder = tmp_path_factory.mktemp("lists")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listfile, "CHUNK", chunk)
        found = read_list(written(folder, text))
    assert list(zip(found.paths.to_pylist(), found.labels.to_pylist(), strict=True)) == slow(text)
    assert found.n_classes == 3
    assert found.multi_hot


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_class_ids_and_paths_with_spaces(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(listfile, "CHUNK", chunk)
    found = read_list(written(tmp_path, "a cat.jpg 3\n\nb.jpg 0\n  dir/c.JPEG   12  \n"))
    assert found.paths.to_pylist() == ["a cat.jpg", "b.jpg", "dir/c.JPEG"]
    assert found.labels.to_pylist() == [[3], [0], [12]]
    assert found.n_classes == 13
    assert not found.multi_hot
    assert found.lines.tolist() == [1, 3, 4]
    spaced = read_list(written(tmp_path, "my pictures/a 1.jpg 0 1\nb.jpg 1 1\n"))
    assert spaced.paths.to_pylist() == ["my pictures/a 1.jpg", "b.jpg"]
    assert spaced.labels.to_pylist() == [[1], [0, 1]]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("my  cat.jpg 1\nb.jpg  0\n", ["my  cat.jpg", "b.jpg"]),
        ("  my  cat.jpg   1 0 \nb.jpg 0  1\n", ["my  cat.jpg", "b.jpg"]),
        (" my  cat.jpg 1 0\n b.jpg 0 1\n", ["my  cat.jpg", "b.jpg"]),
        ("my  cat.jpg  \n  b.jpg\n", ["my  cat.jpg", "b.jpg"]),
        ("\ufeffa.jpg 1\nb.jpg 0\n", ["a.jpg", "b.jpg"]),
        ("\ufeffa.jpg\n", ["a.jpg"]),
        ("cat, dog/a.jpg 1\n", ["cat, dog/a.jpg"]),
        ("a.jpg 1.jpg\nb.jpg,2.jpg\n", ["a.jpg 1.jpg", "b.jpg,2.jpg"]),
    ],
)
@pytest.mark.parametrize("chunk", [2, 1 << 20])
def test_a_path_keeps_what_is_its_own(tmp_path, monkeypatch, text, paths, chunk):
    monkeypatch.setattr(listfile, "CHUNK", chunk)
    assert read_list(written(tmp_path, text)).paths.to_pylist() == paths


def test_paths_may_be_more_than_two_gigabytes_together(tmp_path):
    assert read_list(written(tmp_path, "a.jpg 0\n")).paths.type == pa.large_string()


def test_no_labels_at_all(tmp_path):
    found = read_list(written(tmp_path, "a.jpg\nb c.jpg\n"))
    assert found.paths.to_pylist() == ["a.jpg", "b c.jpg"]
    assert found.labels is None
    assert found.n_classes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg 0 1 0\nb.jpg 0 1\n", "line 2 has 2 label columns, its first line has 3; every line needs"),
        ("a.jpg 0 1 0\nb.jpg 0 1 0 1\n", "line 2 has 4 label columns, its first line has 3"),
        ("a.jpg 0 1 0\n\nb.jpg 0 2 0\n", "line 3: label column 2 is '2'; labels must be 0 or 1"),
        ("a.jpg 0 1 0\nb.jpg 0 1 x\n", "line 2: label column 3 is 'x'; labels must be 0 or 1"),
        ("a.jpg 0 1 0\nb.jpg 0 10 0\n", "line 2: label column 2 is '10'"),
        ("a.jpg 0 1 0\nb.jpg 0  1\t-1 \n", "line 2: label column 3 is '-1'"),
        ("a.jpg 2 1 0\n", "line 1: label column 1 is '2'"),
        ("a.jpg 0 1 0\nb.jpg\n", "line 2 has 0 label columns, its first line has 3"),
        ("a.jpg 3\nb.jpg x\n", "line 2: the label is 'x'; it must be a class id"),
        ("a.jpg 3\nb.jpg -1\n", "line 2: the label is '-1'"),
        ("a.jpg 3\nb.jpg\n", "line 2 has 0 label columns, its first line has 1"),
        ("a.jpg 3\nb.jpg 1 2\n", "line 2 has 2 label columns, its first line has 1"),
        ("a.jpg 0\nb.jpg 900000000\n", "line 2: the label is '900000000'; it must be a class id such as"),
        ("a.jpg 0\nb.jpg 1000000\n", "below 1,000,000: map other ids to 0..n-1"),
        ("a.jpg\nb.jpg 0\n", "line 2: the path 'b.jpg 0' continues after the picture's name; a line"),
        ("a.jpg\nb.jpg\t0\n", "line 2: the path 'b.jpg 0' continues after"),
        ("a.jpg,0\nb.jpg,1\n", "line 1: the path 'a.jpg,0' continues after"),
        ("a.jpg, 0\n", "line 1: the path 'a.jpg,' continues after"),
        ("", "is empty; a line of it looks like"),
        ("\ufeff", "is empty; a line of it looks like"),
        ("\n \n", "is empty"),
        (b"a.jpg 0 1\n\xff\xfe.jpg 0 1\n", "line 2: the path is not UTF-8"),
    ],
)
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_mistakes_name_file_line_and_fix(tmp_path, monkeypatch, text, message, chunk):
    monkeypatch.setattr(listfile, "CHUNK", chunk)
    path = written(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_list(path)
    assert message in str(caught.value)
    assert path in str(caught.value)


def test_a_mistake_far_down_has_the_right_line(tmp_path, monkeypatch):
    monkeypatch.setattr(listfile, "CHUNK", 1000)
    lines = [f"{i}.jpg 0 1 0" for i in range(5000)]
    lines[4321] = "4321.jpg 0 7 0"
    with pytest.raises(DataError, match="line 4322: label column 2 is '7'"):
        read_list(written(tmp_path, "\n".join(lines)))


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"cannot read the list .*nowhere.txt: .* does not exist; check the path"
    ):
        read_list(str(tmp_path / "nowhere.txt"))


def test_many_rows_come_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(listfile, "CHUNK", 50_000)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (20_000, 20))
    text = "".join(f"d/{i}.jpg {' '.join(map(str, row))}\n" for i, row in enumerate(labels))
    found = read_list(written(tmp_path, text))
    assert len(found) == 20_000
    assert found.lines.tolist() == list(range(1, 20_001))
    expected = [np.flatnonzero(row).tolist() for row in labels]
    assert found.labels.to_pylist() == expected


def test_paths_of_lists_as_keys(tmp_path):
    """One key per path, whichever lists name it; without the prefix that `strip` removes."""
    (tmp_path / "train.txt").write_text("old/b.jpg 1\nold/d/a 1.jpg 1\n")
    (tmp_path / "database.txt").write_text("old/c.jpg 0\nold/b.jpg 1\n")
    (tmp_path / "query.txt").write_text("old/q.jpg 1\n")
    options = {"path": str(tmp_path), "root": "/data", "strip": "old/", "key": "path"}
    manifest = make_manifest("listfile", str(tmp_path / "m"), **options)
    keys = manifest.read(columns=["key", "uri"]).to_pydict()
    assert sorted(keys["key"]) == ["b.jpg", "c.jpg", "d/a 1.jpg", "q.jpg"]
    assert keys["uri"] == [f"/data/{key}" for key in keys["key"]]
