"""Rows + split flags → a manifest on disk: complete, or not there at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pyarrow as pa

from hashnet.data.class_lists import renumber
from hashnet.data.manifest import FILE, Manifest, write_about
from hashnet.data.parts import PartsWriter, check_labels, schema_of
from hashnet.data.rows import SourceRows
from hashnet.errors import DataError, ManifestError, StorageError
from hashnet.io import Progress, storage


def write_manifest(
    uri: str,
    rows: SourceRows,
    flags: np.ndarray,
    *,
    source: dict[str, Any] | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
) -> Manifest:
    """Writes ``rows`` as the manifest ``uri`` and opens it."""
    uri = str(uri)
    check_labels(rows.labels, rows.n_classes)
    with _staged(uri, overwrite) as (folder, mark):
        writer = PartsWriter(folder, schema_of(rows.modality, rows.n_features, rows.inline), mark=mark)
        with _all_or_nothing(writer, rows):
            _write(writer, rows, rows.labels, flags, show_progress)
            write_about(folder, rows, tuple(writer.finish()), source or {})
    return Manifest.open(uri)


def append_rows(
    manifest: Manifest,
    rows: SourceRows,
    flags: np.ndarray,
    *,
    source: dict[str, Any] | None = None,
    show_progress: bool = False,
) -> Manifest:
    """Adds ``rows`` to ``manifest`` as new parts, the old ones unchanged, and opens it anew.

    Where both name their classes, labels are matched by name; otherwise by number.
    """
    manifest.verify()
    labels = _fitting_labels(manifest, rows)
    writer = PartsWriter(manifest.uri, manifest.schema, len(manifest.parts), len(manifest), _new_mark())
    with _all_or_nothing(writer, rows):
        _write(writer, rows, labels, flags, show_progress)
        parts = (*manifest.parts, *writer.finish())
        if Manifest.open(manifest.uri).parts != manifest.parts:
            raise ManifestError(f"{manifest.uri} was changed by somebody else meanwhile; append again")
        appended = [*manifest.source.get("appended", []), source or {}]
        write_about(manifest.uri, manifest, parts, {**manifest.source, "appended": appended})
    return Manifest.open(manifest.uri, check=manifest.check)


def _write(
    writer: PartsWriter, rows: SourceRows, labels: pa.Array | None, flags: np.ndarray, show_progress: bool
) -> None:
    with Progress(rows.n, "rows", "manifest") if show_progress else nullcontext() as progress:
        for start in range(0, rows.n, rows.block_rows):
            stop = min(start + rows.block_rows, rows.n)
            block = None if labels is None else labels[start:stop]
            writer.write(rows.payload(start, stop), block, flags[start:stop])
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


def _fitting_labels(manifest: Manifest, rows: SourceRows) -> pa.Array | None:
    """The new rows' labels in the manifest's numbering, or ManifestError when the two do not fit."""
    if rows.modality != manifest.modality:
        raise ManifestError(f"{manifest.uri} holds {manifest.modality}, the new rows are {rows.modality}")
    if rows.n_features != manifest.n_features:
        raise ManifestError(
            f"{manifest.uri} has {manifest.n_features} features a row, the new rows have {rows.n_features}"
        )
    if rows.inline and not manifest.inline:
        raise ManifestError(
            f"{manifest.uri} keeps its pictures by reference, the new rows bring theirs along; "
            "store them as files, tar or Parquet"
        )
    labels = rows.labels
    if labels is None:
        return None
    if manifest.n_classes is None:
        raise ManifestError(f"{manifest.uri} has no labels, the new rows have; make a new manifest of both")
    if rows.class_names is not None and manifest.class_names is not None:
        return renumber(labels, rows.class_names, manifest.class_names)
    if rows.n_classes is not None and rows.n_classes > manifest.n_classes:
        raise ManifestError(
            f"{manifest.uri} has {manifest.n_classes} classes, the new rows have {rows.n_classes}; "
            "the classes of a manifest are fixed when it is made"
        )
    check_labels(labels, manifest.n_classes)
    return labels


def _new_mark() -> str:
    return f"-{uuid.uuid4().hex[:8]}"


@contextmanager
def _staged(uri: str, overwrite: bool) -> Iterator[tuple[str, str]]:
    """A folder to write into that becomes ``uri`` at the end, and the mark of the parts' names.

    Where folders can be renamed, by a rename. On an object store new parts lie beside the old ones,
    which go when the new list is written: whoever holds the old list then no longer finds them.
    """
    ours = storage.exists(storage.join(uri, FILE))
    if ours and not overwrite:
        raise ManifestError(f"{uri} exists; choose another --out, or replace it with --overwrite")
    if not ours and storage.exists(uri) and (not storage.is_folder(uri) or storage.list_names(uri)):
        raise DataError(f"{uri} exists and is no manifest; choose another --out")
    if not storage.is_local(uri):
        yield uri, _new_mark() if ours else ""
        if ours:
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
    """Removes the parts that the manifest does not name."""
    named = {part.name for part in Manifest.open(uri).parts}
    for name in storage.list_names(uri):
        if name.startswith("part-") and name not in named:
            storage.delete(storage.join(uri, name))
