"""Rows + split flags → a manifest on disk: complete, or not there at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hashnet import storage
from hashnet.data.manifest import FILE, Manifest, write_about
from hashnet.data.parts import PartsWriter, check_labels, schema_of
from hashnet.data.rows import Rows
from hashnet.errors import DataError, ManifestError, StorageError


def write_manifest(
    uri: str, rows: Rows, flags: np.ndarray, *, source: dict[str, Any] | None = None, overwrite: bool = False
) -> Manifest:
    """Writes ``rows`` as the manifest ``uri`` and opens it."""
    uri = str(uri)
    check_labels(rows.labels, rows.n_classes)
    with _staged(uri, overwrite) as folder:
        writer = PartsWriter(folder, schema_of(rows.modality, rows.n_features, rows.inline))
        try:
            for start in range(0, rows.n, rows.block_rows):
                stop = min(start + rows.block_rows, rows.n)
                labels = None if rows.labels is None else rows.labels[start:stop]
                writer.write(rows.payload(start, stop), labels, flags[start:stop])
            parts = tuple(writer.finish())
        except BaseException:
            writer.abort()
            if rows.undo is not None:
                rows.undo()
            raise
        write_about(folder, rows, parts, source or {})
    return Manifest.open(uri)


@contextmanager
def _staged(uri: str, overwrite: bool) -> Iterator[str]:
    """A folder to write into that becomes ``uri`` at the end: by a rename where folders can be renamed."""
    if storage.exists(uri):
        ours = storage.exists(storage.join(uri, FILE))
        if not ours and (not storage.is_folder(uri) or storage.list_names(uri)):
            raise DataError(f"{uri} exists and is no manifest; choose another --out")
        if ours and not overwrite:
            raise ManifestError(f"{uri} exists; choose another --out, or replace it with --overwrite")
    if not storage.is_local(uri):
        storage.delete(storage.join(uri, FILE))
        yield uri
        return
    path = storage.resolve(uri)[1]
    staging = f"{path}{storage.TMP_MARK}{uuid.uuid4().hex[:12]}"
    try:
        os.makedirs(staging)
        yield staging
        storage.delete(path)
        os.rename(staging, path)
    except OSError as error:
        raise StorageError(f"cannot write {uri}: {error}") from error
    finally:
        if os.path.exists(staging):
            storage.delete(staging)
