"""Finding the input files of a source: one, a folder of them, or a pattern such as ``a-{000..012}.tar``."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hashnet.errors import DataError
from hashnet.io import storage

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # how Python shows such bytes of a name
_NOT_DATA = (".", "_")  # how the names of files begin that are not data
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


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
    data), links in a circle, what is no regular file, and names that are not UTF-8, which a manifest
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
