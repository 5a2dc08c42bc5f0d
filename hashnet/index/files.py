"""RUN/index/ on disk: one small index.json that names everything else, swapped whole.

    index.json               kind, version, n_bits, options, lineage, and per segment its files with
                             size and sha256: what a reader trusts, since its own sha256 is in it, too
    index-000001.faiss       a plain FAISS file (``faiss.read_index_binary`` opens it, ids included)
    labels-000001.parquet    (label, row) pairs, where the codes have labels
    columns-000001.arrow     the items' columns in id order, where they have any: Arrow IPC, memory-mapped
    features-000002.parquet  vectors of items added since it was built, where it has vectors for rescoring
    removed-000003-0.npy     positions of removed rows of segment 0 as of version 3
    changes-000004.log       what was added and removed since, on a local disk (``changelog``)

A small update is appended to the log. Any other commit, and one that finds the log long, writes new files
beside the old ones, then swaps index.json: a crash leaves the old version whole, and a reader gets one
version or the other. The files of the version before stay for readers that are still opening them; older
ones are removed. One writer at a time (a lock on local disks); compaction takes the lock only to begin and
to end.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from hashnet.codes import check_n_bits
from hashnet.errors import FormatError, HashnetError, StaleIndex, StorageError
from hashnet.index import changelog
from hashnet.index.artefact import BUILD_AGAIN, HEADER, IndexArtefact
from hashnet.index.features import IndexFeatures
from hashnet.index.kinds import KINDS, parse_options
from hashnet.index.rows import (
    Postings,
    StoredRows,
    conform,
    read_schema,
    read_table,
    schema_text,
    write_table,
)
from hashnet.index.segment import KindOptions, Segment
from hashnet.index.snapshot import Snapshot
from hashnet.io import check_file, read_checked, storage

# how the names of a version's files begin
FILE_NAMES = ("index-", "labels-", "columns-", "removed-", "changes-", "features-")

log = logging.getLogger(__name__)

LOG_BYTES = 4 << 20  # a longer log is replaced by new segments, because opening an index applies it
LOG_BYTES_COMPACTING = 64 << 20  # the same while a compaction runs, which needs the log it began with
COMPACTED = "compacted-"  # in the names of files that a compaction writes before index.json names them


def commit(uri: str, state: Snapshot) -> Snapshot:
    """Puts a state on disk and returns it as it is there: changes into the log, anything else whole."""
    if not state.changes or state.seal is None or not storage.is_local(uri):
        return write_snapshot(uri, state)
    size = (state.log.offset if state.log else 0) + sum(map(changelog.size_of, state.changes))
    if size > LOG_BYTES and not (size <= LOG_BYTES_COMPACTING and _is_compacting(uri)):
        return write_snapshot(uri, state)
    state = _with_log(uri, state)
    assert state.log is not None
    record = changelog.Record(state.version, state.n_live, state.updates, tuple(state.changes or ()))
    return dataclasses.replace(state, log=changelog.append(uri, state.log, record), changes=())


def _with_log(uri: str, state: Snapshot) -> Snapshot:
    """The state with a log that its changes can be appended to."""
    if state.log is not None:
        return state
    artefact = IndexArtefact(uri)
    end = changelog.create(uri, f"changes-{state.version:06d}.log")
    about = artefact.read_unchanged() | {"log": end.file}
    written = artefact.write_header(about, lineage=about["lineage"])
    return dataclasses.replace(state, log=end, seal=written["sha256"])


def compact(uri: str, state: Snapshot) -> bool:
    """Writes the newest version in one segment without removed rows; False where there is nothing to do.

    ``state`` is a version that was read before. Others may commit while it runs: their changes are applied to
    the compacted version at the end. StaleIndex if the whole index was rewritten in that time.
    """
    with _compaction_lock(uri) as free:
        if not free:
            return False
        with writer_lock(uri):
            state = newest_snapshot(uri, state)
            if state.is_compact:
                return False
            state = _with_log(uri, state)
        compacted = state.compacted()
        (segment,) = compacted.segments
        name = f"{COMPACTED}{state.version:06d}-{uuid.uuid4().hex[:8]}"
        written = dataclasses.replace(segment, record=_write_rows(uri, segment, name))
        with writer_lock(uri):
            if IndexArtefact(uri).sha256() != state.seal:
                raise StaleIndex(f"{uri} was rewritten by another process during compaction; try again")
            compacted = dataclasses.replace(compacted, segments=(written,), log=state.log)
            newest = _catch_up(uri, compacted.at_version(state.version))
            whole = dataclasses.replace(newest, version=newest.version + 1, changes=None)
            write_snapshot(uri, whole, of_compaction=True)
        return True


def write_snapshot(uri: str, state: Snapshot, of_compaction: bool = False) -> Snapshot:
    """Commits a state: new files first, then index.json. Returns it with the segments' records."""
    artefact = IndexArtefact(uri)
    before: list[str] = []
    if artefact.exists():
        about = artefact.read_unchanged()
        before = [*artefact.files(about), about.get("log") or ""]
    storage.make_folder(uri)
    segments = []
    for number, segment in enumerate(state.segments):
        name = f"{state.version:06d}" + (f"-{number}" if number else "")
        record = dict(segment.record) if segment.record else _write_rows(uri, segment, name)
        if len(segment.dead) and (record["removed"] or {}).get("rows") != len(segment.dead):
            name = f"removed-{state.version:06d}-{number}.npy"
            record["removed"] = _write_array(uri, name, segment.dead)
        segments.append(dataclasses.replace(segment, record=record))
    removed = state.removed_ids_file
    if removed is None and state.removed_ids is not None and len(state.removed_ids):
        removed = _write_array(uri, f"removed-ids-{state.version:06d}.npy", state.removed_ids)
    features, features_entry = state.features, None
    if features is not None:
        features, features_entry = features.written(uri, state.version)
    about = {
        "index_kind": state.kind,
        "n_bits": state.n_bits,
        "n_classes": state.n_classes,
        "version": state.version,
        "rows": state.n_live,
        "updates": state.updates,
        "keeps_removed_ids": state.removed_ids is not None,
        "removed_ids": removed,
        "options": dataclasses.asdict(state.options),
        "tuned": state.tuned,
        "schema": schema_text(state.schema),
        "features": features_entry,
        "segments": [segment.record for segment in segments],
    }
    written = artefact.write_header(about, lineage=state.lineage)
    compacting = not of_compaction and storage.is_local(uri) and _is_compacting(uri)
    _remove_old(uri, {*before, *artefact.files(about)}, compacting)
    return dataclasses.replace(
        state,
        segments=tuple(segments),
        features=features,
        seal=written["sha256"],
        removed_ids_file=removed,
        log=None,
        changes=(),
    )


