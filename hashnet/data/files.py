"""Finding input files: one, a folder of them, a pattern such as ``shard-{000..012}.tar`` or ``*.tar``."""

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
_NO_UTF8 = re.compile("[\ud800-\udfff]")  # how Python shows such bytes of a name
_NO_DATA = (".", "_")  # how names of other things begin
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def split_options(uri: str) -> tuple[str, str]:
    """A URI without its ``?options``, and these with their question mark; a plain path has none."""
    base, mark, options = uri.partition("?") if storage.is_uri(uri) else (uri, "", "")
    return base, mark + options


def parent(uri: str) -> str:
    """The folder a file lies in; a URI's options stay."""
    base, options = split_options(uri)
    folder, slash, _ = base.rstrip("/").rpartition("/")
    return (folder or slash or ".") + options


def complete(folder: str, names: pa.Array) -> pa.Array:
    """Names below a folder as uris of the same type; absolute paths and uris among them stay as they are."""
    base, options = split_options(_plain(folder))
    before, after, nothing = (pa.scalar(text, names.type) for text in (base.rstrip("/") + "/", options, ""))
    below = pc.binary_join_element_wise(before, names, after, nothing)
    whole = pc.or_(pc.starts_with(names, "/"), pc.match_substring(names, "://"))
    return pc.if_else(whole, names, below)


def _plain(uri: str) -> str:
    """A ``file://`` uri as the path it means: in a path, ``%`` and ``?`` of a name below need no quoting."""
    return storage.resolve(uri)[1] if uri.startswith("file://") else uri


def beside(uri: str, suffix: str) -> str:
    """A neighbour of ``uri``: its name without ``.parquet``, plus ``suffix``."""
    base, options = split_options(uri)
    return base.rstrip("/").removesuffix(".parquet") + suffix + options


def find_below(folder: str, endings: Iterable[str]) -> list[str]:
    """Paths relative to ``folder`` of all files below it with one of the endings, sorted.

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
            raise DataError(f"cannot look below {folder}: {error}; mend it or take it out") from error
    else:
        infos = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        found = [info.path[len(path) :].lstrip("/") for info in infos if info.is_file]
    names = sorted(name for name in found if name.lower().endswith(ends) and not _hidden(name))
    check_utf8(names, folder)
    return names


def check_utf8(names: Iterable[str], where: str) -> None:
    """DataError for the first name that is no UTF-8: a manifest cannot hold it."""
    odd = next((name for name in names if _NO_UTF8.search(name)), None)
    if odd is not None:
        raise DataError(f"the name of {odd!r} in {where} is no UTF-8; rename the file")


def _hidden(name: str) -> bool:
    return any(part.startswith(_NO_DATA) for part in name.split("/"))


def _walk(root: str, below: str, above: tuple[str, ...] = ()) -> list[str]:
    """Faster than pyarrow's selector on a million files; follows links to folders, but not in a circle."""
    folder = os.path.join(root, below)
    real = os.path.realpath(folder)
    if real in above:
        return []
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_NO_DATA):
                continue
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir():
                found += _walk(root, name, (*above, real))
            else:
                found.append(name)
    return found


def expand(uri: str, ending: str) -> list[str]:
    """The files a path means, absolute and in order; DataError when it means none.

    A file; a folder (all files below it with that ending); ``a-{000..012}.tar``; ``folder/*.tar``.
    """
    uri = _plain(uri)
    if found := _BRACES.search(uri):
        low, high = found.groups()
        numbers = range(int(low), int(high) + 1)
        names = [uri[: found.start()] + f"{i:0{len(low)}d}" + uri[found.end() :] for i in numbers]
        files = [file for name in names for file in expand(name, ending)]
    elif "*" in storage.name_of(uri):
        pattern, folder = storage.name_of(uri), parent(uri)
        matching = [n for n in storage.list_names(folder) if fnmatch.fnmatch(n, pattern)]
        files = [storage.absolute(storage.join(folder, name)) for name in matching]
    elif storage.is_folder(uri):
        files = [storage.absolute(storage.join(uri, name)) for name in find_below(uri, [ending])]
    else:
        files = [storage.absolute(uri)] if storage.exists(uri) else []
    if not files:
        raise DataError(f"there is no {ending} file at {uri}; check the path")
    return files
