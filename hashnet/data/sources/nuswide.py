"""``nuswide``: NUS-WIDE as published: a list of images, and one file of 0 and 1 per concept.

81 concepts, or the 21 most frequent; images with no label at all are pruned, unless ``keep_unlabelled`` puts
them into the database, where they are relevant to no query, as in some public lists. Split as in the paper:
5,000 queries, the rest as database, 10,000 of it to train on. With 21 concepts it
is, as is usual, 100 queries and 500 training images per concept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet import labels as label_sets
from hashnet.data.columns import first_existing, uris_below
from hashnet.data.writer import SourceRows, rows_of_uris
from hashnet.errors import DataError, StorageError
from hashnet.io import REQUIRED, key, storage

CONCEPTS = ("Concepts81.txt", "ConceptsList/Concepts81.txt")
IMAGES = ("Imagelist.txt", "ImageList/Imagelist.txt")
LABELS = ("AllLabels", "Groundtruth/AllLabels", "GroundTruth/AllLabels")
PICTURES = ("Flickr", "images", "")


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "folder with ConceptsList/, ImageList/ and Groundtruth/AllLabels/")
    images: str | None = key(None, "folder of the pictures (default: PATH/Flickr, PATH/images or PATH)")
    n_concepts: int | None = key(
        None, "take only this many of the most frequent concepts, such as 21 (default: all 81)", low=1
    )
    keep_unlabelled: bool = key(False, "keep images without any label, in the database only")


def DEFAULTS(options: Options) -> dict[str, Any]:  # noqa: N802 - a constant of the module that depends on an option
    if options.n_concepts == 21:
        return {"query_per_class": 100, "train_per_class": 500}
    return {"n_query": 5_000, "n_train": 10_000}


def load(options: Options) -> SourceRows:
    """Rows in the order of the image list, the unlabelled left out or last, after all others."""
    concepts = _lines(options.path, CONCEPTS)
    paths = pc.replace_substring(pa.array(_lines(options.path, IMAGES), pa.string()), "\\", "/")
    columns = [_column(options.path, concept, len(paths)) for concept in concepts]
    counts = np.array([int(column.sum()) for column in columns])
    n_concepts = options.n_concepts or len(concepts)
    if n_concepts > len(concepts):
        raise DataError(f"n_concepts is {n_concepts}, but {options.path} has {len(concepts)} concepts")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:n_concepts])  # in the order of the list
    labels = np.stack([columns[i] for i in chosen], axis=1)  # (n, n_concepts) of 0 and 1
    labelled = labels.any(axis=1)
    rows = np.flatnonzero(labelled)
    if options.keep_unlabelled:
        rows = np.concatenate([rows, np.flatnonzero(~labelled)])
    kept = paths.take(pa.array(rows))
    pictures = storage.absolute(options.images or first_existing(options.path, PICTURES))
    return rows_of_uris(
        uris_below(pictures, kept), labels=label_sets.to_lists(labels[rows]), n_classes=len(chosen),
        class_names=tuple(concepts[i] for i in chosen), names=kept,
        notes={"kept_unlabelled" if options.keep_unlabelled else "pruned_unlabelled": int((~labelled).sum())},
    )  # fmt: skip


def _column(path: str, concept: str, n: int) -> np.ndarray:
    """uint8 (n,) of one concept's file: a 0 or a 1 on each line."""
    uri = storage.join(first_existing(path, LABELS), f"Labels_{concept}.txt")
    try:
        data = np.frombuffer(storage.read_bytes(uri), dtype=np.uint8)
    except StorageError as error:
        raise DataError(f"cannot read the labels of {concept!r}: {error}") from error
    digits = data[(data != 10) & (data != 13) & (data != 32)]
    wrong = np.flatnonzero((digits | 1) != 49)
    if len(wrong):
        raise DataError(f"{uri} line {wrong[0] + 1}: a label must be 0 or 1, got {chr(digits[wrong[0]])!r}")
    if len(digits) != n:
        raise DataError(
            f"{uri} has {len(digits):,} labels, the image list has {n:,} images; they must be equal"
        )
    return digits & 1


def _lines(path: str, names: tuple[str, ...]) -> list[str]:
    lines = storage.read_bytes(first_existing(path, names)).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