@contextmanager
def writer_lock(uri: str) -> Iterator[None]:
    """Held while one process commits. An object store has no locks: its users must keep to one writer."""
    if not storage.is_local(uri):
        yield
        return
    storage.make_folder(uri)
    with _open_lock(uri, ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _compaction_lock(uri: str) -> Iterator[bool]:
    """Whether this process may compact: True for one at a time."""
    with _open_lock(uri, ".compacting") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _is_compacting(uri: str) -> bool:
    with _compaction_lock(uri) as free:
        return not free


def _open_lock(uri: str, name: str) -> Any:
    """A file to lock; closing it lets go of the lock."""
    try:
        return open(os.path.join(storage.resolve(uri)[1], name), "a")
    except OSError as error:
        raise StorageError(f"cannot write to {uri}: {error}") from error


def _write_rows(uri: str, segment: Segment, name: str) -> dict[str, Any]:
    rows = segment.rows
    labels = columns = None
    if rows.postings is not None:
        labels = f"labels-{name}.parquet"
        rows.postings.write(storage.join(uri, labels))
    if rows.columns is not None:
        columns = f"columns-{name}.arrow"
        write_table(storage.join(uri, columns), rows.columns)
    return _write_faiss(uri, f"index-{name}.faiss", rows.writable()) | {
        "kind": rows.kind.name,
        "rows": len(rows),
        "labels": _hashed(uri, labels),
        "columns": _hashed(uri, columns),
        "removed": None,
    }


def _hashed(uri: str, file: str | None) -> dict[str, Any] | None:
    """The entry in index.json of a file that was just written."""
    return None if file is None else {"file": file, "sha256": storage.sha256_of(storage.join(uri, file))}


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


def _write_array(uri: str, file: str, values: np.ndarray) -> dict[str, Any]:
    data = io.BytesIO()
    np.save(data, values, allow_pickle=False)
    storage.write_bytes(storage.join(uri, file), data.getvalue())
    return {"file": file, "sha256": hashlib.sha256(data.getvalue()).hexdigest(), "rows": len(values)}


def _remove_old(uri: str, needed: set[str], compacting: bool) -> None:
    """Removes what neither this version nor the one before names, and leftovers of killed writers.

    While another process is ``compacting``, the files that it writes are left alone.
    """
    try:
        for name in storage.list_names(uri):
            is_index_file = name.startswith(FILE_NAMES) or storage.TMP_MARK in name
            if is_index_file and name not in needed and not (compacting and COMPACTED in name):
                storage.delete(storage.join(uri, name))
    except StorageError as error:  # the version is committed; the next commit removes the rest
        log.warning("old files of %s stay for now: %s", uri, error)


ATTEMPTS = 20  # a reader of a busy index may see a file go each time it looks
ANY_SIZE = 1 << 62  # stored options are final, however few rows are left


def read_snapshot(
    uri: str, *, mmap: bool = True, verify: bool = True, known: Snapshot | None = None
) -> Snapshot:
    """The snapshot at ``uri``. What of ``known`` it still has is taken over, not read again."""
    segments = () if known is None else known.segments
    by_content = {_content(segment.record): segment for segment in segments if segment.record}
    features = None if known is None else known.features
    artefact = IndexArtefact(uri)
    for attempt in range(ATTEMPTS):
        about = artefact.read_unchanged()
        try:
            return _catch_up(uri, _open_snapshot(uri, about, mmap, verify, by_content, features))
        except (StorageError, FormatError):
            # a writer may have moved on and removed files while we were opening them
            if attempt == ATTEMPTS - 1 or artefact.sha256() == about["sha256"]:
                raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"{uri}/{HEADER} is damaged ({type(error).__name__}: {error})") from error
    raise AssertionError("unreachable")


