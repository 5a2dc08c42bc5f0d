"""Confirmation of near-duplicates: of the pairs that codes find, those whose vectors agree, too.

``vectors`` compares the vectors that the codes were made from, by cosine after centring on a sample of the
store: the mean of the rows in question would lie between the two of a single pair. ``scores`` compares each
item's float outputs with the other's bits, both ways: 1 where every bit agrees, and a bit near zero counts
little. Memory: the vectors of the rows that have a near-duplicate, and of the sample.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hashnet.errors import DataError
from hashnet.run import Run

VECTORS, SCORES = "vectors", "scores"
THRESHOLDS = {VECTORS: 0.9, SCORES: 0.95}
ROWS = 65_536  # pairs that are compared at once
SAMPLE = 8192  # rows whose mean vectors are centred on
Confirmation = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids a and b (n,) → bool (n,)


def confirmation(
    run: Run, how: str, ids: np.ndarray, others: np.ndarray | None = None, threshold: float | None = None
) -> Confirmation:
    """A function that confirms pairs (a, b) of ``ids``, int64 ascending.

    With ``others``, ids of queries, b is one of these.
    """
    if not len(ids):
        return lambda a, b: np.zeros(len(a), dtype=bool)
    least = THRESHOLDS[how] if threshold is None else threshold
    sample = _sample(run) if how == VECTORS else ids
    left = _Rows(run, how, "database", np.union1d(ids, sample))
    right = left if others is None else _Rows(run, how, "query", others)
    if how == VECTORS:
        centre = left.of(sample).mean(axis=0, dtype=np.float64).astype(np.float32)
        left.values -= centre
        if right is not left:
            right.values -= centre

    def confirm(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        kept = np.zeros(len(a), dtype=bool)
        for start in range(0, len(a), ROWS):
            part = slice(start, start + ROWS)
            x, y = left.of(a[part]), right.of(b[part])
            kept[part] = (cosine(x, y) if how == VECTORS else agreement(x, y)) >= least
        return kept

    return confirm


def _sample(run: Run) -> np.ndarray:
    """Row ids int64, ascending, spread evenly over the code store."""
    ids = np.sort(run.codes.open().ids())
    return ids[np.linspace(0, len(ids) - 1, min(len(ids), SAMPLE)).astype(np.int64)]


class _Rows:
    """Vectors, or logits, of some rows."""

    def __init__(self, run: Run, how: str, split: str, ids: np.ndarray) -> None:
        blocks = list(run.vectors(split, ids))
        values = np.concatenate(blocks) if blocks else np.zeros((0, 1), np.float32)
        if len(values) != len(ids):
            raise DataError(
                f"{run.uri} has vectors of {len(values):,} of the {len(ids):,} {split} rows to confirm; run "
                f"jobs/encode_db.py output=features split={split} again"
            )
        self.ids, self.values = ids, np.array(values, dtype=np.float32)
        if how == SCORES:
            from hashnet.encoding import Encoder  # imports torch

            encoder = Encoder.load(run.model.uri)
            whole = run.manifest.open(verify=False).modality == "features"
            self.values = encoder.logits(self.values) if whole else encoder.head(self.values)

    def of(self, ids: np.ndarray) -> np.ndarray:
        return self.values[np.searchsorted(self.ids, ids)]


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """float (n,): the cosine of rows x and y (n, d); 1 for two zero rows, 0 for one.

    >>> cosine(np.array([[3.0, 4.0]]), np.array([[4.0, 3.0]])).round(2).tolist()
    [0.96]
    """
    product = np.einsum("ij,ij->i", x, y)
    sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return np.where(sizes > 0, product / np.where(sizes > 0, sizes, 1), (x == y).all(axis=1))


def agreement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """float (n,): how far logits x and y (n, n_bits) agree, -1 … 1: the mean of both asymmetric scores.

    >>> agreement(np.array([[2.0, 1.0]]), np.array([[1.0, -1.0]])).round(3).tolist()
    [0.167]
    """
    signs_x, signs_y = np.where(x >= 0, 1, -1), np.where(y >= 0, 1, -1)
    one = (x * signs_y).sum(axis=1) / np.maximum(np.abs(x).sum(axis=1), 1e-12)  # (2 - 1) / 3
    other = (y * signs_x).sum(axis=1) / np.maximum(np.abs(y).sum(axis=1), 1e-12)  # (1 - 1) / 2
    return (one + other) / 2
