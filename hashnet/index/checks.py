"""Arguments of the index's public methods, checked: wrong ones raise a sentence, never crash FAISS."""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet import labels as label_sets
from hashnet.errors import CodeError, IndexMismatch, Unsupported

MAX_SLOTS = 1 << 31  # of one answer, q x k: 24 GB


def check_whole(value: Any, name: str, low: int) -> int:
    """``value`` as an int that is at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise IndexMismatch(f"{name} must be a whole number, got {value!r}")
    if value < low:
        raise IndexMismatch(f"{name} must be at least {low}, got {value}")
    return int(value)


def check_k(k: Any, n_queries: int) -> int:
    """``k`` as an int >= 1 whose answer fits into memory."""
    k = check_whole(k, "k", 1)
    if n_queries * k > MAX_SLOTS:
        raise Unsupported(f"{n_queries} queries x k = {k} is too large for one answer; ask for less at once")
    return k


def check_ids(ids: Any, n: int | None = None, *, lowest: int = 0, distinct: bool = False) -> np.ndarray:
    """int64 (n,) of whole numbers >= ``lowest``."""
    array = np.atleast_1d(np.asarray(list(ids) if isinstance(ids, (set, frozenset, range)) else ids))
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise IndexMismatch(
            f"ids must be whole numbers of shape (n,), got {array.dtype} of shape {array.shape}"
        )
    if n is not None and len(array) != n:
        raise IndexMismatch(f"{n} codes came with {len(array)} ids; give one id a code")
    if len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise IndexMismatch(f"ids must fit into int64, got {array.max()}")
    array = array.astype(np.int64)
    if len(array) and array.min() < lowest:
        raise IndexMismatch(f"ids must be >= {lowest} (-1 marks an unused slot), got {array.min()}")
    if distinct:
        values, counts = np.unique(array, return_counts=True)
        if len(values) != len(array):
            first = values[counts > 1][0]
            raise IndexMismatch(f"id {first} is given {counts.max()} times in one call; give each id once")
    return array


def check_labels(labels: Any, n: int, n_classes: int | None) -> np.ndarray:
    """Multi-hot uint8 (n, n_classes)."""
    multi_hot = label_sets.as_multi_hot(labels, n_classes)
    if len(multi_hot) != n:
        raise CodeError(f"{n} codes came with {len(multi_hot)} labels; give one label set a code")
    return multi_hot
