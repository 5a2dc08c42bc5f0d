"""``synthetic``: procedurally drawn JPEG pictures, any number of them, for trials and scale tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hashnet.data import shards
from hashnet.data.class_lists import class_sets
from hashnet.data.files import beside
from hashnet.data.rows import SourceRows
from hashnet.data.sources.drawing import BLOCK, draw_block, encode_jpegs
from hashnet.errors import DataError
from hashnet.io import key, storage

WRITES = True  # pictures beside the manifest, unless they are few
INLINE_UP_TO = 10_000  # pictures kept inside the manifest by store=auto
SHARD = 64 * BLOCK  # 8,192 pictures in a tar or Parquet file


@dataclass(frozen=True)
class Options:
    n_images: int = key(2_000, "how many pictures", low=1)
    n_classes: int = key(10, "how many classes", low=1)
    labels_per_image: int = key(
        1, "at most so many objects in a picture; above 1 it is multi-label", low=1, high=4
    )
    imbalance: float = key(1.0, "how often the commonest class appears per appearance of the rarest", low=1)
    side: int = key(64, "width and height in pixels", low=8, high=2048)
    quality: int = key(85, "of the JPEG", low=1, high=95)
    broken: float = key(
        0.0, "share of the pictures that are cut off in the middle, to try what happens", low=0, high=1
    )
    store: str = key(
        "auto",
        f"where the pictures go; auto: inside up to {INLINE_UP_TO:,}, else tar",
        choices=("auto", *shards.STORES),
    )
    images: str | None = key(None, "folder for tar, parquet and files (default: OUT with -images)")
    seed: int = key(0, "seed of pictures and splits", low=0)


def load(options: Options, out: str | None) -> SourceRows:
    """Rows whose pictures are drawn when they are written."""
    classes = _draw_classes(options)
    store = options.store
    if store == "auto":
        store = "inline" if options.n_images <= INLINE_UP_TO else "tar"
    broken = np.random.default_rng([options.seed, 3]).random(options.n_images) < options.broken
    folder = ""
    if store != "inline":
        if options.images is None and out is None:
            raise DataError("give images=FOLDER: the pictures need a place")
        folder = storage.absolute(options.images or beside(str(out), "-images"))
    lists = _label_lists(classes)

    def payload(start: int, stop: int) -> pa.Table:
        names = [f"{i:09d}.jpg" for i in range(start, stop)]
        pictures = _pictures(options, classes[start:stop], broken[start:stop], start)
        return shards.keep(store, folder, start // SHARD, names, pictures, lists[start:stop])

    if folder and storage.list_names(folder):
        raise DataError(f"{folder} is not empty; remove it or choose another folder with images=")
    return SourceRows(
        n=options.n_images,
        payload=payload,
        labels=lists,
        n_classes=options.n_classes,
        names=pa.array([f"{i:09d}.jpg" for i in range(options.n_images)]),
        inline=store == "inline",
        block_rows=SHARD,
        undo=(lambda: storage.delete(folder)) if folder else None,
    )


def _draw_classes(options: Options) -> np.ndarray:
    """int64 (n, labels_per_image): different classes of each picture, -1 for none."""
    rng = np.random.default_rng([options.seed, 0])
    n, c, m = options.n_images, options.n_classes, min(options.labels_per_image, options.n_classes)
    steps = np.arange(c) / max(c - 1, 1)
    weight = options.imbalance**-steps  # geometric: the first is ``imbalance`` times as common as the last
    classes = rng.choice(c, size=(n, m), p=weight / weight.sum())
    present = np.arange(m) < rng.integers(1, m + 1, size=(n, 1))
    for slot in range(1, m):  # no class twice in a picture
        twice = (classes[:, :slot] == classes[:, slot : slot + 1]).any(axis=1)
        present[twice, slot] = False
    return np.where(present, classes, -1)


def _label_lists(classes: np.ndarray) -> pa.Array:
    rows, slots = np.nonzero(classes >= 0)
    return class_sets(rows, classes[rows, slots], len(classes))


def _pictures(options: Options, classes: np.ndarray, broken: np.ndarray, start: int) -> Iterator[bytes]:
    """JPEG bytes in order, drawn by as many threads as there are processors."""

    def one(first: int) -> list[bytes]:
        part = slice(first, first + BLOCK)
        drawn = draw_block(classes[part], options.side, options.seed, (start + first) // BLOCK)
        files = encode_jpegs(drawn, options.quality)
        return [
            file[: len(file) // 2] if bad else file for file, bad in zip(files, broken[part], strict=True)
        ]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for files in pool.map(one, range(0, len(classes), BLOCK)):
            yield from files
