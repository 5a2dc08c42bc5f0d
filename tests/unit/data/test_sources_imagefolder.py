"""Folders of pictures, one a class."""

from __future__ import annotations

import pytest

from hashnet.data.fetch import fetch_images
from hashnet.data.sources import append_source, make_manifest
from hashnet.errors import BadImage, ConfigError, DataError
from tests.support.source_files import folders, rows_of


def test_imagefolder_classes(tmp_path):
    names = [
        f"{c}/{i}.{ending}" for c in ("dog", "cat") for i, ending in enumerate(("jpg", "PNG", "JPEG", "webp"))
    ]
    path = folders(tmp_path / "pets", *names, "cat/notes.txt", "cat/.hidden.jpg", "cat/deep/er.jpg")
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=path, n_query=2, n_train=6)
    assert manifest.class_names == ("cat", "dog")
    assert len(manifest) == 9
    assert [c for (c,) in rows_of(manifest, "labels")] == [[0]] * 5 + [[1]] * 4
    assert not any(isinstance(picture, BadImage) for picture in fetch_images(manifest.read()))
    only = make_manifest("imagefolder", str(tmp_path / "n"), path=path, classes=["dog"], n_query=1, n_train=3)
    assert only.class_names == ("dog",)
    with pytest.raises(
        DataError, match=r"1 of 2 classes are not in .*, the first is 'dgo'; did you mean 'dog'"
    ):
        make_manifest("imagefolder", str(tmp_path / "o"), path=path, classes=["cat", "dgo"])


def test_imagefolder_with_split_folders_and_flat(tmp_path):
    path = folders(tmp_path / "a", "train/cat/1.jpg", "train/cat/2.jpg", "train/dog/1.jpg", "val/dog/2.jpg")
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=path)
    assert rows_of(manifest, "labels", "splits") == [
        ([0], ["train", "database"]),
        ([0], ["train", "database"]),
        ([1], ["train", "database"]),
        ([1], ["query"]),
    ]
    flat = make_manifest("imagefolder", str(tmp_path / "n"), path=folders(tmp_path / "b", "2.jpg", "1.jpg"))
    assert flat.n_classes is None
    assert flat.splits == {"database": 2}
    folders(tmp_path / "b", "cat/1.jpg")
    with pytest.raises(DataError, match=r"1.jpg is in no class folder; move it, or set layout=flat"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "b"), layout="classes")
    with pytest.raises(DataError, match="is not a split folder"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "b"), layout="splits")
    with pytest.raises(DataError, match="is not a folder"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no picture below"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("names", "stray"),
    [
        (("cat/1.jpg", "dog/1.jpg", "preview.jpg"), "preview.jpg"),
        (("train/cat/1.jpg", "val/2.jpg"), "val/2.jpg"),
        (("train/cat/1.jpg", "val/dog/2.jpg", "preview.jpg"), "preview.jpg"),
    ],
)
def test_imagefolder_a_stray_picture_does_not_take_the_labels_of_all(tmp_path, names, stray):
    path = folders(tmp_path / "a", *names)
    with pytest.raises(DataError, match=f"/{stray} is in no class folder"):
        make_manifest("imagefolder", str(tmp_path / "m"), path=path)


def test_imagefolder_paths_as_keys(tmp_path):
    """Each key is the path below the folder, with the split's, whatever classes are left out."""
    names = ["train/cat/1.jpg", "train/cat/ä.jpg", "train/dog/1.jpg", "train/dog/2.jpg", "val/dog/1.jpg"]
    path, out = folders(tmp_path / "a", *names), str(tmp_path / "m")
    manifest = make_manifest("imagefolder", out, path=path, key="path")
    assert manifest.columns == {"key": "string"}
    assert rows_of(manifest, "key", "uri") == [(name, f"{path}/{name}") for name in names]
    only = make_manifest("imagefolder", out, path=path, key="path", classes=["dog"], overwrite=True)
    assert rows_of(only, "key") == [(name,) for name in names[2:]]
    flat = make_manifest("imagefolder", out, path=path, key="path", layout="flat", overwrite=True)
    assert rows_of(flat, "key") == [(name,) for name in names]
    assert make_manifest("imagefolder", out, path=path, overwrite=True).columns == {}
    with pytest.raises(ConfigError, match="key: must be one of path"):
        make_manifest("imagefolder", out, path=path, key="name", overwrite=True)


def test_keys_of_appended_pictures_must_differ_from_those_there(tmp_path):
    first, second = (folders(tmp_path / name, "cat/1.jpg") for name in ("a", "b"))
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=first, key="path", all_in=["database"])
    with pytest.raises(DataError, match=r"the key 'cat/1.jpg' is in the manifest already"):
        append_source(manifest, "imagefolder", path=second, key="path")
    with pytest.raises(DataError, match="the new ones have none; give them with key="):
        append_source(manifest, "imagefolder", path=second)
    folders(tmp_path / "b", "cat/2.jpg")
    (tmp_path / "b" / "cat" / "1.jpg").unlink()
    longer = append_source(manifest, "imagefolder", path=second, key="path")
    assert rows_of(longer, "key") == [("cat/1.jpg",), ("cat/2.jpg",)]
