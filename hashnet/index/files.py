"""RUN/index/ on disk: one small index.json that names everything else, swapped whole.

    index.json               kind, version, n_bits, options, lineage, and per segment its files with
                             size and sha256: what a reader trusts
    index-000001.faiss       a plain FAISS file (``faiss.read_index_binary`` opens it, ids included)
    labels-000001.parquet    (label, row) pairs, where the codes have labels
    removed-000003-0.npy     positions of removed rows of segment 0 as of version 3

A commit writes new files beside the old ones, then swaps index.json: a crash leaves the old version
whole, and a reader gets one version or the other. The files of the version before stay for readers
that are still opening them; older ones are removed. One writer at a time (a lock on local disks).
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import faiss
import numpy as np

from hashnet import storage
from hashnet.codes import check_n_bits
from hashnet.errors import FormatError, HashnetError, StorageError
from hashnet.index.kinds import IvfOptions, Options, parse_options
from hashnet.index.postings import Postings
from hashnet.index.rows import Rows
from hashnet.index.segment import Segment
from hashnet.index.state import State

ABOUT = "index.json"
FORMAT_VERSION = 1
ANY_SIZE = 1 << 62  # stored options are final, however few rows are left
MAP_FLAGS = {"flat": faiss.IO_FLAG_MMAP_IFC, "ivf": faiss.IO_FLAG_MMAP}  # the kinds FAISS can map


def read_about(uri: str) -> dict[str, Any]:
    """index.json, checked to be ours."""
    where = storage.join(uri, ABOUT)
    if not storage.exists(where):
        raise StorageError(f"{uri} holds no index (no {ABOUT}); build one with jobs/build_index.py")
    return storage.check_format(storage.read_json(where), where, "index", FORMAT_VERSION)


def disk_version(uri: str) -> int:
    """The version that lies at ``uri``, by reading one small file; 0 where there is no index yet."""
    if not storage.exists(storage.join(uri, ABOUT)):
        return 0
    return _whole(read_about(uri), "version", uri)


def stored_bytes(uri: str) -> int:
    """Bytes of the files of the version at ``uri``; what older readers may still need is not counted."""
    sizes, records = storage.list_sizes(uri), read_about(uri)["segments"]
    return sizes[ABOUT] + sum(sizes[name] for name in _files(records))


def write_state(uri: str, state: State) -> State:
    """Commits a state: new files first, then index.json. Returns it with the segments' records."""
    before = read_about(uri)["segments"] if disk_version(uri) else []
    storage.make_folder(uri)
    segments = []
    for number, segment in enumerate(state.segments):
        record = dict(segment.record) if segment.record else _write_rows(uri, segment, state.version, number)
        if len(segment.dead) and (record["removed"] or {}).get("rows") != len(segment.dead):
            record["removed"] = _write_dead(uri, segment, state.version, number)
        segments.append(dataclasses.replace(segment, record=record))
    about = {
        "kind": "index",
        "format_version": FORMAT_VERSION,
        "index_kind": state.kind,
        "n_bits": state.n_bits,
        "n_classes": state.n_classes,
        "version": state.version,
        "rows": state.n_live,
        "updates": state.updates,
        "options": dataclasses.asdict(state.options),
        "tuned": state.tuned,
        "lineage": state.lineage,
        "segments": [segment.record for segment in segments],
    }
    storage.write_json(storage.join(uri, ABOUT), about)
    _remove_old(uri, before + [segment.record or {} for segment in segments])
    return dataclasses.replace(state, segments=tuple(segments))


def read_state(uri: str, *, mmap: bool = True, verify: bool = True, known: tuple[Segment, ...] = ()) -> State:
    """The state at ``uri``. ``known`` segments that it still has are taken over, not read again."""
    for attempt in range(3):
        about = read_about(uri)
        try:
            return _open_state(uri, about, mmap, verify, known)
        except (StorageError, FormatError):
            # a writer may have moved on and removed files while we were opening them
            if attempt == 2 or disk_version(uri) == about.get("version"):
                raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"{uri}/{ABOUT} is damaged ({type(error).__name__}: {error})") from error
    raise AssertionError("unreachable")


