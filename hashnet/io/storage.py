"""Files by path or URI: anything pyarrow's filesystems open (a local path, s3://, gs://, hdfs://).

Every file of the project is read and written through this module, so a run on an object store works
like any other. A local write goes to a temporary name, is flushed, and is renamed; on an
object store it is one put under the final name. A reader sees the old file or the new one.

A URI may carry options after a question mark, as pyarrow takes them:
``s3://bucket/runs/demo?endpoint_override=127.0.0.1:9000&scheme=http``. Credentials in a URI are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import pyarrow as pa
from pyarrow import fs

from hashnet.errors import FormatError, StorageError

# Names of URI options that hold a secret; ``sig`` and ``sas`` are Azure's.
SECRET = re.compile(r"secret|passw|token|key|signature|^(sig|sas|credentials?)$")
TMP_MARK = ".tmp-"  # in the name of every file that is not finished


def is_uri(uri: str | os.PathLike) -> bool:
    """Whether this names a filesystem (``s3://…``) rather than a plain path."""
    return "://" in str(uri)


def resolve(uri: str | os.PathLike) -> tuple[fs.FileSystem, str]:
    """The pyarrow filesystem and the path inside it."""
    text = str(uri)
    if not is_uri(text):
        return _local(), os.path.abspath(os.path.expanduser(text))
    base, _, options = text.partition("?")
    scheme, _, rest = base.partition("://")
    if scheme == "file":
        return _local(), "/" + unquote(rest).lstrip("/")
    bucket, _, path = rest.partition("/")
    _refuse_credentials(scheme, bucket, options)
    filesystem, prefix = _remote(f"{scheme}://{bucket}" + (f"?{options}" if options else ""))
    return filesystem, "/".join(part.strip("/") for part in (prefix, path) if part.strip("/"))


def _refuse_credentials(scheme: str, bucket: str, options: str) -> None:
    """StorageError where a URI carries secrets: logs, results and config.yaml show the URI of a run."""
    user, at, host = bucket.rpartition("@")
    found = f"{scheme}://…@{host}" if at and (":" in user or scheme not in ("abfs", "abfss")) else ""
    for name, _ in parse_qsl(options, keep_blank_values=True):
        if SECRET.search(name.lower()):
            found = f"{scheme}://{host}?{name}=…"
    if found:
        raise StorageError(
            f"{found} carries credentials; give them in the environment or by the machine's role, "
            "never in a URI"
        )


@lru_cache(maxsize=1)
def _local() -> fs.FileSystem:
    return fs.LocalFileSystem()


@lru_cache(maxsize=32)
def _remote(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        return fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise StorageError(f"cannot open {uri.partition('?')[0]}: {error}") from error


def is_local(uri: str | os.PathLike) -> bool:
    """Whether the files are on a local (or mounted) file system."""
    return isinstance(resolve(uri)[0], fs.LocalFileSystem)


def absolute(uri: str) -> str:
    """``uri`` in a form that is valid from any folder: URIs as they are, paths made absolute."""
    return uri if is_uri(uri) else resolve(uri)[1]


def join(uri: str | os.PathLike, *names: str) -> str:
    """``uri`` with names appended before any ``?options``; a plain path stays a plain path."""
    base, options = split_options(uri)
    return "/".join([base.rstrip("/"), *names]) + options


def name_of(uri: str | os.PathLike) -> str:
    """The last part of a path or URI."""
    base, _ = split_options(uri)
    return base.rstrip("/").rpartition("/")[2]


def split_options(uri: str | os.PathLike) -> tuple[str, str]:
    """A URI without its ``?options``, and the options with their question mark; a plain path has none."""
    base, mark, options = str(uri).partition("?") if is_uri(uri) else (str(uri), "", "")
    return base, mark + options


def parent_folder(uri: str | os.PathLike) -> str:
    """The folder that holds a file, with the URI's options."""
    base, options = split_options(uri)
    folder, slash, _ = base.rstrip("/").rpartition("/")
    return (folder or slash or ".") + options


def check_plain_name(name: Any, listed_in: str) -> str:
    """``name``, if it is a plain file name in the folder of the list; FormatError otherwise."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise FormatError(f"{listed_in} names the file {name!r}, which is not one of its own")
    return name


def exists(uri: str | os.PathLike) -> bool:
    """Whether a file or folder is there."""
    return _info(uri).type != fs.FileType.NotFound


def is_folder(uri: str | os.PathLike) -> bool:
    """Whether it is a folder (on an object store: a prefix with something in it)."""
    return _info(uri).type == fs.FileType.Directory


def size_of(uri: str | os.PathLike) -> int:
    """Bytes of one file."""
    return int(_info(uri).size or 0)


def _info(uri: str | os.PathLike) -> fs.FileInfo:
    filesystem, path = resolve(uri)
    try:
        return filesystem.get_file_info(path)
    except OSError as error:
        raise StorageError(f"cannot access {uri}: {error}") from error


def list_names(uri: str | os.PathLike) -> list[str]:
    """Names of the files and folders directly below a folder, sorted; none when it is missing."""
    return sorted(info.base_name for info in _listed(uri))


def list_sizes(uri: str | os.PathLike) -> dict[str, int]:
    """Name → bytes of the files directly below a folder; empty when it is missing."""
    return {info.base_name: int(info.size or 0) for info in _listed(uri) if info.is_file}


def _listed(uri: str | os.PathLike) -> list[fs.FileInfo]:
    filesystem, path = resolve(uri)
    try:
        return filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except OSError as error:
        raise StorageError(f"cannot list {uri}: {error}") from error


def make_folder(uri: str | os.PathLike) -> None:
    """Makes a folder and its parents where the file system has folders."""
    filesystem, path = resolve(uri)
    try:
        filesystem.create_dir(path, recursive=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {uri}: {error}") from error


def open_input(uri: str | os.PathLike) -> pa.NativeFile:
    """A random-access file to read from."""
    filesystem, path = resolve(uri)
    try:
        return filesystem.open_input_file(path)
    except FileNotFoundError as error:
        raise StorageError(f"{uri} does not exist") from error
    except OSError as error:
        raise StorageError(f"cannot open {uri}: {error}") from error


def read_buffer(uri: str | os.PathLike) -> pa.Buffer:
    """The whole content of a file as an Arrow buffer, which Parquet is parsed from without a copy."""
    with open_input(uri) as source:
        try:
            return source.read_buffer()
        except OSError as error:
            raise StorageError(f"cannot read {uri}: {error}") from error


def read_bytes(uri: str | os.PathLike) -> bytes:
    """The whole content of a file."""
    return read_buffer(uri).to_pybytes()


@contextmanager
def open_output(uri: str | os.PathLike) -> Iterator[pa.NativeFile]:
    """A stream whose content appears under its name only when the block ends without an error."""
    filesystem, path = resolve(uri)
    local = isinstance(filesystem, fs.LocalFileSystem)
    if not local:  # an object store shows the object when the upload is complete
        buffer = pa.BufferOutputStream()
        yield buffer
        data = buffer.getvalue()
        try:
            with filesystem.open_output_stream(path) as sink:
                sink.write(data)
        except OSError as error:
            raise StorageError(f"cannot write {uri}: {error}") from error
        return
    temporary = f"{path}{TMP_MARK}{uuid.uuid4().hex[:12]}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with pa.OSFile(temporary, "wb") as sink:
            yield sink
        _flush(temporary)
        os.replace(temporary, path)
        _flush(os.path.dirname(path))
    except OSError as error:
        raise StorageError(f"cannot write {uri}: {error}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(uri: str | os.PathLike, data: bytes) -> None:
    """Writes a file completely or not at all."""
    with open_output(uri) as sink:
        sink.write(data)


def delete(uri: str | os.PathLike) -> None:
    """Removes a file or a folder with all it holds; a missing one is fine."""
    filesystem, path = resolve(uri)
    kind = _info(uri).type
    try:
        if kind == fs.FileType.Directory:
            filesystem.delete_dir(path)
        elif kind != fs.FileType.NotFound:
            filesystem.delete_file(path)
    except OSError as error:
        raise StorageError(f"cannot remove {uri}: {error}") from error


@contextmanager
def local_copy(uri: str | os.PathLike) -> Iterator[Path]:
    """A path on this machine that holds the file, for libraries that read only paths."""
    if is_local(uri):
        yield Path(resolve(uri)[1])
        return
    with tempfile.TemporaryDirectory(prefix="hashnet-") as folder:
        copy = Path(folder) / name_of(uri)
        with open_input(uri) as source, copy.open("wb") as target:
            while chunk := source.read(8 << 20):
                target.write(chunk)
        yield copy


def sha256_of(uri: str | os.PathLike) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open_input(uri) as source:
        while chunk := source.read(8 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(uri: str | os.PathLike) -> Any:
    """A JSON file's value."""
    try:
        return json.loads(read_bytes(uri))
    except ValueError as error:
        raise FormatError(
            f"{uri} is not JSON ({error}); it is damaged or was not written by hashnet"
        ) from error


def write_json(uri: str | os.PathLike, value: Any) -> None:
    """Writes JSON that does not depend on dict order, so the same value is the same bytes."""
    write_bytes(uri, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def check_format(about: Any, uri: str, kind: str, version: int) -> dict:
    """``about`` when it is of this ``kind`` and at most this ``version``, else FormatError."""
    if not isinstance(about, dict) or about.get("kind") != kind:
        found = about.get("kind") if isinstance(about, dict) else type(about).__name__
        raise FormatError(f"{uri} is not a hashnet {kind} (its kind is {found!r})")
    written = about.get("format_version")
    if not isinstance(written, int) or written > version:
        raise FormatError(
            f"{uri} has format version {written}; this hashnet reads up to {version}: upgrade hashnet"
        )
    return about
