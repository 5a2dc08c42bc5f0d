"""Opening an index from disk: every file checked before FAISS sees it, mapped where FAISS can."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from typing import Any

import faiss
import numpy as np

from hashnet.codes import check_n_bits
from hashnet.errors import FormatError, HashnetError, StorageError
from hashnet.index.artefact import BUILD_AGAIN, IndexArtefact
from hashnet.index.kinds import KINDS, KindOptions, parse_options
from hashnet.index.postings import Postings
from hashnet.index.segment import Segment
from hashnet.index.snapshot import Snapshot
from hashnet.index.stored_rows import StoredRows
from hashnet.io import storage

HEADER = IndexArtefact.header_file
ANY_SIZE = 1 << 62  # stored options are final, however few rows are left


def read_snapshot(
    uri: str, *, mmap: bool = True, verify: bool = True, known: tuple[Segment, ...] = ()
) -> Snapshot:
    """The snapshot at ``uri``. ``known`` segments that it still has are taken over, not read again."""
    by_content = {_content(segment.record): segment for segment in known if segment.record}
    artefact = IndexArtefact(uri)
    for attempt in range(3):
        about = artefact.read()
        try:
            return _open_snapshot(uri, about, mmap, verify, by_content)
        except (StorageError, FormatError):
            # a writer may have moved on and removed files while we were opening them
            if attempt == 2 or artefact.sha256() == about["sha256"]:
                raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"{uri}/{HEADER} is damaged ({type(error).__name__}: {error})") from error
    raise AssertionError("unreachable")


def _open_snapshot(
    uri: str, about: dict[str, Any], mmap: bool, verify: bool, by_content: dict[Any, Segment]
) -> Snapshot:
    """The state that ``about`` names. Rows it opens join ``by_content``: another attempt has them."""
    n_bits = check_n_bits(IndexArtefact(uri).whole_number(about, "n_bits"))
    kind, n_classes = about["index_kind"], about["n_classes"]
    records = about["segments"]
    n_rows = IndexArtefact(uri).whole_number(about, "rows")
    try:
        options = parse_options(kind, dict(about["options"]), n_bits, ANY_SIZE)
    except HashnetError as error:
        raise FormatError(f"{uri}/{HEADER} is damaged: {error}") from error
    if n_classes is not None:
        IndexArtefact(uri).whole_number(about, "n_classes")
    segments = []
    for record in records:
        segment_options = (
            options if record["kind"] == kind else parse_options(record["kind"], {}, n_bits, ANY_SIZE)
        )
        held = by_content.get(_content(record))
        if held is None:
            rows = _open_rows(uri, record, n_bits, n_classes, segment_options, mmap, verify)
            held = by_content[_content(record)] = Segment(rows, segment_options)
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
        version=IndexArtefact(uri).whole_number(about, "version"),
        seal=about["sha256"],
        updates=IndexArtefact(uri).whole_number(about, "updates"),
        tuned=about["tuned"],
    )
    if state.n_live != n_rows:
        raise FormatError(f"{uri}/{HEADER} says {n_rows} rows, its segments hold {state.n_live}")
    return state


def _content(record: dict[str, Any]) -> tuple[str, str | None]:
    """What rows are made of, whatever their files are called: the sha256 of their codes and labels."""
    return record["sha256"], record["labels"]["sha256"] if record["labels"] else None


def _open_rows(
    uri: str,
    record: dict[str, Any],
    n_bits: int,
    n_classes: int | None,
    options: KindOptions,
    mmap: bool,
    verify: bool,
) -> StoredRows:
    where = storage.join(uri, storage.check_plain_name(record["file"], f"{uri}/{HEADER}"))
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
        if verify:
            _check_sha256(str(path), where, record["sha256"])
        try:
            index = faiss.read_index_binary(str(path), flags)
        except RuntimeError as error:
            raise FormatError(f"{where} is not an index FAISS can read: {error}") from error
    rows = kind.rows(index, _read_postings(uri, record, n_classes, verify), mapped=bool(flags))
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
    where = storage.join(uri, storage.check_plain_name(record["labels"]["file"], f"{uri}/{HEADER}"))
    if verify:
        _check_sha256(where, where, record["labels"]["sha256"])
    return Postings.read(where, record["rows"], n_classes)


def _read_dead(uri: str, record: dict[str, Any], n: int, verify: bool) -> np.ndarray:
    if record["removed"] is None:
        return np.empty(0, dtype=np.int64)
    where = storage.join(uri, storage.check_plain_name(record["removed"]["file"], f"{uri}/{HEADER}"))
    data = storage.read_bytes(where)
    if verify and hashlib.sha256(data).hexdigest() != record["removed"]["sha256"]:
        raise FormatError(f"{where} was changed: its sha256 is not the one {HEADER} says")
    dead = np.load(io.BytesIO(data), allow_pickle=False)
    if dead.dtype != np.int64 or dead.ndim != 1 or (len(dead) and not 0 <= dead[0] <= dead[-1] < n):
        raise FormatError(f"{where} does not hold positions of removed rows")
    return dead


def _check_sha256(path: str, shown: str, expected: str) -> None:
    found = storage.sha256_of(path)
    if found != expected:
        raise FormatError(
            f"{shown} was changed: its sha256 is {found[:12]}…, {HEADER} says {str(expected)[:12]}…; "
            + BUILD_AGAIN
        )
