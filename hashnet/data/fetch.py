"""Rows of a manifest → the bytes of their pictures, wherever these are stored.

for table in manifest.batches("database"):
    pictures = fetch_images(table)              # bytes, or a BadImage where there are none
    pixels, bad = preprocess.eval_many(pictures)

The ``uri`` of a row is one of

    /data/cat.jpg, s3://bucket/cat.jpg              a file
    …/shard-0001.tar#offset=1536&size=20480         bytes inside a file: a tar member in one ranged read
    …/data_batch_1.bin#offset=1&size=3072&raw=3x32x32   the same, holding bare pixels (planes of R, G, B)
    …/pictures.parquet#column=image.bytes&group=2&row=17    a value of a Parquet file

The text after ``#`` counts only when it has one of these forms, so a file name may contain a ``#``.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition, Event, Lock, Thread, current_thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from hashnet.errors import BadImage, StorageError
from hashnet.io import storage

READ_TIMEOUT_S = 60.0  # for the references of one job; longer means that storage hangs
OUT_OF_REACH = "NETWORK_CONNECTION"  # in Arrow's message: no connection to the storage
TRIES = 2  # of a picture that was not read in time, though the storage answers
THREADS = 8  # reads in flight: they wait for disks and networks, not for processors
MAX_BYTES = 512 << 20  # of one file: more than any picture that is decoded has, even uncompressed
CACHE_BYTES = 256 << 20  # of Parquet columns already decoded
State = tuple[int, int]  # of a file: size and modification time
_RANGE = re.compile(r"offset=(\d+)&size=(\d+)(?:&raw=(\d+)x(\d+)x(\d+))?")
_VALUE = re.compile(r"column=(.+)&group=(\d+)&row=(\d+)")


@dataclass(frozen=True)
class Reference:
    """Where a picture is: a whole file, a range of its bytes, or a value of a Parquet file."""

    file: str
    offset: int | None = None
    size: int = 0
    raw: tuple[int, int, int] | None = None  # channels, height, width of bare pixels
    column: str | None = None
    group: int = 0
    row: int = 0


Found = bytes | BadImage | StorageError

# A file, the references into it with their row, and what asks for its state.
_Job = tuple[str, list[tuple[int, Reference]], Callable[[], State]]


def parse_reference(uri: str) -> Reference:
    """The reference that a uri stands for."""
    file, mark, fragment = uri.rpartition("#")
    if mark:
        if found := _RANGE.fullmatch(fragment):
            offset, size, *shape = found.groups()
            raw = tuple(int(n) for n in shape) if shape[0] else None
            return Reference(file, offset=int(offset), size=int(size), raw=raw)  # type: ignore[arg-type]
        if found := _VALUE.fullmatch(fragment):
            return Reference(file, column=found[1], group=int(found[2]), row=int(found[3]))
    return Reference(uri)


def byte_range_uris(file: str, offsets: Any, size: Any, raw: str = "") -> pa.Array:
    """Uris (n,) of byte ranges inside a file, one per offset; ``size`` is one number or (n,)."""
    start = pc.cast(pa.array(offsets, pa.int64()), pa.string())
    sizes = (
        pa.array(size, pa.int64()) if hasattr(size, "__len__") else pa.array([size] * len(start), pa.int64())
    )
    tail = f"&raw={raw}" if raw else ""
    return pc.binary_join_element_wise(
        f"{file}#offset=", start, "&size=", pc.cast(sizes, pa.string()), tail, ""
    )


def parquet_value_uris(file: str, column: str, group: int, n: int) -> pa.Array:
    """Uris (n,) of the values 0..n-1 of a row group."""
    rows = pc.cast(pa.array(range(n), pa.int64()), pa.string())
    return pc.binary_join_element_wise(f"{file}#column={column}&group={group}&row=", rows, "")


def fetch_images(
    table: pa.Table, base_uri: str | None = None, threads: int = THREADS
) -> list[bytes | BadImage]:
    """The encoded picture of each row, in order; a BadImage where a picture is missing or unreadable.

    StorageError where the storage is out of reach: that says nothing about a picture.

    ``table`` has the column ``uri``, or ``image`` (bytes inside the manifest), or both. Relative paths
    start from ``base_uri``.
    """
    n = len(table)
    out: list[Found] = [BadImage("missing", "neither image nor uri")] * n
    inline = table["image"].to_pylist() if "image" in table.column_names else [None] * n
    uris = table["uri"].to_pylist() if "uri" in table.column_names else [None] * n
    by_file: dict[str, list[tuple[int, Reference]]] = defaultdict(list)
    for i, (image, uri) in enumerate(zip(inline, uris, strict=True)):
        if image is not None:
            out[i] = image
        elif uri:
            reference = parse_reference(uri)
            by_file[_absolute(reference.file, base_uri)].append((i, reference))

    for _ in range(TRIES):
        _Readers(out, _jobs(by_file, threads)).run(threads)
        by_file = {f: [(i, ref) for i, ref in found if _timed_out(out[i])] for f, found in by_file.items()}
        stuck = next((file for file, found in by_file.items() if found), None)
        if stuck is None:
            break
        if not _answers(stuck):
            seconds = f"{READ_TIMEOUT_S:g} s"
            raise StorageError(f"cannot read {stuck}: no answer within {seconds} ({OUT_OF_REACH})")
    return [_or_raise(found) for found in out]


def _jobs(by_file: dict[str, list[tuple[int, Reference]]], threads: int) -> list[_Job]:
    """One job per file; but the row groups of a Parquet file and the many members of a tar are read side by
    side."""
    jobs: list[_Job] = []
    for file, found in by_file.items():
        groups: dict[int, list[tuple[int, Reference]]] = defaultdict(list)
        for k, (i, reference) in enumerate(found):
            groups[k % threads if reference.column is None else reference.group].append((i, reference))
        state = _state_once(file)
        jobs += [(file, group, state) for group in groups.values()]
    return jobs


def _timed_out(found: Found) -> bool:
    return isinstance(found, BadImage) and found.reason == "timeout"


def _answers(file: str) -> bool:
    """Whether the storage that holds a file says anything in time, be it a refusal; a local disk always does.

    If it does not, a read that was stuck says nothing about the picture.
    """
    filesystem, path = storage.resolve(file)
    if isinstance(filesystem, fs.LocalFileSystem):
        return True
    answered = Event()

    def ask() -> None:
        try:
            filesystem.get_file_info(path.partition("/")[0])  # the bucket
        except Exception as error:
            if OUT_OF_REACH in str(error):
                return
        answered.set()

    Thread(target=ask, name="fetch", daemon=True).start()
    return answered.wait(READ_TIMEOUT_S)


def _or_raise(found: Found) -> bytes | BadImage:
    if isinstance(found, StorageError):
        raise found
    return found


class _Readers:
    """Threads that read jobs into ``out``. A stuck read becomes a BadImage and its thread is abandoned.

    Storage may hang without end: a network mount whose server is gone, a disk about to fail. The threads are
    daemons, so that a stuck one does not keep the process from exiting.
    """

    def __init__(self, out: list[Found], jobs: list[_Job]) -> None:
        self.out, self.waiting = out, deque(jobs)
        self.changed = Condition()
        self.reading: dict[Thread, tuple[float, _Job]] = {}  # what each thread is reading, and since when

    def run(self, threads: int) -> None:
        with self.changed:
            self._start(threads)
            while self.reading:
                self.changed.wait(timeout=READ_TIMEOUT_S / 4)
                self._give_up_stuck()

    def _start(self, n: int) -> None:
        for _ in range(min(n, len(self.waiting))):
            thread = Thread(target=self._work, name="fetch", daemon=True)
            self.reading[thread] = (time.monotonic(), self.waiting.popleft())
            thread.start()

    def _give_up_stuck(self) -> None:
        now = time.monotonic()
        for thread, (since, (file, references, _)) in list(self.reading.items()):
            if now - since > READ_TIMEOUT_S:
                del self.reading[thread]
                for i, _ in references:
                    self.out[i] = BadImage("timeout", f"{file} was not read within {READ_TIMEOUT_S:g} s")
                self._start(1)

    def _work(self) -> None:
        me = current_thread()
        while True:
            with self.changed:
                if me not in self.reading:  # given up
                    return
                job = self.reading[me][1]
            found = _read(*job)
            with self.changed:
                if me not in self.reading:
                    return
                for (i, _), data in zip(job[1], found, strict=True):
                    self.out[i] = data
                if not self.waiting:
                    del self.reading[me]
                    self.changed.notify()
                    return
                self.reading[me] = (time.monotonic(), self.waiting.popleft())


def describe_bad(names: Sequence[str], bad: Iterable[BadImage], n_images: int) -> str:
    """One sentence: how many pictures are bad, for which reasons, and the first few names."""
    reasons = Counter(error.reason for error in bad)
    listed = ", ".join(f"{n:,} {reason}" for reason, n in reasons.most_common())
    more = ", …" if len(names) > 5 else ""
    first = ", ".join(names[:5])
    return f"{reasons.total():,} of {n_images:,} pictures cannot be used ({listed}): {first}{more}"


def too_many_bad(bad: int, rows: int, most: float) -> bool:
    """Whether ``bad`` of ``rows`` rows are more than the fraction ``most``.

    A single bad row among others is never too many, unless ``most`` is 0.
    """
    return bad > most * rows and (bad > 1 or most == 0 or rows == 1)


def _absolute(file: str, base_uri: str | None) -> str:
    if base_uri is None or storage.is_uri(file) or file.startswith("/"):
        return file
    return storage.join(base_uri, file)


def _state(file: str) -> State:
    """Size and modification time of a file: they change when it is replaced."""
    filesystem, path = storage.resolve(file)
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(file)
    if info.type != fs.FileType.File:
        raise BadImage("unreadable", f"{file} is not a regular file")
    return info.size, info.mtime_ns


def _state_once(file: str) -> Callable[[], State]:
    """A function that asks for the state of a file on its first call, whichever thread makes it."""
    lock, found = Lock(), list[State]()

    def state() -> State:
        with lock:
            if not found:
                found.append(_state(file))
            return found[0]

    return state


def _read(file: str, references: list[tuple[int, Reference]], state: Callable[[], State]) -> list[Found]:
    """The bytes of each reference into one file; a wrong one does not affect the others."""
    with ExitStack() as opened:
        source: pa.NativeFile | None = None

        def read(reference: Reference) -> bytes:
            nonlocal source
            if reference.column is not None:
                return _value(file, state(), reference)
            if source is None:
                source = opened.enter_context(_open(file))
            return _range(source, reference) if reference.offset is not None else _whole(source, file)

        return [_or_bad(file, read, reference) for _, reference in references]


def _or_bad(file: str, read: Callable[[Reference], bytes], reference: Reference) -> Found:
    try:
        return read(reference)
    except BadImage as error:
        return error
    except FileNotFoundError:
        return BadImage("missing", file)
    # A reference is outside input and may name anything: it must not end an encoding job.
    except Exception as error:
        if OUT_OF_REACH in str(error):
            return StorageError(f"cannot read {file}: {error}")
        return BadImage("unreadable", f"{file}: {error}")


def _open(file: str) -> pa.NativeFile:
    filesystem, path = storage.resolve(file)
    if isinstance(filesystem, fs.LocalFileSystem):
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO blocks until something writes to it
            raise BadImage("unreadable", f"{file} is not a regular file")
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
    """The row groups read most recently: neighbours in a manifest are neighbours in a Parquet file."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._columns: OrderedDict[tuple, pa.ChunkedArray] = OrderedDict()
        self._reading: dict[tuple, Lock] = {}

    def get(self, file: str, state: State, column: str, group: int) -> pa.ChunkedArray:
        key = (file, state, column, group)
        with self._lock:
            reading = self._reading.setdefault(key, Lock())
        with reading:  # where eight threads need the same row group, one reads it
            try:
                found = self._columns.get(key)
                found = _read_column(file, column, group) if found is None else found
                self._store(key, found)
                return found
            finally:
                with self._lock:
                    self._reading.pop(key, None)

    def _store(self, key: tuple, column: pa.ChunkedArray) -> None:
        """Makes ``column`` the most recent one, and drops the oldest beyond CACHE_BYTES."""
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
