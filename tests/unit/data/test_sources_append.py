"""Appending: new rows go into the database, unless a wish of the protocol says else."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from hashnet.data.manifest import Manifest
from hashnet.data.sources import append_source, make_manifest
from hashnet.errors import DataError


@pytest.fixture
def manifest(tmp_path) -> Manifest:
    """Ten drawn pictures, all in the database."""
    return make_manifest("synthetic", str(tmp_path / "m"), n_images=10, n_classes=2, all_in=["database"])


def listed(folder) -> str:
    (folder / "more.txt").write_text("".join(f"{i}.jpg {i % 2}\n" for i in range(40)))
    return str(folder / "more.txt")


@pytest.mark.parametrize("wishes", [{}, {"seed": 3}, {"seed": 0}, {"n_query": None, "all_in": []}])
def test_new_rows_are_database_whatever_the_seed(tmp_path, manifest, wishes):
    longer = append_source(manifest, "listfile", path=listed(tmp_path), **wishes)
    assert longer.splits == {"database": 50}


def test_a_seed_that_draws_the_pictures_draws_no_queries(manifest):
    longer = append_source(manifest, "synthetic", n_images=40, n_classes=2, seed=3)
    assert longer.splits == {"database": 50}
    assert longer.source["appended"][0]["options"]["seed"] == 3


def test_a_seed_that_draws_the_classes_draws_no_queries(tmp_path):
    for name in ("n01440764", "n01443537"):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / split / name / f"{split}.JPEG")
    path = str(tmp_path)
    options = {"path": path, "n_classes": 2, "all_in": ["database"]}
    manifest = make_manifest("imagenet100", str(tmp_path / "m"), **options)
    again = shutil.copytree(tmp_path / "train", tmp_path / "again" / "train")
    shutil.copytree(tmp_path / "val", again.parent / "val")
    longer = append_source(manifest, "imagenet100", path=str(again.parent), n_classes=2, seed=5)
    assert longer.splits == {"database": 8}


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({"n_query": 0}, {"train": 40, "database": 50}),
        ({"n_query": 0, "n_train": 0}, {"database": 50}),
        ({"n_query": 5, "n_train": 0}, {"query": 5, "database": 45}),
    ],
)
def test_a_wish_of_none_is_a_wish(tmp_path, manifest, wishes, expected):
    assert append_source(manifest, "listfile", path=listed(tmp_path), **wishes).splits == expected


def test_rows_that_are_there_already_are_refused_or_skipped(tmp_path, manifest):
    longer = append_source(manifest, "listfile", path=listed(tmp_path))
    with pytest.raises(
        DataError, match=r"40 of 40 rows are in .* already, the first is '.*0\.jpg'; skip them"
    ):
        append_source(longer, "listfile", path=listed(tmp_path))
    assert Manifest.open(manifest.uri).sha256 == longer.sha256
    assert append_source(longer, "listfile", path=listed(tmp_path), existing="skip").sha256 == longer.sha256
    path = tmp_path / "more.txt"
    path.write_text(path.read_text() + "new.jpg 1\nnewer.jpg 0\n")
    last = append_source(longer, "listfile", path=str(path), existing="skip")
    assert last.splits == {"database": 52}
    assert last.read(start=50)["labels"].to_pylist() == [[1], [0]]
    assert last.source["appended"][-1]["skipped_existing"] == 40
    with pytest.raises(DataError, match="existing must be one of refuse, skip, got 'keep'"):
        append_source(longer, "listfile", path=str(path), existing="keep")


def test_a_split_without_database_rows_is_an_error(tmp_path):
    path = listed(tmp_path)
    for options in ({"n_query": 40}, {"all_in": ["query"]}):
        with pytest.raises(DataError, match="leaves no database rows of 40, so there is nothing to search"):
            make_manifest("listfile", str(tmp_path / "m2"), path=path, **options)
    assert not (tmp_path / "m2").exists()
