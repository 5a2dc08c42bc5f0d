"""Rows of a manifest → the bytes of their pictures, or their feature vectors.

for table in manifest.batches("database"):
    pictures = fetch_images(table)              # bytes, or a BadImage where there are none
    pixels, bad = preprocess.eval_many(pictures)
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from hashnet.data.references import Reference, parse
from hashnet.errors import BadImage, DataError
from hashnet.io import storage

THREADS = 8  # reads in flight: they wait for disks and networks, not for processors
MAX_BYTES = 512 << 20  # of one file: more than any picture that is decoded has, even uncompressed
CACHE_BYTES = 256 << 20  # of Parquet columns already decoded
State = tuple[int, int]  # of a file: its size, and when it was changed


def fetch_images(
    table: pa.Table, base_uri: str | None = None, threads: int = THREADS
) -> list[bytes | BadImage]:
    """The encoded picture of each row, in order; a BadImage where a picture is missing or unreadable.

    ``table`` has the column ``uri``, or ``image`` (bytes kept inside), or both. Relative paths are
    taken from ``base_uri``.
    """
    n = len(table)
    out: list[bytes | BadImage] = [BadImage("missing", "neither image nor uri")] * n
    inline = table["image"].to_pylist() if "image" in table.column_names else [None] * n
    uris = table["uri"].to_pylist() if "uri" in table.column_names else [None] * n
    by_file: dict[str, list[tuple[int, Reference]]] = defaultdict(list)
    for i, (image, uri) in enumerate(zip(inline, uris, strict=True)):
        if image is not None:
            out[i] = image
        elif uri:
            reference = parse(uri)
            by_file[_placed(reference.file, base_uri)].append((i, reference))

    with ThreadPoolExecutor(threads) as pool:
        # First in the queue, so that no thread waits for what comes after it.
        states = {file: pool.submit(_state, file) for file, wanted in by_file.items() if _in_parquet(wanted)}

        def fill(job: tuple[str, list[tuple[int, Reference]]]) -> None:
            file, wanted = job
            for (i, _), data in zip(wanted, _read(file, wanted, states.get(file)), strict=True):
                out[i] = data

        # One job a file, but the many members of one tar are spread over the threads, too.
        jobs = [(file, wanted[k::threads]) for file, wanted in by_file.items() for k in range(threads)]
        list(pool.map(fill, [job for job in jobs if job[1]]))
    return out


def feature_matrix(table: pa.Table) -> np.ndarray:
    """float32 (n, d) of the column ``feature``."""
    if "feature" not in table.column_names:
        raise DataError("these rows are pictures, they have no column 'feature'")
    column = table["feature"].combine_chunks()
    if column.null_count:
        raise DataError(f"row {column.is_null().index(True).as_py()} has no feature")
    return np.ascontiguousarray(column.flatten().to_numpy().reshape(len(column), -1), dtype=np.float32)


def feature_rows(table: pa.Table) -> tuple[np.ndarray, pa.Array]:
    """float32 (n, d), and why a row cannot be used: ``missing`` or ``not_finite``."""
    column = table["feature"].combine_chunks()
    width = column.type.list_size
    values = column.values.slice(column.offset * width, len(column) * width)  # keeps the place of null rows
    matrix = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(-1, width)
    finite = pa.array(np.isfinite(matrix).all(axis=1))
    reasons = pc.if_else(finite, pa.scalar(None, pa.string()), pa.scalar("not_finite"))
    return matrix, pc.if_else(column.is_valid(), reasons, pa.scalar("missing"))


def describe_bad(names: Sequence[str], bad: Iterable[BadImage], n_images: int) -> str:
    """One sentence: how many pictures of how many, for which reasons, and the first few names."""
    reasons = Counter(error.reason for error in bad)
    listed = ", ".join(f"{n:,} {reason}" for reason, n in reasons.most_common())
    more = ", …" if len(names) > 5 else ""
    first = ", ".join(names[:5])
    return f"{reasons.total():,} of {n_images:,} pictures cannot be used ({listed}): {first}{more}"


def too_many_bad(bad: int, rows: int, most: float) -> bool:
    """Whether ``bad`` of ``rows`` are more than the share ``most``.

    A single one among others is never too many, however few they are, unless ``most`` is 0.
    """
    return bad > most * rows and (bad > 1 or most == 0 or rows == 1)


def _placed(file: str, base_uri: str | None) -> str:
    if base_uri is None or storage.is_uri(file) or file.startswith("/"):
        return file
    return storage.join(base_uri, file)


def _in_parquet(wanted: list[tuple[int, Reference]]) -> bool:
    return any(reference.column is not None for _, reference in wanted)


def _state(file: str) -> State:
    """Size and time of a file: another one under the same name has others."""
    filesystem, path = storage.resolve(file)
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(file)
    return info.size, info.mtime_ns


def _read(
    file: str, wanted: list[tuple[int, Reference]], state: Future[State] | None
) -> list[bytes | BadImage]:
    """What each reference into one file names; one that is wrong takes no other with it."""
    with ExitStack() as opened:
        source: pa.NativeFile | None = None

        def read(reference: Reference) -> bytes:
            nonlocal source
            if reference.column is not None:
                assert state is not None
                return _value(file, state.result(), reference)
            if source is None:
                source = opened.enter_context(_open(file))
            return _range(source, reference) if reference.offset is not None else _whole(source, file)

        return [_or_bad(file, read, reference) for _, reference in wanted]


def _or_bad(file: str, read: Callable[[Reference], bytes], reference: Reference) -> bytes | BadImage:
    try:
        return read(reference)
    except BadImage as error:
        return error
    except FileNotFoundError:
        return BadImage("missing", file)
    # A reference is text from outside and may name anything: it must not end an encoding job.
    except Exception as error:
        return BadImage("unreadable", f"{file}: {error}")


def _open(file: str) -> pa.NativeFile:
    filesystem, path = storage.resolve(file)
    if isinstance(filesystem, fs.LocalFileSystem):
        return pa.OSFile(path, "rb")
    return filesystem.open_input_file(path)


def _whole(source: pa.NativeFile, file: str) -> bytes:
    return source.read_at(_bounded(file, source.size()), 0)


def _range(source: pa.NativeFile, reference: Reference) -> bytes:
    assert reference.offset is not None
    data = source.read_at(_bounded(reference.file, reference.size), reference.offset)
    if len(data) < reference.size:
        raise BadImage("truncated", f"{reference.file} ends before byte {reference.offset + reference.size}")
    if reference.raw is None:
        return data
    channels, height, width = reference.raw
    planes = np.frombuffer(data, dtype=np.uint8).reshape(channels, height, width)
    return b"P6 %d %d 255\n" % (width, height) + planes.transpose(1, 2, 0).tobytes()  # a PPM picture


def _bounded(file: str, size: int) -> int:
    if size > MAX_BYTES:
        raise BadImage("too_large", f"{size:,} bytes of {file}, at most {MAX_BYTES:,} are read")
    return size


class _ColumnCache:
    """The row groups read last: neighbours in a manifest are neighbours in a Parquet file."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._columns: OrderedDict[tuple, pa.ChunkedArray] = OrderedDict()
        self._reading: dict[tuple, Lock] = {}

    def get(self, file: str, state: State, column: str, group: int) -> pa.ChunkedArray:
        key = (file, state, column, group)
        with self._lock:
            reading = self._reading.setdefault(key, Lock())
        with reading:  # eight threads want the same row group, one reads it
            try:
                found = self._columns.get(key)
                found = _read_column(file, column, group) if found is None else found
                self._keep(key, found)
                return found
            finally:
                with self._lock:
                    self._reading.pop(key, None)

    def _keep(self, key: tuple, column: pa.ChunkedArray) -> None:
        """Puts it last, and lets the first ones go where they are too large together."""
        with self._lock:
            self._columns[key] = column
            self._columns.move_to_end(key)
            while len(self._columns) > 1 and sum(c.nbytes for c in self._columns.values()) > CACHE_BYTES:
                self._columns.popitem(last=False)


def _read_column(file: str, column: str, group: int) -> pa.ChunkedArray:
    filesystem, path = storage.resolve(file)
    with filesystem.open_input_file(path) as source:
        values = pq.ParquetFile(source).read_row_group(group, columns=[column])
    if values.num_columns == 0:
        raise pa.ArrowKeyError(f"there is no column {column!r}")
    array = values.column(0)
    if pa.types.is_struct(array.type):  # "image.bytes" reads as a struct with the one field
        return pa.chunked_array([chunk.field(0) for chunk in array.chunks])
    return array


_cache = _ColumnCache()


def _value(file: str, state: State, reference: Reference) -> bytes:
    assert reference.column is not None
    column = _cache.get(file, state, reference.column, reference.group)
    if reference.row >= len(column):
        raise BadImage("missing", f"{file} has no row {reference.row} in row group {reference.group}")
    data = column[reference.row].as_py()
    if data is None:
        raise BadImage("missing", f"{file}: row {reference.row} is null")
    if not isinstance(data, bytes):
        raise BadImage("unreadable", f"{file}: column {reference.column!r} holds {column.type}, not bytes")
    return data
