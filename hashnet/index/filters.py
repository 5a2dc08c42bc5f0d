"""``where=``: which items a search may find, by ids, by labels, or by both.

    where=[3, 17, 42]                          these ids
    where={"labels": [5, 8]}                   items with at least one of these labels
    where={"ids": [3, 17, 42], "labels": 5}    both at once

An id the index does not hold matches nothing; a label outside its classes is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.errors import IndexMismatch, Unsupported
from hashnet.index.stored_rows import StoredRows
from hashnet.io import as_array


@dataclass(frozen=True)
class Where:
    """A checked filter: sorted ids, labels, or both."""

    ids: np.ndarray | None
    labels: list[int] | None

    def positions(self, rows: StoredRows) -> np.ndarray:
        """Positions of the rows it lets through, ascending int64."""
        found = None
        if self.ids is not None:
            found = rows.find(self.ids)
            found = np.unique(found[found >= 0])
        if self.labels is not None:
            if rows.postings is None:
                return np.empty(0, dtype=np.int64)  # rows that were added without labels
            labelled = rows.postings.rows_with(self.labels)
            found = labelled if found is None else np.intersect1d(found, labelled, assume_unique=True)
        assert found is not None
        return found


def parse_where(where: Any, n_classes: int | None) -> Where | None:
    """The filter that ``where`` describes, or an error that says what it may be."""
    if where is None or isinstance(where, Where):
        return where
    if not isinstance(where, Mapping):
        return Where(_whole(where, "ids"), None)
    unknown = sorted(map(str, set(where) - {"ids", "labels"}))
    if unknown or not where:
        raise IndexMismatch(f"where= knows the keys ids and labels, got {', '.join(unknown) or 'none'}")
    ids = _whole(where["ids"], "ids") if where.get("ids") is not None else None
    labels = None
    if where.get("labels") is not None:
        if n_classes is None:
            raise Unsupported(
                "this index was built without labels; build it from codes with labels to filter by them"
            )
        labels = _whole(where["labels"], "labels").tolist()
        outside = [label for label in labels if not 0 <= label < n_classes]
        if outside:
            raise IndexMismatch(
                f"where= names label {outside[0]}, but the index has {n_classes} classes, 0..{n_classes - 1}"
            )
    return Where(ids, labels) if ids is not None or labels is not None else None


def _whole(values: Any, name: str) -> np.ndarray:
    """Sorted distinct int64 of a number, a set, a list or an array of them."""
    if isinstance(values, (set, frozenset, range)):
        values = list(values)
    array = np.atleast_1d(as_array(values, f"{name} of where="))
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise IndexMismatch(f"where= needs whole numbers as {name}, got {array.dtype} of shape {array.shape}")
    return np.unique(array.astype(np.int64))