def newest_snapshot(uri: str, state: Snapshot) -> Snapshot:
    """The snapshot at ``uri``; ``state``, which was read from it or written to it, where it is that one."""
    if is_newest(uri, state):
        return state
    if IndexArtefact(uri).sha256() == state.seal:
        try:
            return _catch_up(uri, state)
        except FormatError:  # its log was truncated and continues differently: that version was not durable
            pass
    return read_snapshot(uri, known=state)


def is_newest(uri: str, state: Snapshot) -> bool:
    """Whether nothing was committed since ``state`` was read or written."""
    if IndexArtefact(uri).sha256() != state.seal:
        return False
    if state.log is None:
        return True
    size = changelog.end_of(uri, state.log.file)
    if size <= state.log.offset:
        return size == state.log.offset
    return next(changelog.read(uri, state.log), None) is None  # a writer may be appending, or have died


def _catch_up(uri: str, state: Snapshot) -> Snapshot:
    """The state after the changes in its log that it does not have yet."""
    if state.log is None or not (records := list(changelog.read(uri, state.log))):
        return state
    (last, end) = records[-1]
    try:
        for change in changelog.joined([change for record, _ in records for change in record.changes]):
            state = state.after(change)
    except HashnetError as error:
        raise FormatError(f"{uri}/{end.file} does not fit the index: {error}") from error
    if state.n_live != last.rows:
        raise FormatError(f"{uri}/{end.file} says {last.rows} rows, there are {state.n_live}")
    return dataclasses.replace(state, version=last.version, updates=last.updates, log=end, changes=())


def _open_snapshot(
    uri: str,
    about: dict[str, Any],
    mmap: bool,
    verify: bool,
    by_content: dict[Any, Segment],
    known_features: IndexFeatures | None,
) -> Snapshot:
    """The state that ``about`` names. Rows it opens join ``by_content``: another attempt has them."""
    artefact = IndexArtefact(uri)
    n_bits = check_n_bits(artefact.whole_number(about, "n_bits"))
    kind, n_classes = about["index_kind"], about["n_classes"]
    n_rows = artefact.whole_number(about, "rows")
    schema = read_schema(about.get("schema"))
    try:
        options = parse_options(kind, dict(about["options"]), n_bits, ANY_SIZE)
    except HashnetError as error:
        raise FormatError(f"{uri}/{HEADER} is damaged: {error}") from error
    if n_classes is not None:
        artefact.whole_number(about, "n_classes")
    segments = []
    for record in about["segments"]:
        segment_options = (
            options if record["kind"] == kind else parse_options(record["kind"], {}, n_bits, ANY_SIZE)
        )
        held = by_content.get(_content(record))
        if held is None:
            columns = _read_columns(uri, record, schema, verify)
            rows = _open_rows(uri, record, n_bits, n_classes, columns, segment_options, mmap, verify)
            held = by_content[_content(record)] = Segment(rows, segment_options)
        known = held.rows.columns
        if schema is not None and (known is None or known.schema != schema):  # it was given further ones
            columns = conform(known, schema, len(held.rows))
            held = dataclasses.replace(held, rows=held.rows.with_columns(columns))
        if held.record == record:
            segments.append(dataclasses.replace(held, options=segment_options))
        else:
            dead = _read_dead(uri, record, len(held.rows), verify)
            segments.append(Segment(held.rows, segment_options, dead, record))
    state = Snapshot(
        kind=kind,
        n_bits=n_bits,
        options=options,
        n_classes=n_classes,
        lineage=dict(about["lineage"]),
        segments=tuple(segments),
        schema=schema,
        features=IndexFeatures.read(entry, uri, known_features) if (entry := about.get("features")) else None,
        version=artefact.whole_number(about, "version"),
        seal=about["sha256"],
        updates=artefact.whole_number(about, "updates"),
        tuned=about["tuned"],
        removed_ids=_read_removed_ids(uri, about, verify),
        removed_ids_file=about.get("removed_ids"),
        log=changelog.LogEnd(file) if (file := artefact.log_file(about)) else None,
        changes=(),
    )
    if state.n_live != n_rows:
        raise FormatError(f"{uri}/{HEADER} says {n_rows} rows, its segments hold {state.n_live}")
    return state


