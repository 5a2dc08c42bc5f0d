"""Bytes of a picture → uint8 pixels: THE decoding and preprocessing, for training and encoding alike.

Decoding, scaling and resampling change pixels, and code bits near zero flip with them: so there is
one implementation, with a version that is part of the lineage of models and code stores. Pillow opens
every file. Pixels of a plain JPEG come from libjpeg-turbo without a detour (simplejpeg), all others from
Pillow: the same pixels, as both ask that library for the same. Resampling (``kernels.resampling``) uses
fixed-point numbers, equal on every processor and to Pillow's.

A JPEG at least twice as large as needed is decoded at 1/2, 1/4 or 1/8 of its size (scaled inverse
DCT), which is deterministic and, on a 12-megapixel photo, eight times as fast.

>>> import io, PIL.Image
>>> file = io.BytesIO()
>>> PIL.Image.new("L", (40, 30), 128).save(file, "PNG")
>>> decode(file.getvalue()).shape
(30, 40, 3)
>>> Preprocess(resize=20, crop=16).eval(file.getvalue()).shape
(3, 16, 16)
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.errors import BadImage, ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

PREPROCESS_VERSION = "1"  # change it with anything below that changes a pixel
MAX_PIXELS = 100_000_000  # 300 MB decoded; a larger picture is a mistake or an attack
MAX_SIDE = 65_535  # as of a JPEG: 1 x 49,000,000 pixels in 95 kB of PNG take seconds to resize
PLAIN_PIXELS = 4_000_000  # of a JPEG that a GPU decodes, together with others
# Pillow opens more than pictures (EPS starts Ghostscript): only these are tried.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ORIENTATION = 0x0112  # the EXIF tag
BACKGROUND = (255, 255, 255)  # behind transparent pixels


def decode(data: bytes | Image, at_least: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """uint8 (height, width, 3) RGB of an encoded picture or a PIL picture, upright; BadImage without one.

    JPEG, PNG, WebP, BMP, GIF (first frame), TIFF and PPM; gray, palette, CMYK and 16-bit pictures
    become RGB, transparent ones get a white background; floating-point ones are refused. With ``at_least`` a
    large JPEG comes out smaller, its shorter side not below that many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    _quiet()
    if isinstance(data, bytes) and len(data) == 0:
        raise BadImage("empty", "0 bytes")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS) if isinstance(data, bytes) else data
        width, height = picture.size
        if width * height > max_pixels or max(width, height) > MAX_SIDE:
            raise BadImage(
                "too_large",
                f"{width} x {height} pixels; at most {max_pixels:,}, and {MAX_SIDE:,} per side, are decoded",
            )
        if at_least is not None and isinstance(data, bytes) and picture.format in ("JPEG", "MPO"):
            picture.draft(None, (at_least, at_least))
        if isinstance(data, bytes) and picture.size == (width, height):
            pixels = _plain_jpeg(data, picture)
            if pixels is not None:
                return pixels
        picture.load()
        return np.asarray(_to_rgb(_upright(picture)))
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage("too_large", str(error)) from error
    except UnidentifiedImageError as error:
        assert isinstance(data, bytes)
        detail = (
            f"no picture in a format that is read here ({', '.join(FORMATS)}); it starts with {data[:8]!r}"
        )
        raise BadImage("unknown_format", detail) from error
    # A damaged file may raise nearly anything from a decoder; it must not end an encoding job.
    except Exception as error:
        raise BadImage("corrupt", f"{type(error).__name__}: {error}") from error


def _plain_jpeg(data: bytes, picture: Image) -> np.ndarray | None:
    """Pixels of a gray or coloured JPEG that is upright and sound; None for every other picture.

    Pillow takes a fifth longer for the same pixels, and as long again to hand them over.
    """
    if picture.format != "JPEG" or picture.mode not in ("RGB", "L") or _orientation(picture) != 1:
        return None
    import simplejpeg

    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:  # damaged, or of a rare kind: Pillow decides
        return None
    return pixels if pixels.shape[1::-1] == picture.size else None


