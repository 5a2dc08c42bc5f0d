"""What sources share: their input files, and the columns of a manifest made from what is in them.

Files are found by path, folder, or a pattern such as ``a-{000..012}.tar``. Labels come as class ids, names,
lists, or a 0 and 1 per class; they become list<int32>. Feature vectors become fixed_size_list<float32>.
"""

from __future__ import annotations

import difflib
import errno
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hashnet import labels as label_sets
from hashnet.errors import CodeError, DataError
from hashnet.io import storage, type_from_text
from hashnet.results import HIT_FIELDS

Labels = tuple[pa.Array, tuple[str, ...] | None, int]

_SYNSET = re.compile(r"n\d{8}\b")
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # how Python shows such bytes of a name
_NOT_DATA = (".", "_")  # how the names of files begin that are not data
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


# ---------------------------------------------------------------- files


def uris_below(folder: str, names: pa.Array) -> pa.Array:
    """Uris of names below a folder, of the same type; absolute paths and uris among the names stay."""
    base, options = storage.split_options(_plain_path(folder))
    before, after, nothing = (pa.scalar(text, names.type) for text in (base.rstrip("/") + "/", options, ""))
    below = pc.binary_join_element_wise(before, names, after, nothing)
    whole = pc.or_(pc.starts_with(names, "/"), pc.match_substring(names, "://"))
    return pc.if_else(whole, names, below)


def _plain_path(uri: str) -> str:
    """The path of a ``file://`` uri: names below a path need no quoting of ``%`` and ``?``."""
    return storage.resolve(uri)[1] if uri.startswith("file://") else uri


def with_suffix(uri: str, suffix: str) -> str:
    """``uri`` with ``suffix`` in place of ``.parquet``."""
    base, options = storage.split_options(uri)
    return base.rstrip("/").removesuffix(".parquet") + suffix + options


def first_existing(folder: str, names: Iterable[str]) -> str:
    """The first of the files or folders ``names`` that is below ``folder``; DataError where none is."""
    names = list(names)
    for name in names:
        uri = storage.join(folder, name) if name else folder
        if storage.exists(uri):
            return uri
    raise DataError(f"{folder} has no {' or '.join(filter(None, names))}; check the path")


class FoundFiles(NamedTuple):
    """Paths below a folder, sorted, and how many entries were skipped for which reason."""

    names: list[str]
    skipped: Counter[str]

    def notes(self) -> dict[str, int | str]:
        """The counts as they stand in the manifest's ``source`` and in its summary."""
        return {f"skipped_{reason}": n for reason, n in sorted(self.skipped.items())}


def find_below(folder: str, endings: Iterable[str]) -> FoundFiles:
    """Paths of all files below ``folder`` with one of the endings, relative to it.

    Skipped and counted are files with another ending, names that start with a dot or an underscore (not
    data), circular links, non-regular files, and names that are not UTF-8, which a manifest
    cannot hold.
    """
    if not storage.is_folder(folder):
        raise DataError(f"{folder} is not a folder; check the path")
    ends = tuple(ending.lower() for ending in endings)
    filesystem, path = storage.resolve(folder)
    skipped: Counter[str] = Counter()
    if isinstance(filesystem, fs.LocalFileSystem):
        try:
            found = _walk(path, "", skipped)
        except OSError as error:  # a folder that may not be read
            raise DataError(f"cannot list {folder}: {error}; repair or remove it") from error
    else:
        infos = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        found = [info.path[len(path) :].lstrip("/") for info in infos if info.is_file]
    names = []
    for name in sorted(found):
        if _hidden(name):
            skipped["hidden"] += 1
        elif not name.lower().endswith(ends):
            skipped["other_suffix"] += 1
        elif _NOT_UTF8.search(name):
            skipped["not_utf8"] += 1
        else:
            names.append(name)
    return FoundFiles(names, skipped)


def check_utf8(names: Iterable[str], where: str) -> None:
    """DataError for the first name that is not UTF-8: a manifest cannot hold it."""
    odd = next((name for name in names if _NOT_UTF8.search(name)), None)
    if odd is not None:
        raise DataError(f"the name of {odd!r} in {where} is not UTF-8; rename the file")


def _hidden(name: str) -> bool:
    return any(part.startswith(_NOT_DATA) for part in name.split("/"))