def _content(record: dict[str, Any]) -> tuple[str | None, ...]:
    """What rows are made of, whatever their files are called: the sha256 of codes, labels and columns."""
    beside = (record.get(name) for name in ("labels", "columns"))
    return record["sha256"], *(entry["sha256"] if entry else None for entry in beside)


def _open_rows(
    uri: str,
    record: dict[str, Any],
    n_bits: int,
    n_classes: int | None,
    columns: pa.Table | None,
    options: KindOptions,
    mmap: bool,
    verify: bool,
) -> StoredRows:
    where = _listed(uri, record)
    found = storage.size_of(where) if storage.exists(where) else None
    if found is None:
        raise FormatError(f"{where} is missing; {BUILD_AGAIN}")
    if found != record["bytes"]:
        raise FormatError(
            f"{where} has {found} bytes, {HEADER} says {record['bytes']}: it is truncated or changed; "
            + BUILD_AGAIN
        )
    kind = KINDS[record["kind"]]
    flags = kind.map_flags if mmap else 0
    with storage.local_copy(where) as path:  # a map keeps the bytes alive when a copy is deleted
        if verify and storage.sha256_of(path) != record["sha256"]:
            raise FormatError(f"{where} is damaged: its sha256 is not the recorded one; {BUILD_AGAIN}")
        try:
            index = faiss.read_index_binary(str(path), flags)
        except RuntimeError as error:
            raise FormatError(f"{where} is not an index FAISS can read: {error}") from error
    postings = _read_postings(uri, record, n_classes, verify)
    rows = kind.rows(index, postings, columns, mapped=bool(flags))
    if rows.n_bits != n_bits or len(rows) != record["rows"]:
        raise FormatError(
            f"{where} holds {len(rows)} codes of {rows.n_bits} bits, {HEADER} says "
            f"{record['rows']} of {n_bits}"
        )
    rows.check()
    kind.check_opened(rows, options, where)
    return rows


def _read_postings(uri: str, record: dict[str, Any], n_classes: int | None, verify: bool) -> Postings | None:
    if record["labels"] is None or n_classes is None:
        return None
    return Postings.read(_checked(uri, record["labels"], verify), record["rows"], n_classes)


def _read_columns(
    uri: str, record: dict[str, Any], schema: pa.Schema | None, verify: bool
) -> pa.Table | None:
    if schema is None:
        return None
    if record["columns"] is None:  # they were written before the index had columns
        return conform(None, schema, record["rows"])
    return read_table(_checked(uri, record["columns"], verify), record["rows"], schema)


def _read_dead(uri: str, record: dict[str, Any], n: int, verify: bool) -> np.ndarray:
    if record["removed"] is None:
        return np.empty(0, dtype=np.int64)
    dead = _read_array(uri, record["removed"], verify)
    if len(dead) and not 0 <= dead[0] <= dead[-1] < n:
        raise FormatError(f"{uri}/{record['removed']['file']} does not hold positions of removed rows")
    return dead


def _read_removed_ids(uri: str, about: dict[str, Any], verify: bool) -> np.ndarray | None:
    """None where an older version, which did not keep them, has updated the index."""
    if not about.get("keeps_removed_ids", not about["updates"]):
        return None
    entry = about.get("removed_ids")
    return np.empty(0, dtype=np.int64) if entry is None else _read_array(uri, entry, verify)


def _read_array(uri: str, entry: dict[str, Any], verify: bool) -> np.ndarray:
    """int64 (n,) that ``_write_array`` wrote."""
    where = _listed(uri, entry)
    data = read_checked(where, entry["sha256"], BUILD_AGAIN) if verify else storage.read_buffer(where)
    values = np.load(io.BytesIO(data), allow_pickle=False)
    if values.dtype != np.int64 or values.ndim != 1:
        raise FormatError(f"{where} does not hold whole numbers")
    return values


def _listed(uri: str, entry: dict[str, Any]) -> str:
    """The URI of the file that an entry of index.json names."""
    return storage.join(uri, storage.check_plain_name(entry["file"], f"{uri}/{HEADER}"))


def _checked(uri: str, entry: dict[str, Any], verify: bool) -> str:
    """The same, after a comparison with its sha256."""
    where = _listed(uri, entry)
    if verify:
        check_file(where, entry["sha256"], BUILD_AGAIN)
    return where
