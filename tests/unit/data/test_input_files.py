"""Names of files: neighbours, folders and names below them, with the options of a URI kept."""

from __future__ import annotations

import os
import re

import pyarrow as pa
import pytest

from hashnet.data.columns import (
    expand_pattern,
    find_below,
    uris_below,
    with_suffix,
)
from hashnet.data.sources import make_manifest
from hashnet.errors import DataError
from hashnet.io import storage


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
    assert storage.parent_folder(uri) == folder


def test_options_are_a_uris():
    assert storage.split_options("s3://b/x?y=1") == ("s3://b/x", "?y=1")
    assert storage.split_options("/b/x?y=1") == ("/b/x?y=1", "")


def test_names_below_a_folder():
    names = pa.array(["a.jpg", "/abs/b.jpg", "s3://other/c.jpg", None])
    whole = ["/abs/b.jpg", "s3://other/c.jpg", None]
    assert uris_below("/data/", names).to_pylist() == ["/data/a.jpg", *whole]
    assert uris_below("/", names).to_pylist() == ["/a.jpg", *whole]
    assert uris_below("s3://b/data?x=1", names).to_pylist() == ["s3://b/data/a.jpg?x=1", *whole]
    large = uris_below("/data", names.cast(pa.large_string()))
    assert (large.type, large.to_pylist()) == (pa.large_string(), ["/data/a.jpg", *whole])


def test_names_below_a_file_uri_mean_what_they_mean_below_its_path(tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    names = ["100%25.tar", "a%20b.tar", "what?.tar"]
    for name in names:
        (folder / name).touch()
    uri = f"file://{tmp_path}/my%20data"
    assert uris_below(uri, pa.array(names)).to_pylist() == [f"{folder}/{name}" for name in names]
    assert (
        expand_pattern(uri, ".tar")
        == expand_pattern(f"{uri}/*.tar", ".tar")
        == [f"{folder}/{name}" for name in names]
    )


def test_a_range_that_runs_backwards_names_no_file(tmp_path):
    (tmp_path / "s-0.tar").touch()
    assert expand_pattern(f"{tmp_path}/s-{{0..0}}.tar", ".tar") == [f"{tmp_path}/s-0.tar"]
    with pytest.raises(DataError, match=re.escape("there is no .tar file at") + ".*2..0.*check the path"):
        expand_pattern(f"{tmp_path}/s-{{2..0}}.tar", ".tar")


def test_neighbours():
    assert with_suffix("out/m.parquet", "-images") == "out/m-images"
    assert with_suffix("s3://b/m.parquet?x=1", "-images") == "s3://b/m-images?x=1"


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for folder in ("a", "elsewhere"):
        (tmp_path / folder / "x.jpg").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "b").symlink_to(tmp_path / "elsewhere")
    found = find_below(str(tmp_path / "a"), [".jpg"])
    assert (found.names, found.skipped) == (["b/x.jpg", "x.jpg"], {"link_circle": 1})


def test_what_is_skipped_is_counted_and_refuses_no_folder(tmp_path):
    for name in ("x.jpg", "notes.txt", "b.md", ".DS_Store", "_thumbs.jpg"):
        (tmp_path / name).touch()
    open(os.fsencode(tmp_path) + b"/caf\xe9.jpg", "w").close()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jpg")
    found = find_below(str(tmp_path), [".jpg"])
    assert found.names == ["gone.jpg", "x.jpg"]  # a broken link is a picture that is missing
    assert found.skipped == {
        "other_suffix": 2, "hidden": 2, "not_utf8": 1, "link_circle": 1, "not_a_file": 1,
    }  # fmt: skip
    made = make_manifest("imagefolder", str(tmp_path / "m"), path=str(tmp_path))
    assert made.source["skipped_other_suffix"] == 2
    text = made.summary().text(made)
    assert "skipped link circle: 1" in text
    assert "skipped not a file: 1" in text


def test_an_unreadable_folder_is_said_unless_it_is_hidden(tmp_path, monkeypatch):
    for name in ("locked", ".trash"):
        (tmp_path / name).mkdir()
    scandir = os.scandir

    def refusing(folder):
        if os.path.basename(folder) in ("locked", ".trash"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"cannot list .*Permission denied: .*locked.*; repair or remove it"):
        find_below(str(tmp_path), [".jpg"])
    (tmp_path / "locked").rmdir()
    assert find_below(str(tmp_path), [".jpg"]).names == []
