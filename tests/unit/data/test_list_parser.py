"""List files, against a parser of three lines; and each mistake a list can have."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashnet.data.sources import list_parser
from hashnet.data.sources.list_parser import read_list
from hashnet.errors import DataError


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
        patch.setattr(list_parser, "CHUNK", chunk)
        found = read_list(written(folder, text))
    assert list(zip(found.paths.to_pylist(), found.labels.to_pylist(), strict=True)) == slow(text)
    assert found.n_classes == 3
    assert found.multi_hot


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_class_ids_and_paths_with_spaces(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(list_parser, "CHUNK", chunk)
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
    monkeypatch.setattr(list_parser, "CHUNK", chunk)
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
    monkeypatch.setattr(list_parser, "CHUNK", chunk)
    path = written(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_list(path)
    assert message in str(caught.value)
    assert path in str(caught.value)


def test_a_mistake_far_down_has_the_right_line(tmp_path, monkeypatch):
    monkeypatch.setattr(list_parser, "CHUNK", 1000)
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
    monkeypatch.setattr(list_parser, "CHUNK", 50_000)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (20_000, 20))
    text = "".join(f"d/{i}.jpg {' '.join(map(str, row))}\n" for i, row in enumerate(labels))
    found = read_list(written(tmp_path, text))
    assert len(found) == 20_000
    assert found.lines.tolist() == list(range(1, 20_001))
    expected = [np.flatnonzero(row).tolist() for row in labels]
    assert found.labels.to_pylist() == expected
