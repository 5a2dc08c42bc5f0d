"""RUN/index/ on disk: one small index.json that names everything else, swapped whole.

    index.json               kind, version, n_bits, options, lineage, and per segment its files with
                             size and sha256: what a reader trusts, since its own sha256 is in it, too
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
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import faiss
import numpy as np

from hashnet.errors import StorageError
from hashnet.index.artefact import IndexArtefact, file_entries
from hashnet.index.segment import Segment
from hashnet.index.snapshot import Snapshot
from hashnet.io import storage

log = logging.getLogger(__name__)


def write_snapshot(uri: str, state: Snapshot) -> Snapshot:
    """Commits a state: new files first, then index.json. Returns it with the segments' records."""
    artefact = IndexArtefact(uri)
    before = artefact.read()["segments"] if artefact.exists() else []
    storage.make_folder(uri)
    segments = []
    for number, segment in enumerate(state.segments):
        record = dict(segment.record) if segment.record else _write_rows(uri, segment, state.version, number)
        if len(segment.dead) and (record["removed"] or {}).get("rows") != len(segment.dead):
            record["removed"] = _write_dead(uri, segment, state.version, number)
        segments.append(dataclasses.replace(segment, record=record))
    about: dict[str, Any] = {
        "index_kind": state.kind,
        "n_bits": state.n_bits,
        "n_classes": state.n_classes,
        "version": state.version,
        "rows": state.n_live,
        "updates": state.updates,
        "options": dataclasses.asdict(state.options),
        "tuned": state.tuned,
        "segments": [segment.record for segment in segments],
    }
    written = artefact.write_header(about, lineage=state.lineage)
    _remove_old(uri, before + [segment.record or {} for segment in segments])
    return dataclasses.replace(state, segments=tuple(segments), seal=written["sha256"])


@contextmanager
def writer_lock(uri: str) -> Iterator[None]:
    """Held while one process commits. An object store has no locks: its users must keep to one writer."""
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
    record |= _write_faiss(uri, f"index-{name}.faiss", rows.writable())
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


def _remove_old(uri: str, records: list[dict[str, Any]]) -> None:
    """Removes what neither this version nor the one before names, and leftovers of killed writers."""
    needed = {entry["file"] for entry in file_entries(records)}
    try:
        for name in storage.list_names(uri):
            ours = name.startswith(("index-", "labels-", "removed-")) or storage.TMP_MARK in name
            if ours and name not in needed:
                storage.delete(storage.join(uri, name))
    except StorageError as error:  # the version stands by now; the next commit removes the rest
        log.warning("old files of %s stay for now: %s", uri, error)
