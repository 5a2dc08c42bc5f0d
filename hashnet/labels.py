"""Labels as multi-hot rows or LabelSets, "shares at least one label" relevance, Jaccard, exact pair counts.

A label set is a multi-hot row, uint8 (n, n_classes); plain class ids (n,) are accepted wherever
labels are. Two items are similar (relevant to each other) when they share at least one label.
``LabelSets`` are the same as lists of classes: memory follows the number of labels, not rows x classes.

>>> import numpy as np
>>> labels = as_multi_hot(np.array([0, 1, 0]))
>>> share_label(labels, labels).astype(int)
array([[1, 0, 1],
       [0, 1, 0],
       [1, 0, 1]])
>>> count_pairs(labels)
PairCounts(n_pairs=3, n_similar=1, jaccard_sum=1.0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.errors import CodeError, DataError
from hashnet.io import as_array

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 1_000_000  # a larger class id is a mistake, and its multi-hot row a gigabyte
PAIR_WEIGHTS = ("global", "batch", "none")  # the pairs that the weights of a pairwise loss come from
SLICE_ROWS = 65_536  # rows of a multi-hot matrix looked at together
PATTERN_BLOCK = 2048  # rows of the pattern x pattern product held at once,
PATTERN_CELLS = 2**26  # fewer where there are more than 32,768 patterns: a quarter of a gigabyte of floats


def as_multi_hot(labels: Any, n_classes: int | None = None, name: str = "labels") -> np.ndarray:
    """Multi-hot uint8 (n, n_classes) of class ids (n,) or of a multi-hot matrix of 0 and 1."""
    labels = _ids_or_multi_hot(labels, n_classes, name)
    if labels.ndim == 1:
        return _one_hot(labels, n_classes, name)
    if labels.dtype == bool:
        return labels.view(np.uint8)
    if labels.size and not ((labels == 0) | (labels == 1)).all():
        row = int(((labels != 0) & (labels != 1)).any(axis=1).argmax())
        raise CodeError(f"{name} must hold only 0 and 1; row {row} does not")
    return labels.astype(np.uint8, copy=False)


def _ids_or_multi_hot(labels: Any, n_classes: int | None, name: str) -> np.ndarray:
    """``labels`` as an array (n,) or (n, n_classes); CodeError where it has another shape."""
    labels = as_array(labels, name)
    if labels.ndim not in (1, 2):
        raise CodeError(f"{name} must be class ids (n,) or multi-hot (n, n_classes), got {labels.shape}")
    if labels.ndim == 2 and n_classes is not None and labels.shape[1] != n_classes:
        raise CodeError(f"{name} have {labels.shape[1]} classes where {n_classes} are needed")
    return labels


def from_names(labels: Any) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """(multi-hot, class names in order) of labels given by name or by lists of names; None for numbers.

    >>> from_names(["cat", "dog", "cat"])
    (array([[1, 0],
           [0, 1],
           [1, 0]], dtype=uint8), ('cat', 'dog'))
    >>> from_names([["dog", "cat"], [], ["dog"]])[0].tolist()
    [[1, 1], [0, 0], [0, 1]]
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "UO":
        return None
    rows = [(row,) if isinstance(row, str) or not isinstance(row, Iterable) else row for row in labels]
    if not any(isinstance(name, str) for row in rows for name in row):
        return None
    for place, row in enumerate(rows):
        if not all(isinstance(name, str) for name in row):
            raise DataError(
                f"label {labels[place]!r} of row {place} is no name, as others are; give names only"
            )
    names = tuple(sorted({str(name) for row in rows for name in row}))
    column = {name: place for place, name in enumerate(names)}
    multi_hot = np.zeros((len(rows), len(names)), dtype=np.uint8)
    for place, row in enumerate(rows):
        multi_hot[place, [column[name] for name in row]] = 1
    return multi_hot, names


def _one_hot(ids: np.ndarray, n_classes: int | None, name: str) -> np.ndarray:
    one_hot = np.zeros((len(ids), _width(ids, n_classes, name)), dtype=np.uint8)
    if len(ids):  # an empty list is an array of floats
        one_hot[np.arange(len(ids)), ids] = 1
    return one_hot


