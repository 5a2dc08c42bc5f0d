"""Where a batch's inputs come from: an array in memory, or pictures fetched and decoded on threads.

A source answers ``batch(rows, epoch) → (inputs, usable)``: inputs float (n, d) or uint8 (n, 3, h, w) as a
torch tensor, usable bool (n,), false for rows whose picture cannot be read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from hashnet.data import fetch_images, too_many_bad
from hashnet.errors import BadImage, DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from hashnet.data import Preprocess

logger = logging.getLogger(__name__)
PIECE = 8192  # rows that are looked at together: never a second copy of the whole array
ENOUGH_SEEN = 256  # pictures: among fewer, some bad ones say little about the rest
T = TypeVar("T")
R = TypeVar("R")


class Source(Protocol):
    """Inputs of training rows by position."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]: ...


class ArraySource:
    """Rows of an array: float features (n, d), or uint8 pictures (n, 3, h, w) taken as they are.

    ``usable`` bool (n,) marks rows that count; all do when it is not given.
    """

    def __init__(self, array: Any, usable: np.ndarray | None = None) -> None:
        array = np.asarray(array)
        self.usable = np.ones(len(array), dtype=bool) if usable is None else usable
        if array.dtype != np.uint8:
            array = array.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)
            finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
            if not finite.all():
                raise DataError(
                    f"{(~finite).sum():,} rows of the features hold NaN or infinity, the first is row "
                    f"{int((~finite).argmax())}; drop or repair them"
                )
        array = np.ascontiguousarray(array)
        # Arrow's memory is read-only, which torch does not know
        self.array = torch.from_numpy(array if array.flags.writeable else array.copy())

    def __len__(self) -> int:
        return len(self.array)

    def batch(self, rows: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        return self.array[torch.from_numpy(rows)], self.usable[rows]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation per column of the usable rows, in float64 and in pieces."""
        chosen = torch.from_numpy(np.flatnonzero(self.usable))
        total = square = torch.zeros(self.array.shape[1:], dtype=torch.float64)
        for rows in chosen.split(PIECE):
            total = total + self.array[rows].sum(dim=0, dtype=torch.float64)
        mean = total / max(len(chosen), 1)
        for rows in chosen.split(PIECE):
            square = square + (self.array[rows] - mean).square().sum(dim=0)
        return mean, (square / max(len(chosen), 1)).sqrt()


class ImageSource:
    """Pictures of a manifest's rows, decoded and augmented on ``threads`` threads.

    The augmentation of a row is a function of (seed, epoch, row id). ``train=False`` takes the centre
    crop. More than ``max_bad_fraction`` unreadable pictures (of those seen) stop the training.
    """

    def __init__(
        self,
        table: pa.Table,
        preprocess: Preprocess,
        *,
        seed: int = 0,
        train: bool = True,
        threads: int = 2,
        base_uri: str | None = None,
        max_bad_fraction: float = 0.05,
    ) -> None:
        self.table, self.preprocess, self.seed, self.train = table, preprocess, seed, train
        self.base_uri, self.max_bad_fraction = base_uri, max_bad_fraction
        self.row_ids = table.column("row_id").to_numpy()
        self.bad: dict[int, str] = {}
        self._seen = np.zeros(len(self.row_ids), dtype=bool)
        self.threads = threads

    def __len__(self) -> int:
        return len(self.row_ids)

    def batch(self, rows: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        found = fetch_images(self.table.take(rows), base_uri=self.base_uri)
        ids = self.row_ids[rows]
        if self.train:
            pictures, bad = self.preprocess.train_many(found, self.seed, epoch, ids, threads=self.threads)
        else:
            pictures, bad = self.preprocess.eval_many(found, threads=self.threads)
        usable = np.ones(len(rows), dtype=bool)
        for i, error in bad.items():
            usable[i] = False
            self._note(int(ids[i]), self.table["uri"][int(rows[i])].as_py(), error)
        self._check(rows)
        return torch.from_numpy(pictures), usable

    def _note(self, row_id: int, uri: str | None, error: BadImage) -> None:
        if row_id not in self.bad:
            self.bad[row_id] = error.reason
            logger.warning("row %d (%s) is left out of training: %s", row_id, uri, error)

    def _check(self, rows: np.ndarray) -> None:
        self._seen[rows] = True
        if not self.bad:
            return
        seen = int(self._seen.sum())
        if too_many_bad(len(self.bad), max(seen, min(ENOUGH_SEEN, len(self))), self.max_bad_fraction):
            row_id, reason = next(iter(self.bad.items()))
            raise DataError(
                f"{len(self.bad)} of the first {seen} pictures cannot be used (row {row_id}: "
                f"{reason}); repair the manifest or raise max_bad_fraction ({self.max_bad_fraction})"
            )


def prefetch(make: Callable[[T], R], items: Iterable[T], depth: int = 2) -> Iterator[R]:
    """``make(item)`` for each item in order, ``depth`` of them ahead on one thread; 0: none ahead."""
    if depth < 1:
        yield from map(make, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