def is_plain_jpeg(data: bytes | BadImage, preprocess: Preprocess) -> bool:
    """Whether a decoder for ordinary JPEGs, as GPUs have one, sees in it what ``decode`` sees.

    Such a JPEG is whole, upright, and gray or YCbCr: a GPU's decoder knows no EXIF, may take any three
    components for YCbCr, and need not notice that the end is missing. It is also of ordinary size: one of
    twice the size needed is cheap here, where it is decoded at half its size.
    """
    from PIL import Image

    if not isinstance(data, bytes) or not (data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9")):
        return False
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            components = [layer[0] for layer in picture.layer]  # type: ignore[attr-defined]
            return (
                picture.format == "JPEG"
                and (picture.mode == "L" or (picture.mode == "RGB" and components == [1, 2, 3]))
                and picture.info.get("adobe_transform", 1) == 1
                and _orientation(picture) == 1
                and min(picture.size) < 2 * preprocess.resize
                and picture.width * picture.height <= PLAIN_PIXELS
            )
    except Exception:  # ``decode`` says what is wrong with it
        return False


@lru_cache(maxsize=1)
def _quiet() -> None:
    """Silences Pillow about large pictures (MAX_PIXELS refuses them) and broken EXIF (ignored)."""
    warnings.filterwarnings("ignore", module="PIL")


def _upright(picture: Image) -> Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture) if _orientation(picture) != 1 else picture


def _orientation(picture: Image) -> int:
    """The EXIF orientation; 1, upright, where there is none."""
    if "exif" not in picture.info and picture.format not in ("TIFF", "MPO"):
        return 1
    try:
        return picture.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF has many writers; a picture with a broken one is still a picture
        return 1


