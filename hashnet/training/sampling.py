"""Which rows are in which batch: a function of (seed, step), never of the number of workers.

A batch is a list of positions in the training set. Workers take equal slices of it; what does not
fill the slices is padding, marked invalid.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np


class Share(NamedTuple):
    """One worker's part of a batch, and the whole batch, padded to the same size for every worker."""

    rows: np.ndarray  # int64 (batch / workers,), this worker's
    all_rows: np.ndarray  # int64 (batch,), every worker's, in rank order
    valid: np.ndarray  # bool (batch,), false for padding
    first: int  # where this worker's rows begin in all_rows


class Sampler(Protocol):
    """``rows_of(step)``: positions in the batch of that step, int64; at most ``batch_size`` of them."""

    batch_size: int
    steps_per_epoch: int

    def rows_of(self, step: int) -> np.ndarray: ...


class RowSampler:
    """Every row once an epoch, in an order drawn from (seed, epoch); the last batch may be shorter."""

    def __init__(self, n_rows: int, batch_size: int, seed: int) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, min(batch_size, n_rows), seed
        self.steps_per_epoch = -(-n_rows // self.batch_size)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def rows_of(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.n_rows)
            self._epoch = epoch
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]


class PairSampler:
    """Batches around listed pairs: batch_size / 2 pairs at a time, then the different rows in them.

    The list is walked in an order drawn from (seed, pass), then walked again in another. An epoch is as
    many batches as would show each row once, so that a schedule in epochs means the same as elsewhere.
    """

    def __init__(self, a: Any, b: Any, batch_size: int, seed: int) -> None:
        self.a, self.b = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
        self.batch_size, self.seed = batch_size, seed
        n_rows = len(np.unique(np.concatenate([self.a, self.b])))
        self.steps_per_epoch = max(1, -(-n_rows // batch_size))

    def rows_of(self, step: int) -> np.ndarray:
        n_pairs, half = len(self.a), max(1, self.batch_size // 2)
        places = np.arange(step * half, (step + 1) * half)  # on the endless walk
        chosen = np.empty(half, dtype=np.int64)
        for walk in np.unique(places // n_pairs):
            here = places // n_pairs == walk
            chosen[here] = self._order(int(walk))[places[here] % n_pairs]
        return np.unique(np.concatenate([self.a[chosen], self.b[chosen]]))

    def _order(self, walk: int) -> np.ndarray:
        return np.random.default_rng([self.seed, walk]).permutation(len(self.a))


def share(rows: np.ndarray, batch_size: int, rank: int, world: int) -> Share:
    """Worker ``rank``'s slice of a batch; every worker's slice has ceil(batch_size / world) rows."""
    per_worker = -(-batch_size // world)
    valid = np.zeros(per_worker * world, dtype=bool)
    valid[: len(rows)] = True
    padded = np.full(per_worker * world, rows[0], dtype=np.int64)  # padding repeats a row, and is masked
    padded[: len(rows)] = rows
    first = rank * per_worker
    return Share(padded[first : first + per_worker], padded, valid, first)
