"""The inputs of rows: from an array in memory, or pictures fetched and decoded on threads.

A source has ``batch(rows, epoch) → (inputs, usable)``: inputs float (n, d) or uint8 (n, 3, h, w) as a torch
tensor, usable bool (n,), false for rows whose picture cannot be read. ``open_rows`` makes one for rows of a
manifest; ``held_out`` draws the validation rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from hashnet import labels as label_sets
from hashnet.data import (
    Manifest,
    feature_matrix,
    feature_rows,
    fetch_images,
    ordinary_rows,
    too_many_bad,
    varying_columns,
)
from hashnet.errors import BadImage, DataError
from hashnet.kernels import default_threads
from hashnet.models import HashModel
from hashnet.training.train_config import TrainConfig

if TYPE_CHECKING:
    import pyarrow as pa

    from hashnet.data import Preprocess

logger = logging.getLogger(__name__)
MIN_SEEN = 256  # pictures: the share of bad ones among fewer says little about the rest
SAMPLE_ROWS, COARSE = 2048, 4.0  # a deviation of fewer steps of float32 is lost in rounding
HELD_OUT_SEED = 20171  # not the run's seed: every trial of a sweep is scored on the same rows
T = TypeVar("T")
R = TypeVar("R")


class InputSource(Protocol):
    """Inputs of rows by position."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]: ...


class ArraySource:
    """Rows of an array: float features (n, d), or uint8 pictures (n, 3, h, w) taken as they are.

    ``usable`` bool (n,) marks the rows that count; None: all do.
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
        # Arrow's memory is read-only, which torch does not support
        self.array = torch.from_numpy(array if array.flags.writeable else array.copy())

    def __len__(self) -> int:
        return len(self.array)

    def batch(self, rows: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        return self.array[torch.from_numpy(rows)], self.usable[rows]


class ImageSource:
    """Pictures of a manifest's rows, decoded and augmented on ``threads`` threads.

    The augmentation of a row is a function of (seed, epoch, row id). ``train=False`` takes the centre
    crop. DataError when more than ``max_bad_fraction`` of the pictures seen are unreadable.
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
            _warn_once(row_id, uri, str(error))

    def _check(self, rows: np.ndarray) -> None:
        self._seen[rows] = True
        if not self.bad:
            return
        seen = int(self._seen.sum())
        if too_many_bad(len(self.bad), max(seen, min(MIN_SEEN, len(self))), self.max_bad_fraction):
            row_id, reason = next(iter(self.bad.items()))
            raise DataError(
                f"{len(self.bad)} of the first {seen} pictures cannot be used (row {row_id}: "
                f"{reason}); repair the manifest or raise max_bad_fraction ({self.max_bad_fraction})"
            )


@lru_cache(maxsize=10_000)
def _warn_once(row_id: int, uri: str | None, error: str) -> None:
    """Training reads a picture through several sources: to learn from it, to measure, to find neighbours."""
    logger.warning("row %d (%s) is left out of training: %s", row_id, uri, error)


