"""Lists whose paths begin with a folder of their authors, which is taken off before anything is compared."""

from __future__ import annotations

import pyarrow as pa
import pytest

from hashnet.data.sources import load_rows, make_manifest
from hashnet.errors import DataError


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
    rows, _, _ = load_rows("listfile", path=str(tmp_path / "all.txt"), root="/data", strip=strip)
    assert rows.names.type == pa.large_string()
    block = rows.payload(0, 2)["uri"]
    assert block.type == pa.string()
    assert block.to_pylist() == ["/data/a.jpg" if strip else "/data/theirs/a.jpg", "/data/b.jpg"]
