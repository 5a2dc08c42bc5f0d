"""Names of files: neighbours, folders and names below them, with the options of a URI kept."""

from __future__ import annotations

import pyarrow as pa
import pytest

from hashnet.data.files import beside, complete, parent, split_options


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