@contextmanager
def writer_lock(uri: str) -> Iterator[None]:
    """Held while one process commits; on an object store there is none, and one writer is a duty."""
    if not storage.is_local(uri):
        yield
        return
    storage.make_folder(uri)
    path = os.path.join(storage.resolve(uri)[1], ".lock")
    try:
        lock = open(path, "a")  # noqa: SIM115 - closed below; closing lets go of the lock
    except OSError as error:
        raise StorageError(f"cannot write to {uri}: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_rows(uri: str, segment: Segment, version: int, number: int) -> dict[str, Any]:
    name = f"{version:06d}" + (f"-{number}" if number else "")
    rows = segment.rows
    record: dict[str, Any] = {"kind": rows.kind, "rows": len(rows), "labels": None, "removed": None}
    record |= _write_faiss(uri, f"index-{name}.faiss", rows.index)
    if rows.postings is not None:
        file = f"labels-{name}.parquet"
        rows.postings.write(storage.join(uri, file))
        record["labels"] = {"file": file, "sha256": storage.sha256_of(storage.join(uri, file))}
    return record


def _write_faiss(uri: str, file: str, index: Any) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with storage.open_output(storage.join(uri, file)) as sink:

        def write(data: bytes) -> int:
            nonlocal size
            digest.update(data)
            size += len(data)
            sink.write(data)
            return len(data)

        faiss.write_index_binary(index, faiss.PyCallbackIOWriter(write, 8 << 20))
    return {"file": file, "bytes": size, "sha256": digest.hexdigest()}


def _write_dead(uri: str, segment: Segment, version: int, number: int) -> dict[str, Any]:
    file = f"removed-{version:06d}-{number}.npy"
    data = io.BytesIO()
    np.save(data, segment.dead, allow_pickle=False)
    storage.write_bytes(storage.join(uri, file), data.getvalue())
    return {"file": file, "sha256": hashlib.sha256(data.getvalue()).hexdigest(), "rows": len(segment.dead)}


def _files(records: list[dict[str, Any]]) -> set[str]:
    parts = [part for record in records for part in (record, record["labels"], record["removed"])]
    return {part["file"] for part in parts if part}


def _remove_old(uri: str, records: list[dict[str, Any]]) -> None:
    """Removes what neither this version nor the one before names, and leftovers of killed writers."""
    needed = _files(records)
    for name in storage.list_names(uri):
        ours = name.startswith(("index-", "labels-", "removed-")) or storage.TMP_MARK in name
        if ours and name not in needed:
            storage.delete(storage.join(uri, name))


def _open_state(
    uri: str, about: dict[str, Any], mmap: bool, verify: bool, known: tuple[Segment, ...]
) -> State:
    n_bits = check_n_bits(_whole(about, "n_bits", uri))
    kind, n_classes = about["index_kind"], about["n_classes"]
    records = about["segments"]
    n_rows = _whole(about, "rows", uri)
    try:
        options = parse_options(kind, dict(about["options"]), n_bits, ANY_SIZE)
    except HashnetError as error:
        raise FormatError(f"{uri}/{ABOUT} is damaged: {error}") from error
    if n_classes is not None:
        _whole(about, "n_classes", uri)
    by_file = {segment.record["sha256"]: segment for segment in known if segment.record}
    segments = []
    for record in records:
        segment_options = (
            options if record["kind"] == kind else parse_options(record["kind"], {}, n_bits, ANY_SIZE)
        )
        held = by_file.get(record["sha256"])
        if held is not None and held.record == record:
            segments.append(dataclasses.replace(held, options=segment_options))
            continue
        if held is not None:
            rows = held.rows
        else:
            rows = _open_rows(uri, record, n_bits, n_classes, segment_options, mmap, verify)
        dead = _read_dead(uri, record, len(rows), verify)
        segments.append(Segment(rows, segment_options, dead, record))
    state = State(
        kind=kind,
        n_bits=n_bits,
        options=options,
        n_classes=n_classes,
        lineage=dict(about["lineage"]),
        segments=tuple(segments),
        version=_whole(about, "version", uri),
        updates=_whole(about, "updates", uri),
        tuned=about["tuned"],
    )
    if state.n_live != n_rows:
        raise FormatError(f"{uri}/{ABOUT} says {n_rows} rows, its segments hold {state.n_live}")
    return state


def _open_rows(
    uri: str,
    record: dict[str, Any],
    n_bits: int,
    n_classes: int | None,
    options: Options,
    mmap: bool,
    verify: bool,
) -> Rows:
    where = storage.join(uri, _plain_name(record["file"], uri))
    found = storage.size_of(where) if storage.exists(where) else None
    if found is None:
        raise FormatError(f"{where} is missing; build the index again")
    if found != record["bytes"]:
        raise FormatError(
            f"{where} has {found} bytes, {ABOUT} says {record['bytes']}: it is truncated or changed"
        )
    flags = MAP_FLAGS.get(record["kind"], 0) if mmap else 0
    with storage.local_copy(where) as path:  # a map keeps the bytes alive when a copy is deleted
        if verify:
            _check_sha256(str(path), where, record["sha256"])
        try:
            index = faiss.read_index_binary(str(path), flags)
        except RuntimeError as error:
            raise FormatError(f"{where} is not an index FAISS can read: {error}") from error
    rows = Rows(index, record["kind"], _read_postings(uri, record, n_classes, verify), mapped=bool(flags))
    if rows.n_bits != n_bits or len(rows) != record["rows"]:
        raise FormatError(
            f"{where} holds {len(rows)} codes of {rows.n_bits} bits, {ABOUT} says "
            f"{record['rows']} of {n_bits}"
        )
    rows.check()
    if isinstance(options, IvfOptions):
        if int(rows.inner.nlist) != options.nlist:
            raise FormatError(f"{where} has {rows.inner.nlist} lists, {ABOUT} says {options.nlist}")
        rows.inner.nprobe = options.nprobe
    return rows


def _read_postings(uri: str, record: dict[str, Any], n_classes: int | None, verify: bool) -> Postings | None:
    if record["labels"] is None or n_classes is None:
        return None
    where = storage.join(uri, _plain_name(record["labels"]["file"], uri))
    if verify:
        _check_sha256(where, where, record["labels"]["sha256"])
    return Postings.read(where, record["rows"], n_classes)


def _read_dead(uri: str, record: dict[str, Any], n: int, verify: bool) -> np.ndarray:
    if record["removed"] is None:
        return np.empty(0, dtype=np.int64)
    where = storage.join(uri, _plain_name(record["removed"]["file"], uri))
    data = storage.read_bytes(where)
    if verify and hashlib.sha256(data).hexdigest() != record["removed"]["sha256"]:
        raise FormatError(f"{where} was changed: its sha256 is not the one {ABOUT} says")
    dead = np.load(io.BytesIO(data), allow_pickle=False)
    if dead.dtype != np.int64 or dead.ndim != 1 or (len(dead) and not 0 <= dead[0] <= dead[-1] < n):
        raise FormatError(f"{where} does not hold positions of removed rows")
    return dead


def _check_sha256(path: str, shown: str, expected: str) -> None:
    found = storage.sha256_of(path)
    if found != expected:
        raise FormatError(
            f"{shown} was changed: its sha256 is {found[:12]}…, {ABOUT} says {str(expected)[:12]}…; "
            "build the index again"
        )


def _plain_name(name: Any, uri: str) -> str:
    """A file beside index.json and nothing else, whatever index.json says."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise FormatError(f"{uri}/{ABOUT} names the file {name!r}, which is not one of its own")
    return name


def _whole(about: dict[str, Any], name: str, uri: str) -> int:
    value = about.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"{uri}/{ABOUT} has {name} = {value!r}; it is damaged")
    return value
