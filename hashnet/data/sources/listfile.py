"""``listfile``: the public hashing lists, ``images/cat.jpg 0 1 0 …``, one list or one per split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.data.columns import read_names
from hashnet.data.input_files import uris_below
from hashnet.data.sources.list_parser import ListFile, read_list
from hashnet.data.splits import QUERY, join_names
from hashnet.data.writer import SourceRows, find_duplicate
from hashnet.errors import DataError
from hashnet.io import key, storage

FILES = {"train": ("train.txt",), "query": ("query.txt", "test.txt"), "database": ("database.txt",)}
ORDER = ("database", "train", "query")  # of the rows


@dataclass(frozen=True)
class Options:
    path: str | None = key(
        None, "a list, or a folder with train.txt, query.txt (or test.txt) and database.txt: a fixed split"
    )
    root: str | None = key(None, "folder that the paths in the lists start from (default: that of the list)")
    strip: str = key("", "prefix to remove from the paths in the lists, such as the authors' own folder")
    train: str | None = key(None, "list of the training images, instead of PATH")
    query: str | None = key(None, "list of the queries")
    database: str | None = key(None, "list of the database")
    overlap: str = key(
        "error",
        "queries that are also in the database list: error, or drop them there",
        choices=("error", "drop"),
    )
    class_names: list[str] = key([], "names of the label columns, or a text file with one per line")


def load(options: Options) -> SourceRows:
    """Rows of one list, or of the lists of three splits, joined by path."""
    files = _files(options)
    root = storage.absolute(options.root or storage.parent_folder(next(iter(files.values()))))
    lists = {name: _stripped(read_list(uri), options.strip) for name, uri in files.items()}
    for found in lists.values():
        _refuse_duplicates(found)
    if "all" in lists:
        found = lists["all"]
        return _rows(options, root, found.paths, found.labels, found.n_classes, None, {})
    return _join(options, root, lists)


def _files(options: Options) -> dict[str, str]:
    """Split name → list; a single list that is yet to be split has the name "all"."""
    given = {name: getattr(options, name) for name in ORDER if getattr(options, name)}
    if given and options.path:
        raise DataError("give one list as PATH, or lists as train, query and database, not both")
    if given:
        return given
    if options.path is None:
        raise DataError("no list was given; give PATH, or train, query and database")
    if not storage.is_folder(options.path):
        return {"all": options.path}
    found = {}
    for split in ORDER:
        here = [storage.join(options.path, name) for name in FILES[split]]
        here = [uri for uri in here if storage.exists(uri)]
        if here:
            found[split] = here[0]
    if "query" not in found or len(found) < 2:
        raise DataError(
            f"{options.path} must hold query.txt (or test.txt) and train.txt or database.txt; "
            f"it holds {', '.join(storage.list_names(options.path)[:5]) or 'nothing'}"
        )
    return found


def _stripped(found: ListFile, beginning: str) -> ListFile:
    """The list with ``beginning`` removed from its paths, before paths are compared with one another."""
    if not beginning:
        return found
    rest = pc.utf8_slice_codeunits(found.paths, len(beginning))
    return replace(found, paths=pc.if_else(pc.starts_with(found.paths, beginning), rest, found.paths))


def _refuse_duplicates(found: ListFile) -> None:
    """DataError for a path that occurs twice in one list: the image would be found twice."""
    if twice := find_duplicate(found.paths):
        raise DataError(
            f"{found.uri} line {found.lines[twice.second]} repeats {twice.id!r} of line "
            f"{found.lines[twice.first]} ({twice.n:,} duplicated ids in all); keep one of them"
        )


def _join(options: Options, root: str, lists: dict[str, ListFile]) -> SourceRows:
    """One row per path; its splits are the lists that contain it."""
    _refuse_other_widths(lists)
    n_classes = max((found.n_classes or 0 for found in lists.values()), default=0) or None
    paths: pa.Array = pa.concat_arrays([found.paths for found in lists.values()])
    codes, first, flags = join_names({name: found.paths for name, found in lists.items()})
    notes = _overlap(options, lists, paths, flags, first)
    labels = None
    if n_classes is not None:
        joined = pa.concat_arrays([found.labels for found in lists.values()])
        _refuse_other_labels(lists, joined, codes, first)
        labels = joined.take(pa.array(first))
    return _rows(options, root, paths.take(pa.array(first)), labels, n_classes, flags, notes)


def _refuse_other_widths(lists: dict[str, ListFile]) -> None:
    (_, one), *others = lists.items()
    for _, other in others:
        same = (one.labels is None) == (other.labels is None) and one.multi_hot == other.multi_hot
        if not same or (one.multi_hot and one.n_classes != other.n_classes):
            widths = [0 if f.labels is None else f.n_classes if f.multi_hot else 1 for f in (one, other)]
            raise DataError(
                f"{one.uri} has {widths[0]} label columns, {other.uri} has {widths[1]}; they must be equal"
            )


def _overlap(
    options: Options, lists: dict[str, ListFile], paths: pa.Array, flags: np.ndarray, first: np.ndarray
) -> dict[str, Any]:
    both = np.flatnonzero(((flags & QUERY) > 0) & ((flags & ~np.uint8(QUERY)) > 0))
    if len(both) == 0:
        return {}
    name = paths[int(first[both[0]])].as_py()
    if options.overlap == "error":
        raise DataError(
            f"{len(both):,} paths of {lists['query'].uri} are also in the database or training list, the "
            f"first is {name!r}; a query in the database finds itself: correct the lists, or say overlap=drop"
        )
    flags[both] = QUERY
    return {"queries_dropped_from_database": len(both)}


def _refuse_other_labels(
    lists: dict[str, ListFile], joined: pa.Array, codes: np.ndarray, first: np.ndarray
) -> None:
    """The same path must have the same labels in every list."""
    again = np.flatnonzero(first[codes] != np.arange(len(codes)))
    if len(again) == 0:
        return
    here, there = joined.take(pa.array(again)), joined.take(pa.array(first[codes[again]]))
    same = pc.equal(here.value_lengths(), there.value_lengths()).to_numpy(zero_copy_only=False)
    if same.all():
        differing = np.flatnonzero(here.flatten().to_numpy() != there.flatten().to_numpy())
        if len(differing) == 0:
            return
        at = int(pc.list_parent_indices(here)[int(differing[0])].as_py())
    else:
        at = int(np.flatnonzero(~same)[0])
    row, start = int(again[at]), 0
    for found in lists.values():
        if row < start + len(found):
            i = row - start
            raise DataError(
                f"{found.uri} line {found.lines[i]}: {found.paths[i].as_py()!r} has other labels here than "
                "in another list; correct one of them"
            )
        start += len(found)


def _rows(
    options: Options,
    root: str,
    paths: pa.Array,
    labels: pa.Array | None,
    n_classes: int | None,
    flags: np.ndarray | None,
    notes: dict[str, int | str],
) -> SourceRows:
    names = tuple(read_names(options.class_names)) or None
    if names is not None and len(names) != n_classes:
        raise DataError(f"class_names has {len(names)} names, the lists have {n_classes} classes")

    def payload(start: int, stop: int) -> pa.Table:
        return pa.table({"uri": uris_below(root, paths[start:stop].cast(pa.string()))})

    return SourceRows(
        n=len(paths), payload=payload, labels=labels, n_classes=n_classes, class_names=names, names=paths,
        fixed=flags, notes=notes,
    )  # fmt: skip
