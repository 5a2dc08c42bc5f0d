"""SourceRows, what every source returns, and split flags → a manifest on disk, complete or not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hashnet.data import splits
from hashnet.data.label_lists import check_labels, renumber
from hashnet.data.manifest import Manifest, ManifestArtefact
from hashnet.data.parts import PartsWriter, schema_of
from hashnet.errors import DataError, StorageError
from hashnet.io import Progress, storage


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
    names: pa.Array | None = None
    fixed: np.ndarray | None = None
    notes: dict[str, int | str] = field(default_factory=dict)  # for the manifest's ``source``
    block_rows: int = 32_768
    undo: Callable[[], None] | None = None  # removes the files that the payload wrote


def rows_of_uris(uris: pa.Array, **fields: Any) -> SourceRows:
    """Rows of pictures that are given by their uris; ``fields`` are those of ``SourceRows``."""
    return SourceRows(n=len(uris), payload=lambda start, stop: pa.table({"uri": uris[start:stop]}), **fields)


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
        writer = PartsWriter(folder, schema_of(rows.modality, rows.n_features, rows.inline), suffix=suffix)
        with _all_or_nothing(writer, rows):
            _write(writer, rows, rows.labels, flags, show_progress)
            ManifestArtefact(folder).write(rows, tuple(writer.finish()), source or {})
    return Manifest.open(uri)


def append_rows(
    manifest: Manifest,
    rows: SourceRows,
    flags: np.ndarray,
    *,
    source: Mapping[str, Any] | None = None,
    show_progress: bool = False,
) -> Manifest:
    """The manifest with ``rows`` added as new parts; the old parts are unchanged.

    Labels are matched by class name where both have names, otherwise by class id.
    """
    manifest.verify()
    labels = _matched_labels(manifest, rows)
    writer = PartsWriter(manifest.uri, manifest.schema, len(manifest.parts), len(manifest), _new_suffix())
    with _all_or_nothing(writer, rows):
        _write(writer, rows, labels, flags, show_progress)
        parts = (*manifest.parts, *writer.finish())
        if Manifest.open(manifest.uri).parts != manifest.parts:
            raise DataError(f"{manifest.uri} was changed by another process meanwhile; append again")
        appended = [*manifest.source.get("appended", []), source or {}]
        ManifestArtefact(manifest.uri).write(manifest, parts, {**manifest.source, "appended": appended})
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


def _matched_labels(manifest: Manifest, rows: SourceRows) -> pa.Array | None:
    """The new rows' labels in the manifest's numbering; DataError when the two do not match."""
    if rows.modality != manifest.modality:
        raise DataError(f"{manifest.uri} holds {manifest.modality}, the new rows are {rows.modality}")
    if rows.n_features != manifest.n_features:
        raise DataError(
            f"{manifest.uri} has {manifest.n_features} features per row, the new rows have {rows.n_features}"
        )
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

    Queries stay queries. Rows with classes of both kinds, and queries of seen classes, are in no set.
    """
    if manifest.n_classes is None:
        raise DataError(f"{manifest.uri} has no labels, which the zero-shot protocol needs")
    table = manifest.read(columns=["labels", "splits"])
    labels = table["labels"].combine_chunks()
    labels = labels if isinstance(labels, pa.Array) else pa.concat_arrays(labels.chunks)
    fixed = splits.from_lists(table["splits"])
    n = len(manifest)
    flags = splits.assign_splits(
        splits.Protocol(zero_shot=share, seed=seed), n, labels, manifest.n_classes, fixed=fixed
    )
    columns = [name for name in manifest.schema.names if name not in ("row_id", "labels", "splits")]

    def payload(start: int, stop: int) -> pa.Table:
        return manifest.read(columns=columns, start=start, stop=stop)

    rows = SourceRows(
        n=n,
        payload=payload,
        modality=manifest.modality,
        labels=labels,
        n_classes=manifest.n_classes,
        class_names=manifest.class_names,
        n_features=manifest.n_features,
        inline=manifest.inline,
        block_rows=4096,
    )
    source = {
        "name": "zero_shot",
        "share": share,
        "seed": seed,
        "of": manifest.source,
        "manifest_sha256": manifest.sha256,
    }
    return write_manifest(out, rows, flags, source=source)
