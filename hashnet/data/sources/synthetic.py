"""``synthetic``: procedurally drawn JPEG pictures, any number of them, for trials and scale tests.

A class is an outline, two colours and a stripe pattern; each picture varies them. Pictures are drawn in
blocks by array operations, and a block depends on (seed, block number) alone: the number of threads does
not change a pixel. They are stored inside the manifest, or in tars beside it.
"""

from __future__ import annotations

import colorsys
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hashnet.data.columns import lists_of_pairs, with_suffix
from hashnet.data.fetch import byte_range_uris
from hashnet.data.writer import SourceRows
from hashnet.errors import DataError
from hashnet.io import key, storage

WRITES = True  # pictures beside the manifest, unless they are few
BLOCK = 128  # pictures drawn at once: 128 x 64 x 64 floats stay near the processor
SHARD = 64 * BLOCK  # 8,192 pictures in a tar
INLINE_UP_TO = 10_000  # pictures inside the manifest by default; more go into tars


@dataclass(frozen=True)
class Options:
    n_images: int = key(2_000, "how many pictures", low=1)
    n_classes: int = key(10, "how many classes", low=1)
    labels_per_image: int = key(
        1, "most objects in a picture; above 1 the data set is multi-label", low=1, high=4
    )
    imbalance: float = key(1.0, "how many times as frequent the commonest class is as the rarest", low=1)
    side: int = key(64, "width and height in pixels", low=8, high=2048)
    quality: int = key(85, "of the JPEG", low=1, high=95)
    broken: float = key(
        0.0, "fraction of the pictures that are truncated, to try how they are handled", low=0, high=1
    )
    store: str | None = key(
        None,
        f"where the pictures go (default: inline up to {INLINE_UP_TO:,} pictures, else tar)",
        choices=("inline", "tar"),
    )
    images: str | None = key(None, "folder for the tars (default: OUT with -images)")
    seed: int = key(0, "seed of pictures and splits", low=0)


def load(options: Options, out: str | None) -> SourceRows:
    """Rows whose pictures are drawn while the manifest is written."""
    classes = _draw_classes(options)
    store = options.store or ("inline" if options.n_images <= INLINE_UP_TO else "tar")
    broken = np.random.default_rng([options.seed, 3]).random(options.n_images) < options.broken
    folder = ""
    if store != "inline":
        if options.images is None and out is None:
            raise DataError("give images=FOLDER, the folder to write the pictures to")
        folder = storage.absolute(options.images or with_suffix(str(out), "-images"))
    lists = _label_lists(classes)

    def payload(start: int, stop: int) -> pa.Table:
        names = [f"{i:09d}.jpg" for i in range(start, stop)]
        pictures = _pictures(options, classes[start:stop], broken[start:stop], start)
        if store == "inline":
            uris = [f"seed-{options.seed}/{name}" if options.seed else name for name in names]
            return pa.table({"uri": pa.array(uris), "image": pa.array(list(pictures), pa.binary())})
        tar = storage.join(folder, f"shard-{start // SHARD:05d}.tar")
        return pa.table({"uri": _write_tar(tar, names, pictures, lists[start:stop])})

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
    """int64 (n, labels_per_image): the distinct classes of each picture, -1 for none."""
    rng = np.random.default_rng([options.seed, 0])
    n, c, m = options.n_images, options.n_classes, min(options.labels_per_image, options.n_classes)
    steps = np.arange(c) / max(c - 1, 1)
    weight = (
        options.imbalance**-steps
    )  # geometric: the first class is ``imbalance`` times as frequent as the last
    classes = rng.choice(c, size=(n, m), p=weight / weight.sum())
    present = np.arange(m) < rng.integers(1, m + 1, size=(n, 1))
    for slot in range(1, m):  # no class twice in a picture
        twice = (classes[:, :slot] == classes[:, slot : slot + 1]).any(axis=1)
        present[twice, slot] = False
    return np.where(present, classes, -1)


def _label_lists(classes: np.ndarray) -> pa.Array:
    rows, slots = np.nonzero(classes >= 0)
    return lists_of_pairs(rows, classes[rows, slots], len(classes))


