"""SourceRows, what every source returns, and split flags → a manifest on disk, complete or absent."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hashnet.data import splits
from hashnet.data.columns import check_finite, check_labels, feature_column, is_among, renumber
from hashnet.data.manifest import Manifest, ManifestArtefact, PartsWriter, schema_of
from hashnet.errors import DataError, StorageError
from hashnet.io import Progress, as_array, storage
from hashnet.labels import as_multi_hot, from_names
from hashnet.labels import to_lists as label_lists

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceRows:
    """n rows in their final order.

    ``payload(start, stop)`` is the table of those rows with ``uri``, and ``image`` or ``feature``. It is
    called for ascending blocks, so that features larger than memory can be streamed. ``labels`` are
    class id lists list<int32> (n,), ``names`` the names that split files use for rows, ``fixed`` the
    split flags that came with the data. Text of all rows is large_string, because 32-bit offsets end
    at 2 GiB; it becomes string when a block is written.
    """

    n: int
    payload: Callable[[int, int], pa.Table]
    modality: str = "image"
    labels: pa.Array | None = None
    n_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    n_features: int | None = None
    inline: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)  # further ones of the payload: Arrow types
    names: pa.Array | None = None
    fixed: np.ndarray | None = None
    notes: dict[str, int | str] = field(default_factory=dict)  # for the manifest's ``source``
    block_rows: int = 32_768
    undo: Callable[[], None] | None = None  # removes the files that the payload wrote

    @property
    def schema(self) -> pa.Schema:
        """The columns of a manifest of these rows."""
        return schema_of(self.modality, self.n_features, self.inline, self.columns)


def rows_of_uris(uris: pa.Array, **fields: Any) -> SourceRows:
    """Rows of pictures that are given by their uris; ``fields`` are those of ``SourceRows``."""
    return SourceRows(n=len(uris), payload=lambda start, stop: pa.table({"uri": uris[start:stop]}), **fields)


def with_keys(rows: SourceRows) -> SourceRows:
    """The rows with the further column ``key``: their names, which must differ."""
    names = rows.names
    assert names is not None

    def payload(start: int, stop: int) -> pa.Table:
        return rows.payload(start, stop).append_column("key", names[start:stop].cast(pa.string()))

    return replace(rows, payload=payload, columns={**rows.columns, "key": "string"})


class Duplicate(NamedTuple):
    """An id that occurs twice, its first two rows, and the number of repetitions in all."""

    id: str
    first: int
    second: int
    n: int


def find_duplicate(ids: pa.Array) -> Duplicate | None:
    """The first id that occurs twice, or None."""
    codes = ids.dictionary_encode().indices.to_numpy()
    if len(codes) == 0 or len(codes) == codes.max() + 1:
        return None
    order = np.argsort(codes, kind="stable")
    again = np.flatnonzero(np.diff(codes[order]) == 0)
    first, second = int(order[again[0]]), int(order[again[0] + 1])
    return Duplicate(ids[first].as_py(), first, second, len(again))


def refuse_duplicates(ids: pa.Array, what: str) -> None:
    """DataError that names the first id that occurs twice, with both rows, or the first row without one."""
    if ids.null_count:
        row = ids.is_null().index(True).as_py()
        raise DataError(f"{what}: row {row} has no id; give every row one")
    if twice := find_duplicate(ids):
        raise DataError(
            f"{what}: rows {twice.first} and {twice.second} both have id {twice.id!r} "
            f"({twice.n:,} duplicated ids in all); ids must differ"
        )


def write_manifest(
    uri: str,
    rows: SourceRows,
    flags: np.ndarray,
    *,
    source: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
) -> Manifest:
    """The manifest ``uri``, written from ``rows`` and opened."""
    uri = str(uri)
    check_labels(rows.labels, rows.n_classes)
    with _staged(uri, overwrite) as (folder, suffix):
        writer = PartsWriter(folder, rows.schema, suffix=suffix)
        with _all_or_nothing(writer, rows):
            _write(writer, rows, rows.labels, flags, show_progress)
            ManifestArtefact(folder).write(rows, tuple(writer.finish()), source or {})
    return Manifest.open(uri)


def write_arrays(uri: str, X: Any, y: Any = None) -> Manifest:
    """The manifest ``uri`` of rows in memory, all in the splits train and database.

    ``X`` is feature rows (n, d), or a list of paths or URIs of pictures; ``y`` class ids (n,), multi-hot, or
    class names, one or a list of them per row.
    """
    listed = isinstance(X, Sequence) and bool(X) and isinstance(X[0], (str, os.PathLike))
    X = [storage.absolute(str(path)) for path in X] if listed else as_array(X, "feature rows")
    if listed and not storage.exists(X[0]):  # a wrong folder; a file that is missing later on is a bad row
        raise DataError(f"{X[0]} does not exist; give paths of pictures")
    if y is None:
        labels: dict[str, Any] = {}
    else:
        multi_hot, names = from_names(y) or (as_multi_hot(y), None)
        labels = {"labels": label_lists(multi_hot), "n_classes": multi_hot.shape[1], "class_names": names}
        if len(multi_hot) != len(X):
            raise DataError(f"there are {len(X):,} rows, but labels of {len(multi_hot):,}; give one per row")
    flags = np.full(len(X), splits.TRAIN | splits.DATABASE, dtype=np.uint8)
    if isinstance(X, list):
        rows = rows_of_uris(pa.array(X, pa.large_string()), **labels)
        return write_manifest(uri, rows, flags, overwrite=True)
    if X.ndim != 2 or X.dtype.kind not in "fiu":
        raise DataError(f"feature rows must be numbers (n, d), or paths of pictures; got {X.dtype} {X.shape}")

    def payload(start: int, stop: int) -> pa.Table:
        matrix = np.ascontiguousarray(X[start:stop], dtype=np.float32)
        check_finite(matrix, "X", start)
        names = pa.array([f"row-{row}" for row in range(start, stop)])
        return pa.table({"uri": names, "feature": feature_column(matrix)})

    rows = SourceRows(len(X), payload, modality="features", n_features=X.shape[1], block_rows=4_096, **labels)
    return write_manifest(uri, rows, flags, overwrite=True)


EXISTING = ("refuse", "skip")


def append_rows(
    manifest: Manifest,
    rows: SourceRows,
    flags: np.ndarray,
    *,
    existing: str = "refuse",
    source: Mapping[str, Any] | None = None,
    show_progress: bool = False,
) -> Manifest:
    """The manifest with ``rows`` added as new parts; the old parts are unchanged.

    Labels are matched by class name where both have names, otherwise by class id. Rows whose uri the
    manifest holds already are refused, or skipped and counted in the manifest's ``source``.
    """
    if existing not in EXISTING:
        raise DataError(f"existing must be one of {', '.join(EXISTING)}, got {existing!r}")
    manifest.verify()
    labels = _matched_labels(manifest, rows)
    held = _Held(manifest, "uri")
    keys = _Held(manifest, "key") if "key" in manifest.columns else None
    writer = PartsWriter(manifest.uri, manifest.schema, len(manifest.parts), len(manifest), _new_suffix())
    with _all_or_nothing(writer, rows):
        _write(writer, rows, labels, flags, show_progress, held, keys)
        if held.n_found and existing == "refuse":
            raise DataError(
                f"{held.n_found:,} of {rows.n:,} rows are in {manifest.uri} already, the first is "
                f"{held.first!r}; skip them with existing=skip (--existing skip)"
            )
        if held.n_found:
            log.info("%s of %s rows were skipped: they are there already", f"{held.n_found:,}", f"{rows.n:,}")
        parts = (*manifest.parts, *writer.finish())
        if Manifest.open(manifest.uri).parts != manifest.parts:
            raise DataError(f"{manifest.uri} was changed by another process during the append; append again")
        if len(parts) == len(manifest.parts):  # every row was skipped
            return manifest
        counted = {"skipped_existing": held.n_found} if held.n_found else {}
        appended = [*manifest.source.get("appended", []), {**(source or {}), **counted}]
        ManifestArtefact(manifest.uri).write(manifest, parts, {**manifest.source, "appended": appended})
    return Manifest.open(manifest.uri, verify=manifest.verify_files)


class _Held:
    """Which texts of a column a manifest holds already, by a 64-bit hash: 8 bytes per row held."""

    def __init__(self, manifest: Manifest, column: str) -> None:
        self.n_found = 0
        self.first: str | None = None
        tables = manifest.batches(columns=[column], rows=65_536)
        hashes = [_hashes(table[column]) for table in tables]
        self._held = np.sort(np.concatenate([np.zeros(0, np.int64), *hashes]))

    def are_new(self, texts: pa.ChunkedArray) -> np.ndarray:
        """bool (n,): the texts that are not held; the others are counted. A missing one is new."""
        held = is_among(_hashes(texts), self._held)
        held &= texts.is_valid().to_numpy(zero_copy_only=False).astype(bool)
        if held.any() and self.first is None:
            self.first = texts[int(np.argmax(held))].as_py()
        self.n_found += int(held.sum())
        return ~held


def _hashes(texts: pa.ChunkedArray) -> np.ndarray:
    """int64 (n,); the same text has the same value within this process."""
    return np.fromiter(map(hash, texts.to_pylist()), np.int64, len(texts))


def _write(
    writer: PartsWriter,
    rows: SourceRows,
    labels: pa.Array | None,
    flags: np.ndarray,
    show_progress: bool,
    held: _Held | None = None,
    keys: _Held | None = None,
) -> None:
    """Writes all rows, but for those whose uri is held already; a key that is held is refused."""
    with Progress(rows.n, "rows", "manifest") if show_progress else nullcontext() as progress:
        for start in range(0, rows.n, rows.block_rows):
            stop = min(start + rows.block_rows, rows.n)
            block = None if labels is None else labels[start:stop]
            table, sets = rows.payload(start, stop), flags[start:stop]
            new = None if held is None else held.are_new(table["uri"])
            if new is not None and not new.all():
                table, sets, block = (
                    table.filter(new),
                    sets[new],
                    None if block is None else block.filter(new),
                )
            if keys is not None and not keys.are_new(table["key"]).all():
                raise DataError(f"the key {keys.first!r} is in the manifest already, with another uri")
            if len(table):
                writer.write(table, block, sets)
            if progress is not None:
                progress.update(stop - start)


@contextmanager
def _all_or_nothing(writer: PartsWriter, rows: SourceRows) -> Iterator[None]:
    try:
        yield
    except BaseException:
        writer.abort()
        if rows.undo is not None:
            rows.undo()
        raise


def _matched_labels(manifest: Manifest, rows: SourceRows) -> pa.Array | None:
    """The new rows' labels in the manifest's numbering; DataError when the two do not match."""
    if rows.modality != manifest.modality:
        raise DataError(f"{manifest.uri} holds {manifest.modality}, the new rows are {rows.modality}")
    if rows.n_features != manifest.n_features:
        raise DataError(
            f"{manifest.uri} has {manifest.n_features} features per row, the new rows have {rows.n_features}"
        )
    if "key" in manifest.columns and "key" not in rows.columns:
        raise DataError(f"the rows of {manifest.uri} have keys, the new ones have none; give them with key=")
    if rows.inline and not manifest.inline:
        raise DataError(
            f"{manifest.uri} stores its pictures by reference, the new rows hold theirs inside; "
            "store the new ones as files, tar or Parquet"
        )
    labels = rows.labels
    if labels is None:
        return None
    if manifest.n_classes is None:
        raise DataError(
            f"{manifest.uri} has no labels, the new rows have labels; make a new manifest of both"
        )
    if rows.class_names is not None and manifest.class_names is not None:
        return renumber(labels, rows.class_names, manifest.class_names)
    if rows.n_classes is not None and rows.n_classes > manifest.n_classes:
        raise DataError(
            f"{manifest.uri} has {manifest.n_classes} classes, the new rows have {rows.n_classes}; "
            "the classes of a manifest are fixed when it is made"
        )
    check_labels(labels, manifest.n_classes)
    return labels


def _new_suffix() -> str:
    return f"-{uuid.uuid4().hex[:8]}"


@contextmanager
def _staged(uri: str, overwrite: bool) -> Iterator[tuple[str, str]]:
    """A folder to write into that becomes ``uri`` at the end, and a suffix for the names of its parts.

    On a local file system the folder is renamed. On an object store the new parts are written beside the
    old ones, which are deleted after the new list is written: a reader of the old list loses them.
    """
    is_manifest = ManifestArtefact(uri).exists()
    if is_manifest and not overwrite:
        raise DataError(f"{uri} exists; choose another --out, or replace it with --overwrite")
    if not is_manifest and storage.exists(uri) and (not storage.is_folder(uri) or storage.list_names(uri)):
        raise DataError(f"{uri} exists and is not a manifest; choose another --out")
    if not storage.is_local(uri):
        yield uri, _new_suffix() if is_manifest else ""
        if is_manifest:
            _delete_old_parts(uri)
        return
    path = storage.resolve(uri)[1]
    staging = f"{path}{storage.TMP_MARK}{uuid.uuid4().hex[:12]}"
    try:
        os.makedirs(staging)
        yield staging, ""
        storage.delete(path)
        os.rename(staging, path)
    except OSError as error:
        raise StorageError(f"cannot write {uri}: {error}") from error
    finally:
        if os.path.exists(staging):
            storage.delete(staging)


def _delete_old_parts(uri: str) -> None:
    """Deletes the parts that the manifest does not list."""
    named = {part.name for part in Manifest.open(uri).parts}
    for name in storage.list_names(uri):
        if name.startswith("part-") and name not in named:
            storage.delete(storage.join(uri, name))


def zero_shot_copy(manifest: Manifest, out: str, share: float, seed: int = 0) -> Manifest:
    """A copy of the manifest in which training has only seen classes, the other sets only unseen ones.

    Queries stay queries, and training rows are the manifest's own. Rows with classes of both kinds, and
    queries of seen classes, are in no set.
    """
    if manifest.n_classes is None:
        raise DataError(f"{manifest.uri} has no labels, which the zero-shot protocol needs")
    rows = _rows_of(manifest, np.arange(len(manifest)))
    assert rows.fixed is not None
    flags = splits.assign_splits(
        splits.Protocol(zero_shot=share, seed=seed), rows.n, rows.labels, manifest.n_classes, fixed=rows.fixed
    )
    source = {
        "name": "zero_shot",
        "share": share,
        "seed": seed,
        "of": manifest.source,
        "manifest_sha256": manifest.sha256,
    }
    return write_manifest(out, rows, flags, source=source)


def copy_without(
    manifest: Manifest, out: str, removed: np.ndarray, source: Mapping[str, Any], overwrite: bool = False
) -> Manifest:
    """A copy of the manifest without the rows ``removed`` int64; the others are numbered anew from 0."""
    kept = np.setdiff1d(np.arange(len(manifest)), removed)
    rows = _rows_of(manifest, kept)
    assert rows.fixed is not None
    about = {**source, "of": manifest.source, "manifest_sha256": manifest.sha256}
    return write_manifest(out, rows, rows.fixed, source=about, overwrite=overwrite)


def _rows_of(manifest: Manifest, row_ids: np.ndarray) -> SourceRows:
    """Rows of a manifest, by ids int64 ascending, as a source: ``fixed`` are their splits."""
    columns = [name for name in manifest.schema.names if name not in ("row_id", "labels", "splits")]
    table = manifest.read(columns=["labels", "splits"]).take(row_ids)
    labels = table["labels"].combine_chunks()
    labels = labels if isinstance(labels, pa.Array) else pa.concat_arrays(labels.chunks)

    def payload(start: int, stop: int) -> pa.Table:
        return pa.concat_tables(manifest.rows_by_id(row_ids[start:stop], columns))

    return SourceRows(
        n=len(row_ids),
        payload=payload,
        modality=manifest.modality,
        labels=labels if manifest.n_classes is not None else None,
        n_classes=manifest.n_classes,
        class_names=manifest.class_names,
        n_features=manifest.n_features,
        inline=manifest.inline,
        columns=manifest.columns,
        fixed=splits.from_lists(table["splits"]),
        block_rows=4096,
    )
