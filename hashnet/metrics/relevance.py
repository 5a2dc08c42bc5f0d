"""Label sets in the compact form the kernels compare: class ids where every row has one label,
bit words where rows have several. A multi-hot matrix is read in slices and never copied whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.errors import CodeError, DataError
from hashnet.labels import as_multi_hot

SLICE_ROWS = 65_536  # rows of a multi-hot matrix looked at together


@dataclass(frozen=True)
class LabelSets:
    """The labels of n rows.

    ``ids`` int32 (n,) when every row has exactly one label, else None. ``words`` uint64
    (ceil(n_classes / 64), n), class c being bit c % 64 of word c // 64, else None.
    """

    n_classes: int
    ids: np.ndarray | None
    words: np.ndarray | None

    def __len__(self) -> int:
        return len(self.ids) if self.ids is not None else self.words.shape[1]  # type: ignore[union-attr]

    def take(self, rows: Any) -> LabelSets:
        """The rows asked for, in that order (an index array or a slice)."""
        ids = None if self.ids is None else self.ids[rows]
        words = None if self.words is None else np.ascontiguousarray(self.words[:, rows])
        return LabelSets(self.n_classes, ids, words)

    def as_words(self) -> np.ndarray:
        """The sets as bit words, also where ids are kept."""
        if self.words is not None:
            return self.words
        words = np.zeros((-(-self.n_classes // 64), len(self)), dtype=np.uint64)
        words[self.ids // 64, np.arange(len(self))] = np.uint64(1) << (self.ids % 64).astype(np.uint64)
        return words

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, class) of every label, int64 each, by row then class."""
        if self.ids is not None:
            return np.arange(len(self)), self.ids.astype(np.int64)
        bits = np.unpackbits(self.words.T.copy().view(np.uint8), axis=1, bitorder="little")  # type: ignore[union-attr]
        rows, classes = np.nonzero(bits)
        return rows, classes


def label_sets(labels: Any, n_classes: int | None = None, name: str = "labels") -> LabelSets:
    """LabelSets of class ids (n,) or of a multi-hot matrix (n, n_classes)."""
    labels = np.asarray(labels)
    if labels.ndim == 1:
        return _from_ids(labels, n_classes, name)
    if labels.ndim != 2:
        raise CodeError(f"{name} must be class ids (n,) or multi-hot (n, n_classes), got {labels.shape}")
    if n_classes is not None and labels.shape[1] != n_classes:
        raise CodeError(f"{name} have {labels.shape[1]} classes where {n_classes} are needed")
    return _from_multi_hot(labels, name)


def _from_ids(ids: np.ndarray, n_classes: int | None, name: str) -> LabelSets:
    if ids.dtype.kind not in "iu":
        raise CodeError(f"{name} as class ids must be whole numbers, got {ids.dtype}")
    if len(ids) == 0:
        return LabelSets(n_classes or 0, np.zeros(0, np.int32), None)
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise DataError(f"{name} hold class {low} in row {ids.argmin()}: every row needs a class >= 0")
    if n_classes is not None and high >= n_classes:
        raise CodeError(f"{name} hold class {high}, but there are only {n_classes} classes")
    return LabelSets(high + 1 if n_classes is None else n_classes, ids.astype(np.int32), None)


def _from_multi_hot(labels: np.ndarray, name: str) -> LabelSets:
    n, n_classes = labels.shape
    words = np.zeros((max(1, -(-n_classes // 64)), n), dtype=np.uint64)
    ids = np.zeros(n, dtype=np.int32)
    single = True
    for start in range(0, n, SLICE_ROWS):
        part = as_multi_hot(labels[start : start + SLICE_ROWS], name=name)
        padded = np.zeros((len(part), words.shape[0] * 8), dtype=np.uint8)
        padded[:, : -(-n_classes // 8)] = np.packbits(part, axis=1, bitorder="little")
        words[:, start : start + len(part)] = padded.view(np.uint64).T
        if single:
            single = n_classes > 0 and bool((part.sum(axis=1, dtype=np.int64) == 1).all())
            if single:
                ids[start : start + len(part)] = part.argmax(axis=1)
    return LabelSets(n_classes, ids, None) if single else LabelSets(n_classes, None, words)


def check_pair(query_labels: Any, database_labels: Any) -> tuple[LabelSets, LabelSets]:
    """Both label sets over the same classes; a query without a label is refused."""
    query, database = np.asarray(query_labels), np.asarray(database_labels)
    widths = [labels.shape[1] for labels in (query, database) if labels.ndim == 2]
    if len(set(widths)) > 1:
        raise CodeError(f"query labels have {widths[0]} classes, database labels {widths[1]}; use one list")
    width = widths[0] if widths else None
    if width is None:
        width = max((int(labels.max()) + 1 for labels in (query, database) if labels.size), default=0)
    queries = label_sets(query, width, "query labels")
    if queries.words is not None:
        empty = ~queries.words.any(axis=0)
        if empty.any():
            raise DataError(
                f"{int(empty.sum())} queries have no label (the first is row {int(empty.argmax())}); "
                "nothing is relevant to them: leave them out"
            )
    return queries, label_sets(database, width, "database labels")
