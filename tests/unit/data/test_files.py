"""Names of files: neighbours, folders and names below them, with the options of a URI kept."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from hashnet.data.files import beside, complete, find_below, parent, split_options
from hashnet.errors import DataError


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("a/b.txt", "a"),
        ("b.txt", "."),
        ("/b.txt", "/"),
        ("/a/what?.txt", "/a"),  # a plain path has no options
        ("s3://bucket/a/b.txt", "s3://bucket/a"),
        (
            "s3://bucket/a/b.txt?scheme=http&endpoint_override=h:1/x",
            "s3://bucket/a?scheme=http&endpoint_override=h:1/x",
        ),
    ],
)
def test_parent(uri, folder):
    assert parent(uri) == folder


def test_options_are_a_uris():
    assert split_options("s3://b/x?y=1") == ("s3://b/x", "?y=1")
    assert split_options("/b/x?y=1") == ("/b/x?y=1", "")


def test_names_below_a_folder():
    names = pa.array(["a.jpg", "/abs/b.jpg", "s3://other/c.jpg", None])
    whole = ["/abs/b.jpg", "s3://other/c.jpg", None]
    assert complete("/data/", names).to_pylist() == ["/data/a.jpg", *whole]
    assert complete("/", names).to_pylist() == ["/a.jpg", *whole]
    assert complete("s3://b/data?x=1", names).to_pylist() == ["s3://b/data/a.jpg?x=1", *whole]


def test_neighbours():
    assert beside("out/m.parquet", "-images") == "out/m-images"
    assert beside("s3://b/m.parquet?x=1", "-images") == "s3://b/m-images?x=1"


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for folder in ("a", "elsewhere"):
        (tmp_path / folder / "x.jpg").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "b").symlink_to(tmp_path / "elsewhere")
    assert find_below(str(tmp_path / "a"), [".jpg"]) == ["b/x.jpg", "x.jpg"]


def test_a_name_that_is_no_utf8_is_said(tmp_path):
    open(os.fsencode(tmp_path) + b"/caf\xe9.jpg", "w").close()
    with pytest.raises(DataError, match="is no UTF-8; rename the file"):
        find_below(str(tmp_path), [".jpg"])
