"""changes-000007.log: what was added and removed since the segments were written, one record per version.

A small update is one append and one flush of the disk; segments are written once the log has grown (see
``files``). ``index.json`` names its log. A reader opens the segments and applies the log to them; one that
is open already applies what was appended since.

    mark     up to where records were acknowledged, at the least
    record   header (fixed size, with its own crc32) · sha256 · payload
    sha256   of the record before it, the header and the payload: records cannot be exchanged

A record beyond the mark that ends early was being appended when its writer died: it was never
acknowledged, so it does not count, and the next append replaces it. With any other difference the log is
refused. The mark is moved once a record is on the disk and gets there with the next one: a process that dies
loses nothing of it, and after a power failure it is older than the records, never newer.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hashnet.errors import FormatError, StorageError
from hashnet.io import storage

_MARK = struct.Struct("<8sQ")  # magic, offset; a crc32 follows
_MARKED = b"hashnetL"
_HEADER = struct.Struct("<4sHIQQQ")  # magic, number of changes, payload bytes, version, rows, updates
_RECORD = b"HNCH"
_CRC = struct.Struct("<I")
_CHANGE = struct.Struct("<cIIII")  # kind, rows, bytes per code, label pairs, bytes of columns
_WIDTH = struct.Struct("<I")  # of vectors
_PREFIX = _HEADER.size + _CRC.size + 32
_FIRST = _MARK.size + _CRC.size  # where the first record begins
_NO_LABELS = (1 << 32) - 1


@dataclass(frozen=True)
class CodeBlock:
    """Rows to add: ids int64 (n,), codes uint8 (n, n_bits // 8), (label, row) pairs, columns, vectors."""

    ids: np.ndarray
    codes: np.ndarray
    labels: np.ndarray | None = None
    label_rows: np.ndarray | None = None
    columns: pa.Table | None = None
    vectors: np.ndarray | None = None  # float32 (n, width), where the index has vectors for rescoring


@dataclass(frozen=True)
class RemovedIds:
    """Items to remove: ids int64 (n,)."""

    ids: np.ndarray


Change = CodeBlock | RemovedIds


@dataclass(frozen=True)
class LogEnd:
    """Up to where a log was read or written; ``sha256`` is that of the last record."""

    file: str
    offset: int = _FIRST
    sha256: bytes = bytes(32)


@dataclass(frozen=True)
class Record:
    """One version: the changes that made it, and what the index was after them."""

    version: int
    rows: int
    updates: int
    changes: tuple[Change, ...] = ()


def append(uri: str, end: LogEnd, record: Record) -> LogEnd:
    """Appends a record and flushes it to the disk; StorageError, with nothing appended, where that fails.

    Only the holder of the writer's lock may call it. What a writer that died left after ``end`` is replaced.
    """
    payload = b"".join(_encode(change) for change in record.changes)
    fields = _HEADER.pack(
        _RECORD, len(record.changes), len(payload), record.version, record.rows, record.updates
    )
    digest = hashlib.sha256(end.sha256 + fields + payload).digest()
    data = fields + _CRC.pack(zlib.crc32(fields)) + digest + payload
    path = storage.resolve(storage.join(uri, end.file))[1]
    try:
        log = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(log, end.offset)
            try:
                _write(log, data, end.offset)
                os.fdatasync(log)
            except OSError:
                os.ftruncate(log, end.offset)
                raise
            os.pwrite(log, _mark(end.offset + len(data)), 0)
        finally:
            os.close(log)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    return LogEnd(end.file, end.offset + len(data), digest)


def end_of(uri: str, file: str) -> int:
    """Bytes of a log. It is opened for that: a network file system may else know an earlier size."""
    try:
        with open(storage.resolve(storage.join(uri, file))[1], "rb") as log:
            return log.seek(0, os.SEEK_END)
    except OSError as error:
        raise StorageError(f"cannot read {uri}/{file}: {error}") from error


def size_of(change: Change) -> int:
    """About how many bytes a change takes in a log."""
    if isinstance(change, RemovedIds):
        return change.ids.nbytes
    labels = 0 if change.labels is None else 12 * len(change.labels)
    columns = 0 if change.columns is None else change.columns.nbytes
    vectors = 0 if change.vectors is None else change.vectors.nbytes
    return change.ids.nbytes + change.codes.nbytes + labels + columns + vectors


def create(uri: str, file: str) -> LogEnd:
    """An empty log; it counts once index.json names it."""
    storage.write_bytes(storage.join(uri, file), _mark(_FIRST))
    return LogEnd(file)


def _mark(offset: int) -> bytes:
    fields = _MARK.pack(_MARKED, offset)
    return fields + _CRC.pack(zlib.crc32(fields))


def read(uri: str, end: LogEnd) -> Iterator[tuple[Record, LogEnd]]:
    """The complete records after ``end``; FormatError where one is damaged or follows other records."""
    where = storage.join(uri, end.file)
    for (fields, digest, payload), after in _scan(where, end):
        if hashlib.sha256(end.sha256 + fields + payload).digest() != digest:
            raise FormatError(f"{where} is damaged at byte {end.offset}: its sha256 does not fit its content")
        _, n_changes, _, version, rows, updates = _HEADER.unpack(fields)
        yield Record(version, rows, updates, tuple(_decode(payload, n_changes, where))), after
        end = after


def last(uri: str, file: str) -> Record | None:
    """The last version in a log without its changes; None where it has none."""
    found = None
    for (fields, _, _), _ in _scan(storage.join(uri, file), LogEnd(file)):
        found = fields
    return None if found is None else Record(*_HEADER.unpack(found)[3:])


def _scan(where: str, end: LogEnd) -> Iterator[tuple[tuple[bytes, bytes, memoryview], LogEnd]]:
    """(header, sha256, payload) of every complete record after ``end``, and where it ends."""
    path = storage.resolve(where)[1]
    try:
        with open(path, "rb") as file:
            mark = file.read(_FIRST)  # first: records are there before the mark moves
            file.seek(end.offset)
            data = memoryview(file.read())
    except FileNotFoundError as error:
        raise FormatError(f"{where} is missing: the changes in it are lost; restore it") from error
    except OSError as error:
        raise StorageError(f"cannot read {where}: {error}") from error
    fields = mark[: _MARK.size]
    if len(mark) < _FIRST or mark[_MARK.size :] != _CRC.pack(zlib.crc32(fields)) or fields[:8] != _MARKED:
        raise FormatError(f"{where} is damaged: it does not begin as a log of changes")
    (_, acknowledged) = _MARK.unpack(fields)
    if end.offset + len(data) < acknowledged:
        raise FormatError(
            f"{where} is damaged: it has {end.offset + len(data)} bytes, {acknowledged} were acknowledged"
        )
    at = 0
    while len(data) - at >= _PREFIX:
        fields = bytes(data[at : at + _HEADER.size])
        (crc,) = _CRC.unpack_from(data, at + _HEADER.size)
        magic, _, size, *_ = _HEADER.unpack(fields)
        if magic != _RECORD or crc != zlib.crc32(fields):
            raise FormatError(f"{where} is damaged at byte {end.offset + at}: no record begins there")
        if len(data) - at < _PREFIX + size:
            break
        digest = bytes(data[at + _PREFIX - 32 : at + _PREFIX])
        payload = data[at + _PREFIX : at + _PREFIX + size]
        at += _PREFIX + size
        yield (fields, digest, payload), LogEnd(end.file, end.offset + at, digest)
    if end.offset + at < acknowledged:
        raise FormatError(f"{where} is damaged at byte {end.offset + at}: a record is cut short")


def joined(changes: list[Change]) -> Iterator[Change]:
    """The same changes with neighbouring additions as one, which is applied as fast as each of them."""
    blocks: list[CodeBlock] = []
    for change in [*changes, None]:
        if isinstance(change, CodeBlock) and (not blocks or _fit(blocks[0], change)):
            blocks.append(change)
            continue
        if blocks:
            yield _join(blocks)
        blocks = [change] if isinstance(change, CodeBlock) else []
        if isinstance(change, RemovedIds):
            yield change


def _fit(a: CodeBlock, b: CodeBlock) -> bool:
    further = ((a.labels, b.labels), (a.columns, b.columns), (a.vectors, b.vectors))
    return all((one is None) == (other is None) for one, other in further)


def _join(blocks: list[CodeBlock]) -> CodeBlock:
    if len(blocks) == 1:
        return blocks[0]
    first, starts = blocks[0], np.cumsum([0, *(len(block.ids) for block in blocks)])
    labels = label_rows = columns = None
    if first.labels is not None:
        labels = np.concatenate([block.labels for block in blocks])  # type: ignore[misc]
        label_rows = np.concatenate([b.label_rows + s for b, s in zip(blocks, starts, strict=False)])  # type: ignore[operator]
    if first.columns is not None:
        columns = pa.concat_tables([block.columns for block in blocks])
    ids, codes = (np.concatenate(parts) for parts in zip(*((b.ids, b.codes) for b in blocks), strict=True))
    vectors = None if first.vectors is None else np.concatenate([b.vectors for b in blocks])  # type: ignore[misc]
    return CodeBlock(ids, codes, labels, label_rows, columns, vectors)


def _encode(change: Change) -> bytes:
    if isinstance(change, RemovedIds):
        return _CHANGE.pack(b"R", len(change.ids), 0, _NO_LABELS, 0) + _bytes(change.ids, np.int64)
    columns = b"" if change.columns is None else _table_bytes(change.columns)
    pairs, n_pairs = b"", _NO_LABELS
    if change.labels is not None and change.label_rows is not None:
        n_pairs = len(change.labels)
        pairs = _bytes(change.labels, np.int32) + _bytes(change.label_rows, np.int64)
    kind, vectors = b"A", b""
    if change.vectors is not None:  # their width comes first
        kind = b"V"
        vectors = _WIDTH.pack(change.vectors.shape[1]) + _bytes(change.vectors, np.float32)
    head = _CHANGE.pack(kind, len(change.ids), change.codes.shape[1], n_pairs, len(columns))
    rows = [_bytes(change.ids, np.int64), _bytes(change.codes, np.uint8)]
    return b"".join([head, *rows, pairs, columns, vectors])


def _decode(payload: memoryview, n: int, where: str) -> Iterator[Change]:
    at = 0

    def take(dtype: type, count: int) -> np.ndarray:
        nonlocal at
        values: np.ndarray = np.frombuffer(payload, dtype=dtype, count=count, offset=at)
        at += values.nbytes
        return values

    for _ in range(n):
        kind, rows, width, n_pairs, n_columns = _CHANGE.unpack_from(payload, at)
        at += _CHANGE.size
        ids = take(np.int64, rows)
        if kind == b"R":
            yield RemovedIds(ids)
            continue
        if kind not in (b"A", b"V"):
            raise FormatError(f"{where} holds a change of kind {kind!r}, which this version does not know")
        codes = take(np.uint8, rows * width).reshape(rows, width)
        labels = label_rows = columns = None
        if n_pairs != _NO_LABELS:
            labels, label_rows = take(np.int32, n_pairs), take(np.int64, n_pairs)
        if n_columns:
            # a copy, because Arrow wants buffers at multiples of 8 bytes, and in the log they lie anywhere
            columns = pa.ipc.open_stream(bytes(payload[at : at + n_columns])).read_all()
            at += n_columns
        vectors = None
        if kind == b"V":
            (width,) = _WIDTH.unpack_from(payload, at)
            at += _WIDTH.size
            vectors = take(np.float32, rows * width).reshape(rows, width)
        yield CodeBlock(ids, codes, labels, label_rows, columns, vectors)


def _bytes(values: np.ndarray, dtype: type) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def _table_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _write(log: int, data: bytes, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(log, data[written:], offset + written)