def _walk(root: str, below: str, skipped: Counter[str], above: tuple[str, ...] = ()) -> list[str]:
    """Files below a folder, through links but not in cycles; faster than pyarrow on a million files."""
    folder = os.path.join(root, below)
    real = os.path.realpath(folder)
    if real in above:
        skipped["link_circle"] += 1
        return []
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith(_NOT_DATA):
                skipped["hidden"] += 1
            elif (kind := _kind(entry)) == "folder":
                found += _walk(root, name, skipped, (*above, real))
            elif kind == "file":
                found.append(name)
            else:
                skipped[kind] += 1
    return found


def _kind(entry: os.DirEntry) -> str:
    """What an entry is: a folder, a file (also a broken link: a missing picture), or why it is skipped."""
    try:
        if entry.is_dir():
            return "folder"
        return "file" if entry.is_file() or entry.is_symlink() else "not_a_file"
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return "link_circle"
        raise


def expand_pattern(uri: str, ending: str) -> list[str]:
    """The files that a path stands for, absolute and in order; DataError when there is none.

    It is a file; a folder (all files below it with that ending); ``a-{000..012}.tar``; ``folder/*.tar``.
    """
    uri = _plain_path(uri)
    if found := _BRACES.search(uri):
        low, high = found.groups()
        numbers = range(int(low), int(high) + 1)
        names = [uri[: found.start()] + f"{i:0{len(low)}d}" + uri[found.end() :] for i in numbers]
        files = [file for name in names for file in expand_pattern(name, ending)]
    elif "*" in storage.name_of(uri):
        pattern, folder = storage.name_of(uri), storage.parent_folder(uri)
        matching = [n for n in storage.list_names(folder) if fnmatch.fnmatch(n, pattern)]
        files = [storage.absolute(storage.join(folder, name)) for name in matching]
    elif storage.is_folder(uri):
        files = [storage.absolute(storage.join(uri, name)) for name in find_below(uri, [ending]).names]
    else:
        files = [storage.absolute(uri)] if storage.exists(uri) else []
    if not files:
        raise DataError(f"there is no {ending} file at {uri}; check the path")
    return files


# ---------------------------------------------------------------- labels


def read_names(words: Sequence[str]) -> list[str]:
    """Class names: the words themselves, or the lines of the one text file they name."""
    if len(words) == 1 and storage.exists(words[0]) and not storage.is_folder(words[0]):
        lines = storage.read_bytes(words[0]).decode("utf-8-sig", errors="replace").splitlines()
        # ImageNet's lists carry a description after the synset: "n01440764 tench, Tinca tinca"
        return [line.split()[0] if _SYNSET.match(line) else line.strip() for line in lines if line.strip()]
    return list(words)


def choose_classes(requested: Sequence[str], known: Sequence[str], where: str) -> list[str]:
    """The requested classes in the order of ``known``; DataError names an unknown one and the nearest."""
    unknown = [name for name in requested if name not in set(known)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the first ones there are {', '.join(known[:5])}"
        raise DataError(
            f"{len(unknown)} of {len(requested)} classes are not in {where}, "
            f"the first is {unknown[0]!r}; {hint}"
        )
    chosen = set(requested)
    return [name for name in known if name in chosen]


def lists_of_names(names: pa.Array, classes: Sequence[str] | None = None) -> tuple[pa.Array, list[str]]:
    """Lists of one class id per name (n,), and the class names, sorted; a null name has no label."""
    if classes is None:
        classes = sorted(name for name in pc.unique(names).to_pylist() if name is not None)
    ids = pc.index_in(names, value_set=pa.array(classes, names.type))
    return lists_of_ids(ids), list(classes)


def lists_of_ids(ids: pa.Array) -> pa.Array:
    """Lists of one class id each; null where the id is null or negative."""
    ids = ids.cast(pa.int32())
    known = np.asarray(
        pc.fill_null(pc.greater_equal(ids, 0), False).to_numpy(zero_copy_only=False), dtype=bool
    )
    offsets = np.concatenate([[0], np.cumsum(known)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, ids.filter(pa.array(known)))
    return lists if known.all() else pc.if_else(pa.array(known), lists, pa.scalar(None, lists.type))


def lists_of_pairs(rows: np.ndarray, classes: np.ndarray, n: int) -> pa.Array:
    """Lists (n,) of the pairs (row, class), given in any order: each class once, ascending."""
    order = np.lexsort((classes, rows))
    rows, classes = rows[order], classes[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]) | (classes[1:] != classes[:-1])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[new], minlength=n))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(classes[new], pa.int32()))


