"""``npy``: features in an .npy file with labels beside it, or everything in one .npz.

An .npz holds ``features`` (and ``labels``, ``ids``), or ``train_features``, ``query_features`` and
``database_features`` with ``*_labels`` and ``*_ids``: a fixed split. Rows of two splits with the
same id are one row. An array ``scale`` multiplies the features (which may then be uint8).
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet import labels as label_sets
from hashnet.data.columns import check_finite, feature_column, lists_of_ids, read_names
from hashnet.data.splits import QUERY, join_names
from hashnet.data.writer import SourceRows, refuse_duplicates
from hashnet.errors import DataError, HashnetError, StorageError
from hashnet.io import REQUIRED, key, storage

ORDER = ("database", "train", "query")  # of the rows


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "features.npy of shape (n, d), or an .npz")
    labels: str | None = key(None, "labels.npy: class ids (n,), or 0 and 1 (n, n_classes)")
    ids: str | None = key(None, "ids.npy (n,): checked for duplicates, and used as row names in split files")
    scale: float = key(1.0, "multiplies the features, useful for uint8 ones")
    n_classes: int | None = key(None, "number of classes, where ids of the last ones may be missing", low=1)
    class_names: list[str] = key([], "names of the classes, or a text file with one per line")


@dataclass(frozen=True)
class _Block:
    """Arrays of one split, or of everything."""

    where: str
    features: np.ndarray
    labels: np.ndarray | None
    ids: pa.Array | None


def load(options: Options) -> SourceRows:
    """Rows in the order of the file; of an .npz with splits: database, further training rows, queries."""
    blocks, scale = _read(options)
    for block in blocks.values():
        if block.features.ndim != 2 or block.features.dtype.kind not in "fiu":
            found = f"{block.features.dtype} {block.features.shape}"
            raise DataError(f"{block.where} must be numbers of shape (n, d), got {found}")
    d = blocks[next(iter(blocks))].features.shape[1]
    if scale.size not in (1, d):
        raise DataError(f"scale of {options.path} has {scale.size} numbers; give 1 or {d} (one per feature)")
    for block in blocks.values():
        _check(block, d)
    if list(blocks) == ["all"]:
        block = blocks["all"]
        rows, fixed = np.arange(len(block.features)), None
    else:
        rows, fixed = _join(blocks)
    ids = [block.ids for block in blocks.values()]
    names = pa.concat_arrays(ids).take(pa.array(rows)) if all(i is not None for i in ids) else None
    labels, n_classes = _labels(options, blocks, rows)
    names_of = tuple(read_names(options.class_names)) or None
    if names_of is not None and n_classes != len(names_of):
        raise DataError(f"class_names has {len(names_of)} names, the labels have {n_classes} classes")
    starts = np.cumsum([0] + [len(block.features) for block in blocks.values()])
    parts = list(blocks.values())

    def payload(start: int, stop: int) -> pa.Table:
        positions = rows[start:stop]
        matrix = np.empty((len(positions), d), dtype=np.float32)
        owner = np.searchsorted(starts, positions, side="right") - 1
        for i, block in enumerate(parts):
            mine = owner == i
            matrix[mine] = block.features[positions[mine] - starts[i]]
        matrix *= scale
        check_finite(matrix, storage.name_of(options.path), start)
        uris = names[start:stop] if names is not None else _numbered(options.path, start, stop)
        return pa.table({"uri": uris, "feature": feature_column(matrix)})

    return SourceRows(
        n=len(rows), payload=payload, modality="features", labels=labels, n_classes=n_classes,
        class_names=names_of, n_features=d, names=names, fixed=fixed, block_rows=4_096,
    )  # fmt: skip


def _numbered(path: str, start: int, stop: int) -> pa.Array:
    numbers = pc.cast(pa.array(np.arange(start, stop)), pa.string())
    return pc.binary_join_element_wise(f"{storage.name_of(path)}#row=", numbers, "")


def _read(options: Options) -> tuple[dict[str, _Block], np.ndarray]:
    scale = np.asarray(options.scale, dtype=np.float32)
    if not _is_npz(options.path):
        labels = None if options.labels is None else _load(options.labels)
        ids = None if options.ids is None else _text(_load(options.ids))
        return {"all": _Block(options.path, _load(options.path), labels, ids)}, scale
    for name in ("labels", "ids"):
        if getattr(options, name) is not None:
            raise DataError(f"--{name} goes with an .npy; put them into {options.path} as {name!r} instead")
    arrays = _load(options.path)
    if "scale" in arrays:
        scale = scale * np.asarray(arrays["scale"], dtype=np.float32).ravel()

    def block(prefix: str) -> _Block:
        ids = arrays.get(f"{prefix}ids")
        return _Block(
            f"{options.path} {prefix}features",
            arrays[f"{prefix}features"],
            arrays.get(f"{prefix}labels"),
            None if ids is None else _text(ids),
        )

    if "features" in arrays:
        return {"all": block("")}, scale
    found = {split: block(f"{split}_") for split in ORDER if f"{split}_features" in arrays}
    if not found:
        raise DataError(
            f"{options.path} has neither 'features' nor 'train_features', 'query_features' and "
            f"'database_features'; it has {', '.join(arrays)}"
        )
    return found, scale


def _is_npz(uri: str) -> bool:
    return storage.name_of(uri).lower().endswith(".npz")


def _load(uri: str) -> Any:
    """An array (memory-mapped on a local disk), or the arrays of an .npz; never a pickle."""
    try:
        if not storage.exists(uri):
            raise DataError(f"{uri} does not exist; check the path")
        with storage.local_copy(uri) as path:
            if _is_npz(uri):
                with np.load(path, allow_pickle=False) as archive:
                    return {name: archive[name] for name in archive.files}
            return np.load(path, allow_pickle=False, mmap_mode="r" if storage.is_local(uri) else None)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, StorageError) as error:
        raise DataError(f"cannot read {uri} as numpy arrays (without pickle): {error}") from error


def _text(ids: np.ndarray) -> pa.Array:
    return pa.array(np.asarray(ids).ravel()).cast(pa.large_string())


def _check(block: _Block, d: int) -> None:
    shape = block.features.shape
    if shape[1] != d:
        raise DataError(f"{block.where} has {shape[1]} features, another array has {d}; they must be equal")
    if block.labels is not None and np.ndim(block.labels) == 0:
        raise DataError(f"the labels of {block.where} must be an array (n,) or (n, n_classes)")
    for name, other in (("labels", block.labels), ("ids", block.ids)):
        if other is not None and len(other) != shape[0]:
            raise DataError(
                f"{block.where} has {shape[0]:,} rows, its {name} have {len(other):,}; they must be equal"
            )
    if block.ids is not None:
        refuse_duplicates(block.ids, f"the ids of {block.where}")


def _join(blocks: dict[str, _Block]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the stacked arrays to keep (the first of each id) and their split flags."""
    names = {split: block.ids for split, block in blocks.items()}
    if any(ids is None for ids in names.values()):  # then every row is one of its own
        starts = np.cumsum([0, *(len(block.features) for block in blocks.values())])
        names = {split: pa.array(np.arange(starts[i], starts[i + 1])) for i, split in enumerate(blocks)}
    _, first, flags = join_names(names)
    both = np.flatnonzero(((flags & QUERY) > 0) & (flags != QUERY))
    if len(both):
        raise DataError(
            f"{len(both):,} ids are query and database (or training) at once; a query in the database "
            "finds itself: remove them from one"
        )
    return first, flags


