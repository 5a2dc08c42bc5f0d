"""The model inside a process: pictures or features of several requests become codes in one call."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cluster.serving.asks import blame
from hashnet.errors import BadImage, HashnetError
from hashnet.queries import Queries
from hashnet.wire import bad

Mistake = tuple[str, str, int]  # code, message, status


class EncoderHolder:
    """The model. Pictures are decoded within bounds on threads, the rest is one call."""

    def __init__(self, uri: str, engine: str, batch_rows: int | None, max_pixels: int, threads: int) -> None:
        from hashnet.encoding import Encoder

        self.encoder = Encoder.load(uri, engine=engine, batch_rows=batch_rows)
        self.max_pixels = max_pixels
        # Few at a time: a picture at the bound takes 150 MB and more while it is decoded.
        self._pool = ThreadPoolExecutor(min(threads, 4), thread_name_prefix="decode")

    def encode(self, batches: Sequence[Queries], deadlines: Sequence[float]) -> list[np.ndarray | Mistake]:
        """One answer a batch: codes uint8 (n, n_bits // 8), or (code, message, status) of what is wrong.

        Work for a batch ends at its deadline (as time.time()): nobody waits for it any more.
        """
        prepared: list[Any] = []
        pictures = [
            (i, j) for i, batch in enumerate(batches) if batch.kind == "images" for j in range(len(batch))
        ]
        decoded = dict(
            zip(
                pictures,
                self._pool.map(lambda at: self._decode(batches[at[0]], at[1], deadlines[at[0]]), pictures),
                strict=True,
            )
        )
        for i, batch in enumerate(batches):
            try:
                if deadlines[i] < time.time():
                    raise _late()
                if batch.kind == "features":
                    prepared.append(self.encoder.prepare(batch.values))
                    continue
                rows = [decoded[i, j] for j in range(len(batch))]
                wrong = next((row for row in rows if isinstance(row, Exception)), None)
                if wrong is not None:
                    raise wrong
                prepared.append(np.stack(rows))  # type: ignore[arg-type] # pictures, all of them
            except HashnetError as error:
                prepared.append(blame(error))
        good = [rows for rows in prepared if isinstance(rows, np.ndarray)]
        codes = self.encoder.encode(np.concatenate(good)) if good else np.zeros((0, 0), np.uint8)
        out: list[np.ndarray | Mistake] = []
        start = 0
        for rows in prepared:
            if isinstance(rows, np.ndarray):
                out.append(codes[start : start + len(rows)])
                start += len(rows)
            else:
                out.append(rows)
        return out

    def _decode(self, batch: Queries, number: int, deadline: float) -> np.ndarray | HashnetError:
        if deadline < time.time():
            return _late()
        picture = batch.values[number]
        name = "the file" if len(batch) == 1 else f"image {number}"
        try:
            check_pixels(picture, name, self.max_pixels)
            return self.encoder.prepare([picture])[0]
        except BadImage as error:
            if error.reason == "too_large":
                return bad("image_too_large", f"{name} has too many pixels", 413)
            return bad("not_an_image", f"{name} cannot be read as a picture ({error.reason})", 422)
        except HashnetError as error:
            return error


def _late() -> HashnetError:
    return bad("timeout", "it waited too long; try again, or send fewer at once", 503)


def check_pixels(picture: bytes, name: str, max_pixels: int) -> None:
    """Refuses a picture by what its header says, before anything is decoded."""
    from PIL import Image

    from hashnet.data.images import FORMATS

    try:
        with Image.open(io.BytesIO(picture), formats=FORMATS) as opened:
            width, height = opened.size
    except Image.DecompressionBombError:
        raise bad(
            "image_too_large", f"{name} has far too many pixels; at most {max_pixels:,} are taken", 413
        ) from None
    except Exception:
        raise bad("not_an_image", f"{name} is not a picture this server can read", 422) from None
    if width * height > max_pixels:
        raise bad(
            "image_too_large",
            f"{name} has {width} x {height} pixels; at most {max_pixels:,} are taken",
            413,
        )