def renumber(labels: pa.Array, old: Sequence[str], new: Sequence[str]) -> pa.Array:
    """Label lists with ids of ``new`` instead of ids of ``old``; DataError for a name that ``new`` lacks."""
    if list(old) == list(new):
        return labels
    used = np.unique(labels.flatten().to_numpy())
    try:
        choose_classes([old[i] for i in used], new, "the manifest")
    except DataError as error:
        fixed = "the classes of a manifest are fixed when it is made: make a new one of all rows"
        raise DataError(f"{error}; {fixed}") from error
    where = {name: i for i, name in enumerate(new)}
    table = np.array([where.get(name, -1) for name in old], dtype=np.int32)
    lengths = labels.value_lengths().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(len(labels)), lengths)
    return lists_of_pairs(rows, table[labels.flatten().to_numpy()], len(labels))


def is_among(values: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """bool (n,): which values are among ``listed``, which is sorted."""
    if len(listed) == 0:
        return np.zeros(values.shape, dtype=bool)
    return listed[np.minimum(np.searchsorted(listed, values), len(listed) - 1)] == values


def check_labels(labels: pa.Array | None, n_classes: int | None) -> None:
    """DataError that names the first row with a class id outside 0..n_classes-1."""
    if labels is None or len(labels) == 0:
        return
    if n_classes is None:
        if labels.null_count < len(labels):
            raise DataError("rows have labels, but the number of classes is not known; give n_classes")
        return
    classes = labels.flatten()
    wrong = pc.or_(pc.less(classes, 0), pc.greater_equal(classes, n_classes))
    if pc.any(wrong).as_py():
        at = wrong.index(True).as_py()
        row = pc.list_parent_indices(labels)[at].as_py()
        raise DataError(
            f"row {row} has class {classes[at].as_py()}, but the classes are 0..{n_classes - 1}; "
            "correct the label or give the right number of classes"
        )


def read_labels(
    column: pa.Array, name: str, multi_hot: bool, n_classes: int | None, class_names: tuple[str, ...] | None
) -> Labels:
    """Class id lists list<int32> (n,), class names or None, and the number of classes.

    A column holds a class id, a class name, a list of either, or (``multi_hot``) a 0 or 1 per class.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if multi_hot and is_list(kind):
        lists, width = _from_multi_hot(column, name)
        return lists, class_names, n_classes or width
    if _is_text(kind):
        _refuse_unknown(pc.unique(column).to_pylist(), class_names, name)
        lists, names = lists_of_names(column.cast(pa.large_string()), class_names)
        return lists, tuple(names), len(names)
    if is_list(kind) and _is_text(kind.value_type):
        words = column.flatten().cast(pa.large_string())
        found = pc.unique(words).to_pylist()
        _refuse_unknown(found, class_names, name)
        classes = class_names or tuple(sorted(word for word in found if word is not None))
        ids = pc.index_in(words, value_set=pa.array(classes, pa.large_string()))
        return _with_values(column, ids), classes, len(classes)
    single = pa.types.is_integer(kind)
    if not single and not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        raise DataError(f"column {name!r} is {kind}; labels are class ids, names, or lists of them")
    values = column if single else column.flatten()
    top = pc.max(values).as_py() or 0
    if top >= label_sets.MAX_CLASSES:
        most = label_sets.MAX_CLASSES
        raise DataError(f"column {name!r} holds class {top}; number classes from 0, at most {most:,} of them")
    lists = lists_of_ids(column) if single else _with_values(column, values)
    return lists, class_names, n_classes or (len(class_names) if class_names else top + 1)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _refuse_unknown(found: list[str | None], class_names: tuple[str, ...] | None, name: str) -> None:
    unknown = sorted(set(found) - {None} - set(class_names or found))  # type: ignore[type-var]
    if unknown:
        raise DataError(f"column {name!r} has class {unknown[0]!r}, which is not among the class_names")


def _with_values(column: pa.Array, values: pa.Array) -> pa.Array:
    """The lists of ``column`` with ``values`` in place of theirs: sorted, each once, without nulls."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(column)), lengths)
    known = values.is_valid().to_numpy(zero_copy_only=False)
    return lists_of_pairs(rows[known], values.drop_null().cast(pa.int32()).to_numpy(), len(column))


def _from_multi_hot(column: pa.Array, name: str) -> tuple[pa.Array, int]:
    lengths = pc.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != lengths[0])
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"column {name!r} row {row} has {lengths[row]} labels, row 0 has {lengths[0]}")
    values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    try:
        return label_sets.to_lists(label_sets.as_multi_hot(values, name=f"column {name!r}")), values.shape[1]
    except CodeError as error:
        raise DataError(str(error)) from error


# ---------------------------------------------------------------- further columns and features

RESERVED = frozenset(
    ["row_id", "uri", "image", "feature", "labels", "splits", "code", "pixels", "reason", "shard", "worker"]
).union(HIT_FIELDS)
KEY = "key"