def _to_rgb(picture: Image) -> Image:
    from PIL import Image

    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I"):  # 16-bit gray: convert() would clip it at 255
        values = np.asarray(picture).astype(np.int64).clip(0, 65_535)
        return Image.fromarray(((values * 255 + 32_767) // 65_535).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":  # 0..1, 0..255 or metres: convert() would clip them all alike
        raise BadImage("unsupported", "floating-point pixels of unknown range; store it with 8 or 16 bits")
    if picture.has_transparency_data:
        above = picture.convert("RGBA")
        below = Image.new("RGBA", above.size, (*BACKGROUND, 255))
        return Image.alpha_composite(below, above).convert("RGB")
    return picture.convert("RGB")


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of a backbone: resize, crop, and the mean and std of its normalisation.

    The shorter side becomes ``resize`` (with ``keep_aspect=False`` both sides do), then a square of
    ``crop`` is cut out. Pixels stay uint8; ``mean`` and ``std`` are for values scaled to 0..1 and are
    applied on the device, by the model.
    """

    resize: int = 256
    crop: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    keep_aspect: bool = True
    flip: bool = True  # in training; off where left and right differ in meaning, as in digits
    min_area: float = 0.0  # in training: of a crop of random size, as a share of the picture; 0: fixed size
    average_flip: bool = False  # features are the mean of those of the picture and of its mirror image

    def __post_init__(self) -> None:
        if not 0 < self.crop <= self.resize:
            raise ConfigError(
                f"crop must be at least 1 and at most resize, got {self.crop} and {self.resize}"
            )
        if not 0 <= self.min_area <= 1:
            raise ConfigError(f"min_area is a share of the picture, from 0 to 1, got {self.min_area}")
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, about: dict[str, Any]) -> Preprocess:
        return cls(**about)

    def eval(self, data: bytes | Image) -> np.ndarray:
        """uint8 (3, crop, crop): the centre, of encoded bytes or of a PIL picture."""
        picture = decode(data, self.resize)
        height, width = self.resized(*picture.shape[:2])
        return self._cut(picture, (width - self.crop) // 2, (height - self.crop) // 2)

    def train(self, data: bytes, seed: int, epoch: int, row_id: int) -> np.ndarray:
        """uint8 (3, crop, crop) at a random place, flipped or not; it depends on the three numbers alone.

        With ``min_area`` the part that is cut out has a random size and shape, too (RandomResizedCrop).
        """
        picture = decode(data, self.resize)
        across, down, mirror, *sizes = _draws(seed, epoch, row_id, 5)
        if self.min_area:
            pixels = self._cut_any_size(picture, *(number / 2**64 for number in (across, down, *sizes)))
        else:
            height, width = self.resized(*picture.shape[:2])
            left, top = across % (width - self.crop + 1), down % (height - self.crop + 1)
            pixels = self._cut(picture, left, top)
        return np.ascontiguousarray(pixels[:, :, ::-1]) if self.flip and mirror % 2 else pixels

    def eval_many(
        self, pictures: Sequence[bytes | BadImage], threads: int = 1, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[int, BadImage]]:
        """uint8 (n, 3, crop, crop) and the pictures that cannot be used, by position (their pixels are 0).

        ``out`` is where the pixels go, zeros of that shape; a new array by default.
        """
        return self._many(pictures, lambda i, data: self.eval(data), threads, out)

    def train_many(
        self,
        pictures: Sequence[bytes | BadImage],
        seed: int,
        epoch: int,
        row_ids: Iterable[int],
        threads: int = 1,
    ) -> tuple[np.ndarray, dict[int, BadImage]]:
        """Like ``eval_many``, with the training transform."""
        ids = [int(row_id) for row_id in row_ids]
        return self._many(pictures, lambda i, data: self.train(data, seed, epoch, ids[i]), threads)

    def _many(
        self,
        pictures: Sequence[bytes | BadImage],
        one: Callable[[int, bytes], np.ndarray],
        threads: int,
        out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[int, BadImage]]:
        if out is None:
            out = np.zeros((len(pictures), 3, self.crop, self.crop), dtype=np.uint8)
        bad: dict[int, BadImage] = {}

        def fill(i: int) -> None:
            data = pictures[i]
            try:
                if isinstance(data, BadImage):
                    raise data
                out[i] = one(i, data)
            except BadImage as error:
                bad[i] = error

        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(fill, range(len(pictures))))
        else:
            for i in range(len(pictures)):
                fill(i)
        return out, dict(sorted(bad.items()))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the resize, of a picture with these."""
        if not self.keep_aspect:
            return self.resize, self.resize
        scale = self.resize / min(width, height)
        return max(self.resize, round(height * scale)), max(self.resize, round(width * scale))

    def _cut(self, picture: np.ndarray, left: int, top: int) -> np.ndarray:
        """Resamples only the square at (left, top) of the resized picture, with antialiasing."""
        from hashnet.kernels import resample  # numba, which takes a second to import

        full_height, full_width, _ = picture.shape
        height, width = self.resized(*picture.shape[:2])
        x, y = full_width / width, full_height / height  # pixels of the picture per resized pixel
        right, bottom = (left + self.crop) * x, (top + self.crop) * y
        box = (left * x, top * y, min(right, full_width), min(bottom, full_height))  # rounding
        return resample(picture, box, self.crop)

    def _cut_any_size(
        self, picture: np.ndarray, across: float, down: float, size: float, shape: float
    ) -> np.ndarray:
        """A part of the picture from four numbers in 0..1: place, area from ``min_area`` to 1, aspect ratio.

        The ratio is that of RandomResizedCrop, 3:4 to 4:3; what is larger than the picture is cut off.
        """
        from hashnet.kernels import resample

        full_height, full_width, _ = picture.shape
        area = full_width * full_height * (self.min_area + (1 - self.min_area) * size)
        ratio = (4 / 3) ** (2 * shape - 1)
        width, height = min((area * ratio) ** 0.5, full_width), min((area / ratio) ** 0.5, full_height)
        left, top = across * (full_width - width), down * (full_height - height)
        return resample(picture, (left, top, left + width, top + height), self.crop)


def _draws(seed: int, epoch: int, row_id: int, n: int) -> list[int]:
    """n random numbers below 2^64 from three numbers by splitmix64, far cheaper than a Generator each."""
    state = 0
    for number in (seed, epoch, row_id):
        state = _mix(state ^ (number & 0xFFFF_FFFF_FFFF_FFFF))
    return [_mix(state + i + 1) for i in range(n)]


def _mix(state: int) -> int:
    state = (state + 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF
    state = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & 0xFFFF_FFFF_FFFF_FFFF
    state = ((state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB) & 0xFFFF_FFFF_FFFF_FFFF
    return state ^ (state >> 31)
