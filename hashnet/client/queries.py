"""Queries of one kind: pictures, packed codes, features, or ids of indexed items.

>>> as_queries("cat.jpg")  # doctest: +SKIP
Queries(kind='images', values=[b'...'])
>>> as_queries(ids=[3, 17]).kind
'ids'
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hashnet.codes import check_codes
from hashnet.errors import CodeError, DataError
from hashnet.io import as_array

MAX_PICTURES = 64  # in one request: even a large model on a CPU encodes them in time


@dataclass(frozen=True)
class Queries:
    """Queries of one kind: codes uint8 (n, bytes), features float32 (n, d), ids int64 (n,), or pictures."""

    kind: str  # codes | images | features | ids
    values: Any

    def __len__(self) -> int:
        return len(self.values)

    def parts(self, rows: int, max_bytes: int = 8 << 20) -> Iterator[Queries]:
        """The queries in parts of at most ``rows`` rows (pictures: MAX_PICTURES) and ``max_bytes``."""
        if self.kind != "images":
            rows = max(1, min(rows, max_bytes * len(self) // max(1, self.values.nbytes)))
            for first in range(0, len(self), rows):
                yield Queries(self.kind, self.values[first : first + rows])
            return
        part: list[bytes] = []
        size = 0
        for picture in self.values:
            if part and (len(part) == min(rows, MAX_PICTURES) or size + len(picture) > max_bytes):
                yield Queries(self.kind, part)
                part, size = [], 0
            part.append(picture)
            size += len(picture)
        if part:
            yield Queries(self.kind, part)


def as_queries(queries: Any = None, ids: Any = None) -> Queries:
    """A caller's argument as Queries: pictures, packed codes, features, or ids of indexed items."""
    if (queries is None) == (ids is None):
        raise DataError("give either queries (pictures, codes or features) or ids=, not both and not neither")
    if ids is not None:
        return Queries("ids", as_ids(ids))
    if isinstance(queries, Queries):
        return queries
    if hasattr(queries, "detach"):  # a torch tensor, without importing torch
        queries = queries.detach().cpu().numpy()
    if _is_picture(queries):
        return Queries("images", [_picture(queries)])
    if isinstance(queries, (list, tuple)) and queries and _is_picture(queries[0]):
        return Queries("images", [_picture(one) for one in queries])
    array = as_array(queries, "queries")
    if array.dtype == np.uint8 and array.ndim <= 2:
        return Queries("codes", check_codes(array))
    if array.dtype == np.uint8:
        raise DataError(f"pixels of shape {array.shape} cannot be sent; give files, bytes or PIL pictures")
    if array.dtype.kind == "f":
        return Queries("features", _features(array))
    raise CodeError(
        f"queries must be pictures (paths, bytes, PIL), packed uint8 codes or float features, got "
        f"{array.dtype} of shape {array.shape}; search by items of the index with ids="
    )


def as_ids(ids: Any) -> np.ndarray:
    """int64 (n,) of one id or many."""
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"ids must be whole numbers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def label_lists(labels: Any) -> list[list[int]] | list[list[str]]:
    """One list of class ids or of names per item, from lists, single labels or a multi-hot matrix."""
    if isinstance(labels, np.ndarray) and labels.ndim == 2:
        return [np.flatnonzero(row).tolist() for row in labels]
    lists = [[row] if isinstance(row, str) or np.ndim(row) == 0 else list(row) for row in labels]
    named = {isinstance(label, str) for row in lists for label in row}
    if len(named) > 1:
        raise DataError("labels are class ids or names, not both in one call")
    return lists if named == {True} else [[int(label) for label in row] for row in lists]


def _features(array: np.ndarray) -> np.ndarray:
    if array.ndim == 1:
        array = array[None, :] if len(array) else array.reshape(0, 0)  # [] holds no query
    if array.ndim != 2 or (len(array) and not array.shape[1]):
        raise DataError(f"features must have shape (n, d), got {array.shape}")
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array)).any(axis=1).argmax())
        raise DataError(f"features row {row} holds NaN or infinity; clean the input")
    return np.ascontiguousarray(array, dtype=np.float32)


def _is_picture(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike, bytes, bytearray)) or hasattr(value, "tobitmap")


def _picture(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, (str, os.PathLike)):
        try:
            return Path(value).expanduser().read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the picture {value}: {error.strerror or error}") from error
    if hasattr(value, "tobitmap"):  # a PIL picture, without importing PIL
        sink = io.BytesIO()
        value.convert("RGB").save(sink, format="PNG")
        return sink.getvalue()
    raise DataError(f"a picture must be a path, bytes or a PIL picture, got {type(value).__name__}")
