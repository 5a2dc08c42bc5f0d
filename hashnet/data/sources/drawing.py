"""Procedural pictures: a class is an outline, two colours and a stripe pattern; a picture varies them.

Pictures are drawn in blocks by array operations, and a block depends on (seed, block number) alone:
the number of threads does not change a pixel.
"""

from __future__ import annotations

import io

import numpy as np

BLOCK = 128  # pictures drawn at once: 128 x 64 x 64 floats stay near the processor


def draw_block(classes: np.ndarray, side: int, seed: int, block: int) -> np.ndarray:
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


def encode_jpegs(pictures: np.ndarray, quality: int) -> list[bytes]:
    """One JPEG a picture of uint8 (n, side, side, 3)."""
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
    """What makes a class: drawn from (seed, class), so that adding classes changes none."""
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
    import colorsys

    return colorsys.hsv_to_rgb(hue, 0.85, value)