def _pictures(options: Options, classes: np.ndarray, broken: np.ndarray, start: int) -> Iterator[bytes]:
    """JPEG bytes in order, drawn by one thread per processor."""

    def one(first: int) -> list[bytes]:
        part = slice(first, first + BLOCK)
        drawn = _draw_block(classes[part], options.side, options.seed, (start + first) // BLOCK)
        files = _encode_jpegs(drawn, options.quality)
        return [
            file[: len(file) // 2] if bad else file for file, bad in zip(files, broken[part], strict=True)
        ]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for files in pool.map(one, range(0, len(classes), BLOCK)):
            yield from files


def _write_tar(uri: str, names: list[str], pictures: Iterable[bytes], labels: pa.Array) -> pa.Array:
    """Uris of the pictures in a WebDataset tar: KEY.jpg, and KEY.json with the labels; no time, no owner."""
    offsets, sizes = [], []
    with (
        storage.open_output(uri) as sink,
        tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, picture, classes in zip(names, pictures, labels.to_pylist(), strict=True):
            offsets.append(tar.offset + tarfile.BLOCKSIZE)  # after the member's header
            sizes.append(len(picture))
            about = json.dumps({"labels": classes}).encode()
            for member, data in ((name, picture), (f"{name.rpartition('.')[0]}.json", about)):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return byte_range_uris(uri, offsets, sizes)


def _draw_block(classes: np.ndarray, side: int, seed: int, block: int) -> np.ndarray:
    """uint8 (n, side, side, 3); ``classes`` int (n, m) are the objects of each picture, -1 for none."""
    n, m = classes.shape
    rng = np.random.default_rng([seed, 2, block])
    axis = (np.arange(side, dtype=np.float32) + 0.5) / side
    picture = _background(rng, n, axis)  # (n, side, side, 3) in 0..1
    crowd = np.maximum((classes >= 0).sum(axis=1), 1)  # objects per picture
    places = rng.permuted(np.tile(np.arange(4), (n, 1)), axis=1)  # a quarter of the picture each
    for slot in range(m):
        here = np.flatnonzero(classes[:, slot] >= 0)
        if len(here) == 0:
            continue
        alone = crowd[here] == 1
        quarter = places[here, slot % 4]
        cx = np.where(alone, 0.5, 0.28 + 0.44 * (quarter % 2)) + rng.uniform(-0.08, 0.08, len(here))
        cy = np.where(alone, 0.5, 0.28 + 0.44 * (quarter // 2)) + rng.uniform(-0.08, 0.08, len(here))
        size = np.where(alone, 0.30, 0.18) * rng.uniform(0.85, 1.15, len(here))
        turn, light = rng.uniform(-0.3, 0.3, len(here)), rng.uniform(0.8, 1.1, len(here))
        cover, colour = _objects(classes[here, slot], seed, axis, cx, cy, size, turn, light)
        picture[here] += cover[..., None] * (colour - picture[here])
    noise = rng.integers(-10, 11, picture.shape[:3], dtype=np.int8)[..., None] / np.float32(255)
    return (np.clip(picture + noise, 0, 1) * 255).astype(np.uint8)


def _encode_jpegs(pictures: np.ndarray, quality: int) -> list[bytes]:
    """One JPEG per picture of uint8 (n, side, side, 3)."""
    from PIL import Image

    out = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=quality)
        out.append(file.getvalue())
    return out


def _background(rng: np.random.Generator, n: int, axis: np.ndarray) -> np.ndarray:
    """A soft gradient between two muted random colours, in a random direction."""
    first, second = rng.uniform(0.25, 0.75, (2, n, 1, 1, 3)).astype(np.float32)
    angle = rng.uniform(0, 2 * np.pi, (n, 1, 1)).astype(np.float32)
    along = 0.5 + (axis[None, None, :] - 0.5) * np.cos(angle) + (axis[None, :, None] - 0.5) * np.sin(angle)
    return first + along[..., None] * (second - first)


def _objects(
    classes: np.ndarray,
    seed: int,
    axis: np.ndarray,
    cx: np.ndarray,
    cy: np.ndarray,
    size: np.ndarray,
    turn: np.ndarray,
    light: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Cover (k, side, side) in 0..1 and colour (k, side, side, 3) of one object in each of k pictures."""
    look = _looks(classes, seed)

    def wide(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32)[:, None, None]

    dx, dy = axis[None, None, :] - wide(cx), axis[None, :, None] - wide(cy)
    distance = np.sqrt(dx * dx + dy * dy)
    direction = np.arctan2(dy, dx) + wide(turn)
    outline = 1 + wide(look["depth"]) * np.cos(wide(look["lobes"]) * direction + wide(look["phase"]))
    cover = np.clip((wide(size) * outline - distance) * len(axis) + 0.5, 0, 1)  # soft by one pixel
    angle = wide(look["angle"] + turn)
    wave = np.sin((dx * np.cos(angle) + dy * np.sin(angle)) * wide(look["waves"] / size))
    stripe = (wave > 0)[..., None]
    colour = np.where(stripe, look["first"][:, None, None], look["second"][:, None, None])
    return cover, colour * wide(light)[..., None]


def _looks(classes: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """The look of each class, drawn from (seed, class), so that adding classes changes none."""
    found, where = np.unique(classes, return_inverse=True)
    rows = []
    for class_id in found:
        rng = np.random.default_rng([seed, 1, int(class_id)])
        hue = (class_id * 0.618034 + rng.uniform(-0.05, 0.05)) % 1  # golden ratio: neighbours differ
        other = (hue + rng.uniform(0.25, 0.75)) % 1
        rows.append(
            {
                "lobes": rng.integers(2, 8),
                "depth": rng.uniform(0.15, 0.45),
                "phase": rng.uniform(0, 2 * np.pi),
                "waves": rng.choice([0.0, 4.0, 7.0, 11.0]),
                "angle": rng.uniform(0, np.pi),
                "first": _rgb(hue, rng.uniform(0.55, 1)),
                "second": _rgb(other, rng.uniform(0.55, 1)),
            }
        )
    return {name: np.array([row[name] for row in rows], dtype=np.float32)[where] for name in rows[0]}


def _rgb(hue: float, value: float) -> tuple[float, float, float]:
    return colorsys.hsv_to_rgb(hue, 0.85, value)
