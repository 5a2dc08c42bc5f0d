"""LabelSets: the classes of each row as lists; and per class the items that carry it.

Two items are relevant to each other when they share at least one class. The kernels read the
items of a class as a bit mask where it is frequent and as a list of places where it is rare, so
memory follows the number of labels, never queries x database nor rows x classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.errors import CodeError, DataError
from hashnet.io import as_array
from hashnet.kernels import ClassItems, compiled
from hashnet.labels import MAX_CLASSES, as_multi_hot

if TYPE_CHECKING:
    import pyarrow as pa

SLICE_ROWS = 65_536  # rows of a multi-hot matrix looked at together
RARE = 64  # a class on fewer than one item in 64 is kept as a list


@dataclass(frozen=True)
class LabelSets:
    """The classes of row i are ``classes[start[i]:start[i + 1]]``, ascending.

    ``start`` int64 (n + 1,), ``classes`` int32.
    """

    n_classes: int
    start: np.ndarray
    classes: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def per_row(self) -> np.ndarray:
        """How many classes each row has, int64 (n,)."""
        return np.diff(self.start)

    def rows(self, first: int, last: int) -> LabelSets:
        """Rows ``first`` to ``last - 1``."""
        start = self.start[first : last + 1]
        return LabelSets(self.n_classes, start - start[0], self.classes[start[0] : start[-1]])

    @classmethod
    def of(cls, labels: Any, n_classes: int | None = None, name: str = "labels") -> LabelSets:
        """Of class ids (n,) or of a multi-hot matrix (n, n_classes)."""
        if isinstance(labels, LabelSets):
            return labels
        labels = as_array(labels, name)
        if labels.ndim == 1:
            return cls._of_class_ids(labels, n_classes, name)
        if labels.ndim != 2:
            raise CodeError(f"{name} must be class ids (n,) or multi-hot (n, n_classes), got {labels.shape}")
        if n_classes is not None and labels.shape[1] != n_classes:
            raise CodeError(f"{name} have {labels.shape[1]} classes where {n_classes} are needed")
        start = np.zeros(len(labels) + 1, dtype=np.int64)
        found = []
        for first in range(0, len(labels), SLICE_ROWS):  # a matrix may be a gigabyte: never copy it whole
            part = as_multi_hot(labels[first : first + SLICE_ROWS], name=name)
            found.append(np.nonzero(part)[1].astype(np.int32))
            start[first + 1 : first + 1 + len(part)] = part.sum(axis=1, dtype=np.int64)
        classes = np.concatenate(found) if found else np.zeros(0, np.int32)
        return cls(labels.shape[1], np.cumsum(start), classes)

    @classmethod
    def from_arrow(cls, lists: pa.Array | pa.ChunkedArray, n_classes: int) -> LabelSets:
        """Of an Arrow list<int32>, as stores and manifests keep them; a null row has no class."""
        import pyarrow as pa

        if isinstance(lists, pa.ChunkedArray):
            lists = lists.combine_chunks()
        start = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), out=start[1:])
        classes = lists.flatten().to_numpy().astype(np.int32)
        if len(classes) and not 0 <= classes.min() <= classes.max() < n_classes:
            raise DataError(
                f"labels hold class ids {classes.min()}..{classes.max()}, but there are {n_classes} classes"
            )
        return cls(n_classes, start, classes)

    @classmethod
    def _of_class_ids(cls, ids: np.ndarray, n_classes: int | None, name: str) -> LabelSets:
        if ids.dtype.kind not in "iu":
            raise CodeError(f"{name} as class ids must be whole numbers, got {ids.dtype}")
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
        if low < 0:
            raise DataError(f"{name} hold class {low} in row {ids.argmin()}: a class id is 0 or more")
        if n_classes is not None and high >= n_classes:
            raise CodeError(f"{name} hold class {high}, but there are only {n_classes} classes")
        if high >= MAX_CLASSES:
            raise CodeError(
                f"{name} hold class {high}; number classes from 0, at most {MAX_CLASSES:,} of them"
            )
        width = high + 1 if n_classes is None else n_classes
        return cls(width, np.arange(len(ids) + 1), ids.astype(np.int32))


def check_labels(query_labels: Any, database_labels: Any) -> tuple[LabelSets, LabelSets]:
    """Both label sets over the same classes; a query without a label is refused."""
    given: list[Any] = [
        labels if isinstance(labels, LabelSets) else as_array(labels, name)
        for labels, name in ((query_labels, "query labels"), (database_labels, "database labels"))
    ]
    widths = []
    for labels in given:
        if isinstance(labels, LabelSets):
            widths.append(labels.n_classes)
        elif labels.ndim == 2:
            widths.append(labels.shape[1])
    if len(set(widths)) > 1:
        raise CodeError(
            f"query labels have {widths[0]} classes, database labels {widths[1]}; "
            "give both over the same list of classes"
        )
    if not widths and all(labels.dtype.kind in "iu" and labels.ndim == 1 for labels in given):
        widths = [max((int(labels.max()) + 1 for labels in given if labels.size), default=0)]
    width = widths[0] if widths else None
    queries = LabelSets.of(given[0], width, "query labels")
    refuse_unlabelled(queries)
    return queries, LabelSets.of(given[1], width, "database labels")


def refuse_unlabelled(queries: LabelSets) -> None:
    """Raises DataError when a query has no label: nothing could be relevant to it."""
    empty = queries.per_row == 0
    if empty.any():
        raise DataError(
            f"{int(empty.sum())} queries have no label (the first is row {int(empty.argmax())}), "
            "so nothing can be relevant to them; leave them out"
        )


def class_items(labels: LabelSets, places: np.ndarray, n_words: int) -> ClassItems:
    """ClassItems of rows that lie at ``places`` int64 (n,), in masks of ``n_words`` words."""
    sizes = np.bincount(labels.classes, minlength=labels.n_classes)[: labels.n_classes]
    frequent = sizes * RARE >= max(len(labels), 1)
    mask_of = np.where(frequent, np.cumsum(frequent) - 1, -1).astype(np.int32)
    list_start = np.zeros(labels.n_classes + 1, dtype=np.int64)
    np.cumsum(np.where(frequent, 0, sizes), out=list_start[1:])
    masks = np.zeros((int(frequent.sum()), n_words), dtype=np.uint64)
    lists = np.zeros(list_start[-1], dtype=np.int32)
    _fill(labels.start, labels.classes, places, mask_of, masks, list_start[:-1].copy(), lists)
    return ClassItems(mask_of, masks, list_start, lists)


@compiled
def _fill(start, classes, places, mask_of, masks, free, lists):  # type: ignore[no-untyped-def]
    """Writes each row's place into the mask or the list of each of its classes."""
    for row in range(len(start) - 1):
        place = places[row]
        for a in range(start[row], start[row + 1]):
            c = classes[a]
            if mask_of[c] >= 0:
                masks[mask_of[c], place >> 6] |= np.uint64(1) << np.uint64(place & 63)
            else:
                lists[free[c]] = place
                free[c] += 1