def _width(ids: np.ndarray, n_classes: int | None, name: str) -> int:
    """``n_classes``, or as many as the ids (n,) need; class ids that cannot be are refused."""
    if len(ids) == 0:
        return n_classes or 0
    if ids.dtype.kind not in "iu":
        fix = "; number names by np.unique(names, return_inverse=True)[1]" if ids.dtype.kind in "UO" else ""
        raise CodeError(f"{name} as class ids must be whole numbers, got {ids.dtype}{fix}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise CodeError(f"{name} as class ids must be >= 0, got {low} in row {ids.argmin()}")
    if high >= MAX_CLASSES:
        raise CodeError(f"{name} hold class {high}; number classes from 0, at most {MAX_CLASSES:,} of them")
    if n_classes is not None and n_classes > MAX_CLASSES:
        raise CodeError(f"n_classes is {n_classes}; at most {MAX_CLASSES:,} classes are possible")
    if n_classes is not None and high >= n_classes:
        raise CodeError(f"{name} hold class {high}, but there are only {n_classes} classes")
    return high + 1 if n_classes is None else n_classes


def pack_labels(labels: Any) -> np.ndarray:
    """Label sets as uint64 words (n, ceil(n_classes / 64)): ``(a & b).any()`` is relevance."""
    labels = as_multi_hot(labels)
    n, n_classes = labels.shape
    n_words = max(1, -(-n_classes // 64))
    padded = np.zeros((n, n_words * 8), dtype=np.uint8)
    padded[:, : -(-n_classes // 8)] = np.packbits(labels, axis=1)
    return padded.view(np.uint64)


def share_label(a: Any, b: Any) -> np.ndarray:
    """bool (len(a), len(b)): whether the two share a label. For small inputs."""
    a, b = as_multi_hot(a), as_multi_hot(b)
    return _shared(a, b) > 0


def jaccard(a: Any, b: Any) -> np.ndarray:
    """float32 (len(a), len(b)): shared labels / all labels of the two; 0 for two empty sets."""
    a, b = as_multi_hot(a), as_multi_hot(b)
    shared = _shared(a, b)
    union = a.sum(axis=1, dtype=np.float32)[:, None] + b.sum(axis=1, dtype=np.float32) - shared
    return shared / np.maximum(union, 1)


def _shared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape[1] != b.shape[1]:
        raise CodeError(f"label widths differ: {a.shape[1]} and {b.shape[1]} classes")
    return a.astype(np.float32) @ b.astype(np.float32).T  # counts: exact in float32


@dataclass(frozen=True)
class PairCounts:
    """Unordered pairs of different rows: |S|, |S1|, and the sum of c_ij (Jaccard) over S1."""

    n_pairs: int
    n_similar: int
    jaccard_sum: float

    @property
    def n_dissimilar(self) -> int:
        return self.n_pairs - self.n_similar

    @property
    def ratio(self) -> float:
        """Dissimilar pairs per similar pair (infinite when nothing is similar)."""
        return self.n_dissimilar / self.n_similar if self.n_similar else float("inf")


def count_pairs(labels: Any) -> PairCounts:
    """Exact pair counts of a training set, without an n x n matrix.

    Rows with equal label sets are counted together: u distinct sets make u x u comparisons, done
    in blocks of at most PATTERN_BLOCK rows. 1,281,167 single-label rows of 1,000 classes are 1,000 sets.
    """
    labels = as_multi_hot(labels)
    n = len(labels)
    packed = pack_labels(labels)
    _, first, counts = np.unique(
        packed.view(f"V{packed.shape[1] * 8}").ravel(), return_index=True, return_counts=True
    )
    patterns = labels[first]
    n_similar, jaccard_sum = 0, 0.0
    at_once = min(PATTERN_BLOCK, max(1, PATTERN_CELLS // max(1, len(patterns))))
    for start in range(0, len(patterns), at_once):
        block = patterns[start : start + at_once]
        weight = counts[start : start + at_once]
        overlap = jaccard(block, patterns)  # (block, u)
        n_similar += int(weight @ ((overlap > 0) @ counts))
        jaccard_sum += float(weight @ (overlap.astype(np.float64) @ counts))
    labelled = int(labels.any(axis=1).sum())  # each labelled row was paired with itself once, c = 1
    return PairCounts(
        n_pairs=n * (n - 1) // 2,
        n_similar=(n_similar - labelled) // 2,
        jaccard_sum=(jaccard_sum - labelled) / 2,
    )


def to_lists(labels: Any) -> pa.Array:
    """Arrow list<int32> of the class ids of each multi-hot row, ascending."""
    import pyarrow as pa

    rows, classes = np.nonzero(as_multi_hot(labels))
    offsets = np.zeros(len(labels) + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=len(labels)), out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, classes.astype(np.int32))


def from_lists(lists: pa.Array | pa.ChunkedArray, n_classes: int) -> np.ndarray:
    """Multi-hot uint8 (n, n_classes) of an Arrow list<int32>; a null row is an empty set."""
    sets = LabelSets.from_arrow(lists, n_classes)
    multi_hot = np.zeros((len(sets), n_classes), dtype=np.uint8)
    multi_hot[np.repeat(np.arange(len(sets)), sets.per_row), sets.classes] = 1
    return multi_hot


def check_pairs(counts: PairCounts) -> PairCounts:
    """Returns ``counts``; DataError when there are no similar or no dissimilar pairs."""
    if counts.n_similar == 0 or counts.n_dissimilar == 0:
        kind = "similar" if counts.n_similar == 0 else "dissimilar"
        raise DataError(
            f"the training set has {counts.n_pairs:,} pairs and none is {kind}: there is nothing to "
            "learn; check the labels or the pairs table"
        )
    return counts


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
        labels = _ids_or_multi_hot(labels, n_classes, name)
        if labels.ndim == 1:
            width = _width(labels, n_classes, name)
            return cls(width, np.arange(len(labels) + 1), labels.astype(np.int32))
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
