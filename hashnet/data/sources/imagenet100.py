"""``imagenet100``: the paper's ImageNet protocol on the folder layout of ILSVRC.

100 classes; all their training images are the database, 100 per class are trained on, their
validation images are the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hashnet.data.columns import PICTURES, choose_classes, find_below, lists_of_names, read_names, uris_below
from hashnet.data.splits import DATABASE, QUERY
from hashnet.data.writer import SourceRows, rows_of_uris
from hashnet.errors import DataError, StorageError
from hashnet.io import REQUIRED, key, storage

DEFAULTS = {"train_per_class": 100}
LAYOUTS = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "folder with train/SYNSET/*.JPEG and val/ (also ILSVRC/Data/CLS-LOC below it)")
    classes: list[str] = key([], "synsets, or a text file with one per line (default: n_classes drawn)")
    n_classes: int = key(100, "how many classes to draw when none are named", low=2)
    val_labels: str | None = key(
        None, "where val/ is flat: a file with lines NAME SYNSET, or Kaggle's LOC_val_solution.csv"
    )
    seed: int = key(0, "seed of the classes and of the training images", low=0)


def load(options: Options) -> SourceRows:
    """Training images first, then validation images, both by class and name."""
    root = _root(options.path)
    train, val = storage.join(root, "train"), storage.join(root, "val")
    known = [name for name in storage.list_names(train) if not name.startswith((".", "_"))]
    classes = _classes(options, known, train)
    names: list[str] = []
    owners: list[str] = []
    for synset in classes:
        found = find_below(storage.join(train, synset), PICTURES).names
        names += [f"train/{synset}/{name}" for name in found]
        owners += [synset] * len(found)
    n_train = len(names)
    for name, synset in _validation(options, val, set(classes)):
        names.append(f"val/{name}")
        owners.append(synset)
    if len(names) == n_train:
        raise DataError(f"{val} has no picture of the {len(classes)} classes; they are the queries")
    labels, _ = lists_of_names(pa.array(owners, pa.string()), classes)
    paths = pa.array(names, pa.string())
    return rows_of_uris(
        uris_below(storage.absolute(root), paths),
        labels=labels, n_classes=len(classes), class_names=tuple(classes), names=paths,
        fixed=np.where(np.arange(len(names)) < n_train, DATABASE, QUERY).astype(np.uint8),
    )  # fmt: skip


def _root(path: str) -> str:
    for layout in LAYOUTS:
        root = storage.join(path, layout) if layout else path
        if storage.is_folder(storage.join(root, "train")) and storage.is_folder(storage.join(root, "val")):
            return root
    raise DataError(
        f"{path} has no train/ and val/ (nor {' or '.join(LAYOUTS[1:])} with them); check the path"
    )


def _classes(options: Options, known: list[str], train: str) -> list[str]:
    if options.classes:
        return choose_classes(read_names(options.classes), known, train)
    if len(known) < options.n_classes:
        raise DataError(
            f"{train} has {len(known)} classes, the protocol needs {options.n_classes}; see n_classes"
        )
    drawn = np.random.default_rng([options.seed, 4]).permutation(len(known))[: options.n_classes]
    return [known[i] for i in sorted(drawn)]


def _validation(options: Options, val: str, classes: set[str]) -> list[tuple[str, str]]:
    """(name below val/, synset) of the chosen classes."""
    names = find_below(val, PICTURES).names
    if options.val_labels is None:
        found = [(name, name.partition("/")[0]) for name in names if "/" in name]
        if not found:
            raise DataError(
                f"{val} is flat: give val_labels, a file with lines NAME SYNSET, or sort it into folders"
            )
        return [(name, synset) for name, synset in found if synset in classes]
    try:
        lines = storage.read_bytes(options.val_labels).decode().splitlines()
    except (StorageError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read val_labels {options.val_labels}: {error}") from error
    synset_of = {}
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words or words[0] == "ImageId":
            continue
        if len(words) < 2:
            raise DataError(f"{options.val_labels} line {number} must be NAME SYNSET, got {line!r}")
        synset_of[words[0].partition(".")[0]] = words[1]
    stems = [(name, storage.name_of(name).partition(".")[0]) for name in names]
    missing = [name for name, stem in stems if stem not in synset_of]
    if missing:
        raise DataError(
            f"{options.val_labels} does not name {missing[0]} ({len(missing):,} such pictures in {val})"
        )
    return [(name, synset_of[stem]) for name, stem in stems if synset_of[stem] in classes]
