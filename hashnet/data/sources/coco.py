"""``coco``: MS COCO from its instances JSON, images without a label pruned, 80 classes.

Split as in the paper's text: 5,000 queries, the rest as database, 10,000 of it to train on. The
paper's 122,218 images are train2014 and val2014 together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hashnet.data.columns import choose_classes, read_names, uris_below
from hashnet.data.writer import SourceRows, rows_of_uris
from hashnet.errors import DataError, FormatError, StorageError
from hashnet.io import REQUIRED, key, storage

DEFAULTS = {"n_query": 5_000, "n_train": 10_000}


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "folder with annotations/instances_*.json, or one such file")
    images: str | None = key(
        None, "folder of the pictures (default: the one named like the JSON, as train2017)"
    )
    classes: list[str] = key([], "take only these categories (names, or a text file with one per line)")


def load(options: Options) -> SourceRows:
    """Rows by file and image id; the classes are in the order of the category ids."""
    files = _instances(options.path)
    read = [_read(uri) for uri in files]
    names = {c["id"]: c["name"] for content in read for c in content["categories"]}
    known = [names[i] for i in sorted(names)]
    chosen = choose_classes(read_names(options.classes), known, files[0]) if options.classes else known
    number = {i: chosen.index(name) for i, name in names.items() if name in set(chosen)}
    uris, keys, lists, pruned = [], [], [], 0
    for uri, content in zip(files, read, strict=True):
        folder = storage.absolute(options.images or _pictures(uri, options.path))
        labels: dict[int, set[int]] = {image["id"]: set() for image in content["images"]}
        for annotation in content["annotations"]:
            if annotation["image_id"] not in labels:
                raise DataError(
                    f"{uri}: annotation {annotation.get('id')} names image {annotation['image_id']}, "
                    "which is not there"
                )
            if annotation["category_id"] in number:
                labels[annotation["image_id"]].add(number[annotation["category_id"]])
        if len(labels) != len(content["images"]):
            raise DataError(
                f"{uri} has {len(content['images']) - len(labels):,} duplicated image ids; keep one of each"
            )
        images = sorted((i for i in content["images"] if labels[i["id"]]), key=lambda image: image["id"])
        pruned += len(labels) - len(images)
        here = pa.array([image["file_name"] for image in images], pa.large_string())
        uris.append(uris_below(folder, here))
        keys.append(here)
        lists += [sorted(labels[image["id"]]) for image in images]
    return rows_of_uris(
        pa.concat_arrays(uris), labels=pa.array(lists, pa.list_(pa.int32())), n_classes=len(chosen),
        class_names=tuple(chosen), names=pa.concat_arrays(keys), notes={"pruned_unlabelled": pruned},
    )  # fmt: skip


def _instances(path: str) -> list[str]:
    if not storage.is_folder(path):
        return [path]
    for folder in (storage.join(path, "annotations"), path):
        found = [n for n in storage.list_names(folder) if n.startswith("instances_") and n.endswith(".json")]
        if found:
            return [storage.join(folder, name) for name in found]
    raise DataError(f"{path} has no annotations/instances_*.json; check the path")


def _read(uri: str) -> dict[str, Any]:
    try:
        content = storage.read_json(uri)
    except (StorageError, FormatError) as error:
        raise DataError(f"cannot read {uri}: {error}") from error
    missing = [
        k
        for k in ("images", "annotations", "categories")
        if not isinstance(content, dict) or k not in content
    ]
    if missing:
        raise DataError(f"{uri} is not an instances file of COCO: it has no {missing[0]!r}")
    return content


def _pictures(instances: str, path: str) -> str:
    """The folder of an instances file's pictures: ROOT/train2017, ROOT/images/train2017 or ROOT/images."""
    stem = storage.name_of(instances).removesuffix(".json").removeprefix("instances_")
    root = path
    if not storage.is_folder(path):
        root = storage.parent_folder(instances)
        root = storage.parent_folder(root) if storage.name_of(root) == "annotations" else root
    for names in ((stem,), ("images", stem), ("images",)):
        if storage.is_folder(storage.join(root, *names)):
            return storage.join(root, *names)
    raise DataError(f"found neither {stem}/ nor images/ in {root}; give the pictures' folder with images=")