def further_columns(
    requested: Sequence[str], key: str | None, schema: pa.Schema, used: set[str | None], where: str
) -> dict[str, str]:
    """Columns that a manifest or store keeps beside its own: name there → name in the file.

    ``all`` is every column that is not used otherwise. DataError for a name that is taken or a type that
    cannot be kept.
    """
    names = [name for name in schema.names if name not in used] if list(requested) == ["all"] else requested
    kept = ({KEY: key} if key else {}) | {name: name for name in names}
    for name, source in kept.items():
        if source not in schema.names:
            near = difflib.get_close_matches(source, schema.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(schema.names)}"
            raise DataError(f"{where} has no column {source!r}; {hint}")
        if name in RESERVED:
            raise DataError(
                f"{where}: the name {name!r} is taken by what hashnet stores or returns itself; rename the "
                f"column, or list the columns to keep without it{' (id= reads ids)' if name == 'id' else ''}"
            )
        schema_type(schema, source, name)
    return kept


def schema_type(schema: pa.Schema, name: str, kept_as: str | None = None) -> pa.DataType:
    """The type a further column is kept with: texts, categories and keys as string; nested: DataError."""
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kept_as == KEY and not (_is_text(kind) or pa.types.is_integer(kind)):
        raise DataError(f"column {name!r} is {kind}; keys are texts or whole numbers: give another column")
    kind = pa.string() if _is_text(kind) or kept_as == KEY else kind
    try:
        if type_from_text(str(kind)) == kind:
            return kind
    except ValueError:
        pass
    raise DataError(
        f"column {name!r} is {kind}; numbers, texts, dates and lists of them can be kept: leave it out"
    )


def plain_column(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """A further column as it is kept under ``name``, see ``schema_type``."""
    return column.cast(schema_type(pa.schema([(name, column.type)]), name, name))


def feature_column(features: np.ndarray) -> pa.Array:
    """Arrow fixed_size_list<float32, d> of a matrix (n, d)."""
    flat = np.ascontiguousarray(features, dtype=np.float32).ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), features.shape[1])


def check_finite(features: np.ndarray, where: str, first_row: int) -> None:
    """DataError naming the first row with NaN or an infinite value."""
    good = np.isfinite(features).all(axis=1)
    if not good.all():
        row = int(np.argmin(good))
        raise DataError(f"{where} row {first_row + row} holds NaN or an infinite value; correct or remove it")


def features_from_column(
    column: pa.ChunkedArray, n_features: int | None, where: str, first_row: int
) -> np.ndarray:
    """float32 (n, d) of a list column; DataError for a missing, infinite or shorter or longer row."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        row = first_row + array.is_null().index(True).as_py()
        raise DataError(f"{where} row {row} has no feature vector; remove the row")
    if not pa.types.is_fixed_size_list(array.type):
        lengths = array.value_lengths().to_numpy()
        expected = n_features or int(lengths[0])
        wrong = np.flatnonzero(lengths != expected)
        if len(wrong):
            raise DataError(
                f"{where} row {first_row + wrong[0]} has {lengths[wrong[0]]} values, "
                f"the first has {expected}; all feature vectors must have the same length"
            )
    flat = array.flatten().to_numpy(zero_copy_only=False)
    features = flat.astype(np.float32, copy=False).reshape(len(array), -1)
    check_finite(features, where, first_row)
    return features


def feature_matrix(table: pa.Table) -> np.ndarray:
    """float32 (n, d) of the column ``feature``."""
    if "feature" not in table.column_names:
        raise DataError("these rows are pictures, they have no column 'feature'")
    column = table["feature"].combine_chunks()
    if column.null_count:
        raise DataError(f"row {column.is_null().index(True).as_py()} has no feature")
    return np.ascontiguousarray(column.flatten().to_numpy().reshape(len(column), -1), dtype=np.float32)


def feature_rows(table: pa.Table) -> tuple[np.ndarray, pa.Array]:
    """float32 (n, d), and per row the reason why it cannot be used: null, ``missing`` or ``not_finite``."""
    column = table["feature"].combine_chunks()
    width = column.type.list_size
    values = column.values.slice(column.offset * width, len(column) * width)  # null rows keep their place
    matrix = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(-1, width)
    finite = pa.array(np.isfinite(matrix).all(axis=1))
    reasons = pc.if_else(finite, pa.scalar(None, pa.string()), pa.scalar("not_finite"))
    return matrix, pc.if_else(column.is_valid(), reasons, pa.scalar("missing"))