class ViewSource:
    """Activations of several views of each picture, float16 (views, n, width), one of them per epoch.

    A row's views follow each other from epoch to epoch; a batch has rows of all of them.
    """

    def __init__(self, views: np.ndarray, shape: tuple[int, ...], usable: np.ndarray) -> None:
        self.views, self.shape, self.usable = views, shape, usable

    def __len__(self) -> int:
        return self.views.shape[1]

    def batch(self, rows: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        chosen = self.views[(rows + epoch) % len(self.views), rows].astype(np.float32)
        return torch.from_numpy(chosen).view(len(rows), *self.shape), self.usable[rows]


def picture_reader(
    source: InputSource, rows: np.ndarray, epoch: int = 0
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The function with which BackboneFeatures reads the pictures of these rows of a source."""

    def read(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs, usable = source.batch(rows[at], epoch)
        return inputs.numpy(), usable

    return read


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a manifest: ids, multi-hot labels (None where it has none), and the source of their inputs."""

    row_ids: np.ndarray
    labels: np.ndarray | None
    source: InputSource

    def __len__(self) -> int:
        return len(self.row_ids)


def open_rows(
    manifest: Manifest,
    split: str,
    model: HashModel,
    config: TrainConfig,
    *,
    train: bool = False,
    positions: np.ndarray | None = None,
    lenient: bool = False,
) -> LabelledRows:
    """The rows of a split (those at ``positions`` in it, or all); ``train`` turns augmentation on.

    ``lenient`` marks rows that cannot be used, however many, and raises nothing: a trained model is not lost.
    """
    columns = ["row_id", "labels"]
    columns += ["feature"] if manifest.modality == "features" else ["uri"] + ["image"] * manifest.inline
    table = manifest.read(split, columns=columns)
    if positions is not None:
        table = table.take(positions)
    labels = label_sets.from_lists(table["labels"], manifest.n_classes) if manifest.n_classes else None
    return LabelledRows(
        table["row_id"].to_numpy(), labels, _source(table, manifest, model, config, train, lenient)
    )


def _source(
    table: pa.Table, manifest: Manifest, model: HashModel, config: TrainConfig, train: bool, lenient: bool
) -> InputSource:
    if manifest.modality == "features":
        if not lenient:
            return ArraySource(feature_matrix(table))
        features, reasons = feature_rows(table)
        good = reasons.is_null().to_numpy(zero_copy_only=False)
        return ArraySource(np.where(good[:, None], features, 0), good)
    assert model.spec.preprocess is not None
    return ImageSource(
        table,
        model.spec.preprocess,
        seed=config.seed,
        train=train,
        threads=config.threads or default_threads(),
        base_uri=config.base_uri,
        max_bad_fraction=1.0 if lenient else config.max_bad_fraction,
    )


def check_features(source: ArraySource) -> None:
    """Marks a few rows out of all proportion as unusable; DataError where all columns are constant."""
    array = source.array.numpy()
    ordinary = ordinary_rows(array)
    kept = array if ordinary.all() else array[ordinary]
    varying = varying_columns(kept)
    if not ordinary.all():
        logger.warning(
            "%d of %d training rows are over 100 times as large as the median, the first is row %d: nothing "
            "is learnt from them",
            (~ordinary).sum(), len(array), ordinary.argmin(),
        )  # fmt: skip
        source.usable = source.usable & ordinary
    _warn_coarse(kept[:SAMPLE_ROWS, varying].astype(np.float64), array.shape[1])


def _warn_coarse(sample: np.ndarray, n_columns: int) -> None:
    """A warning where the mean of most columns leaves float32 no digits for how they vary."""
    step = np.spacing(np.abs(sample).max(axis=0).astype(np.float32))  # between neighbouring numbers
    coarse = sample.std(axis=0) < COARSE * step
    if coarse.mean() > 0.5:
        logger.warning(
            "%d of %d columns of the features vary by hardly more than float32 can tell beside their mean "
            "(up to %.3g): subtract the mean before they are stored",
            coarse.sum(), n_columns, np.abs(sample.mean(axis=0)).max(),
        )  # fmt: skip


def held_out(n_rows: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions (kept, held out), ascending: a fixed draw of ``share`` of the training rows.

    DataError when a share leaves fewer than two rows to learn from, or holds out fewer than two.
    """
    order = np.random.default_rng([HELD_OUT_SEED, n_rows]).permutation(n_rows)
    n_held = round(share * n_rows)
    if share and min(n_held, n_rows - n_held) < 2:
        raise DataError(
            f"validation={share} of {n_rows} training rows holds {n_held} out and keeps {n_rows - n_held}; "
            "two of each are needed: use more rows or another share, or leave validation out"
        )
    return np.sort(order[n_held:]), np.sort(order[:n_held])


def prefetch(make: Callable[[T], R], items: Iterable[T], depth: int = 2) -> Iterator[R]:
    """``make(item)`` for each item in order, ``depth`` of them made ahead on one thread; 0: none."""
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