def _labels(
    options: Options, blocks: dict[str, _Block], rows: np.ndarray
) -> tuple[pa.Array | None, int | None]:
    given = [block.labels for block in blocks.values()]
    without = [name for name, block in blocks.items() if block.labels is None]
    if len(without) == len(given):
        return None, None
    if without:
        raise DataError(
            f"{options.path} has labels, but no {without[0]}_labels; give those of every split, or none"
        )
    try:
        if given[0].ndim == 1:  # type: ignore[union-attr]
            ids = np.concatenate(given)[rows]  # type: ignore[arg-type]
            if ids.dtype.kind not in "iu":
                raise DataError(f"labels of {options.path} must be whole numbers, got {ids.dtype}")
            top = int(ids.max())
            if top >= label_sets.MAX_CLASSES:
                most = f"{label_sets.MAX_CLASSES:,}"
                raise DataError(f"they contain class {top}; number classes from 0, at most {most} of them")
            return lists_of_ids(pa.array(ids)), options.n_classes or top + 1
        stacked = np.concatenate([label_sets.as_multi_hot(labels) for labels in given])
        return label_sets.to_lists(stacked[rows]), stacked.shape[1]
    except (HashnetError, ValueError) as error:
        raise DataError(f"labels of {options.path}: {error}") from error
