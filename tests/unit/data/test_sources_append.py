"""Appending: new rows go into the database, unless a wish of the protocol says else."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from hashnet.data.manifest import Manifest
from hashnet.data.sources import append_source, make_manifest


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
    longer = append_source(manifest, "imagenet100", path=path, n_classes=2, seed=5)
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
