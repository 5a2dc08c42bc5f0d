"""``imagefolder``: ``ROOT/CLASS/a.jpg``, ``ROOT/SPLIT/CLASS/a.jpg``, or pictures without classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.data.columns import PICTURES, choose_classes, find_below, lists_of_names, read_names, uris_below
from hashnet.data.splits import DATABASE, QUERY, TRAIN
from hashnet.data.writer import SourceRows, rows_of_uris, with_keys
from hashnet.errors import DataError
from hashnet.io import REQUIRED, key, storage

SPLIT_FOLDERS = {
    "train": TRAIN | DATABASE, "training": TRAIN | DATABASE, "database": DATABASE, "gallery": DATABASE,
    "query": QUERY, "val": QUERY, "valid": QUERY, "validation": QUERY, "test": QUERY,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "the folder")
    layout: str | None = key(
        None,
        "classes: ROOT/CLASS/…; splits: ROOT/train/CLASS/…, ROOT/val/CLASS/…; flat: no labels "
        "(default: by the folders)",
        choices=("classes", "splits", "flat"),
    )
    classes: list[str] = key([], "take only these classes (names, or a text file with one per line)")
    # last, because the name hides the function
    key: str | None = key(
        None, "path: keep each picture's path below the folder as the column `key`", choices=("path",)
    )


def load(options: Options) -> SourceRows:
    """Rows in the order of their paths; the class is the name of the first folder (below the split's)."""
    rows = _rows(options)
    return with_keys(rows) if options.key else rows


def _rows(options: Options) -> SourceRows:
    found = find_below(options.path, PICTURES)
    names = pa.array(found.names, pa.large_string())
    if len(names) == 0:
        raise DataError(f"there is no picture below {options.path} (looked for {', '.join(PICTURES)})")
    layout = options.layout or _guess(names)
    base = storage.absolute(options.path)
    if layout == "flat":
        return rows_of_uris(uris_below(base, names), names=names, notes=found.notes())
    fixed, below = None, names
    if layout == "splits":
        fixed, below = _split_flags(options.path, names), pc.replace_substring_regex(names, "^[^/]*/", "")
    folders = pc.struct_field(pc.extract_regex(below, "^(?P<folder>[^/]*)/"), "folder")
    if folders.null_count:
        stray = names[folders.is_null().index(True).as_py()].as_py()
        raise DataError(f"{options.path}/{stray} is in no class folder; move it, or set layout=flat")
    if options.classes:
        known = sorted(pc.unique(folders).to_pylist())
        chosen = choose_classes(read_names(options.classes), known, options.path)
        keep = pc.is_in(folders, value_set=pa.array(chosen))
        names, folders = names.filter(keep), folders.filter(keep)
        fixed = None if fixed is None else fixed[keep.to_numpy(zero_copy_only=False)]
    labels, classes = lists_of_names(folders)
    return rows_of_uris(
        uris_below(base, names),
        labels=labels,
        n_classes=len(classes),
        class_names=tuple(classes),
        names=names,
        fixed=fixed,
        notes=found.notes(),
    )


def _guess(names: pa.Array) -> str:
    """The layout by the folders alone: a picture outside of them must not drop the labels of all others."""
    if pc.max(pc.count_substring(names, "/")).as_py() == 0:
        return "flat"
    tops = set(pc.unique(pc.replace_substring_regex(names, "/.*", "")).to_pylist())
    return "splits" if tops <= set(SPLIT_FOLDERS) else "classes"


def _split_flags(path: str, names: pa.Array) -> np.ndarray:
    tops = pc.replace_substring_regex(names, "/.*", "").dictionary_encode()
    folders = tops.dictionary.to_pylist()
    unknown = [name for name in folders if name not in SPLIT_FOLDERS]
    if unknown:
        raise DataError(f"{path}/{unknown[0]} is not a split folder; allowed are {', '.join(SPLIT_FOLDERS)}")
    bits = np.array([SPLIT_FOLDERS[name] for name in folders], dtype=np.uint8)
    return bits[tops.indices.to_numpy()]
