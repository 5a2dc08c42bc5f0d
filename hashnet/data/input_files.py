"""Finding the input files of a source: one, a folder of them, or a pattern such as ``a-{000..012}.tar``."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable

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


def find_below(folder: str, endings: Iterable[str]) -> list[str]:
    """Paths of all files below ``folder`` with one of the endings, relative to it and sorted.

    Names that start with a dot or an underscore are not data and are left out.
    """
    if not storage.is_folder(folder):
        raise DataError(f"{folder} is not a folder; check the path")
    ends = tuple(ending.lower() for ending in endings)
    filesystem, path = storage.resolve(folder)
    if isinstance(filesystem, fs.LocalFileSystem):
        try:
            found = _walk(path, "")
        except OSError as error:  # a folder that may not be read, a link to itself
            raise DataError(f"cannot list {folder}: {error}; repair or remove it") from error
    else:
        infos = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        found = [info.path[len(path) :].lstrip("/") for info in infos if info.is_file]
    names = sorted(name for name in found if name.lower().endswith(ends) and not _hidden(name))
    check_utf8(names, folder)
    return names


def check_utf8(names: Iterable[str], where: str) -> None:
    """DataError for the first name that is not UTF-8: a manifest cannot hold it."""
    odd = next((name for name in names if _NOT_UTF8.search(name)), None)
    if odd is not None:
        raise DataError(f"the name of {odd!r} in {where} is not UTF-8; rename the file")


def _hidden(name: str) -> bool:
    return any(part.startswith(_NOT_DATA) for part in name.split("/"))


def _walk(root: str, below: str, above: tuple[str, ...] = ()) -> list[str]:
    """Files below a folder, through links but not in cycles; faster than pyarrow on a million files."""
    folder = os.path.join(root, below)
    real = os.path.realpath(folder)
    if real in above:
        return []
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_NOT_DATA):
                continue
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir():
                found += _walk(root, name, (*above, real))
            else:
                found.append(name)
    return found


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
        files = [storage.absolute(storage.join(uri, name)) for name in find_below(uri, [ending])]
    else:
        files = [storage.absolute(uri)] if storage.exists(uri) else []
    if not files:
        raise DataError(f"there is no {ending} file at {uri}; check the path")
    return files
