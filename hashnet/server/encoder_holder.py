"""The model inside a process: pictures or features of several requests become codes in one call."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hashnet.client import Queries, bad
from hashnet.codes import pack_signs
from hashnet.errors import BadImage, HashnetError
from hashnet.server.calls import blame

CHUNK = 256  # rows that are decoded, and lie in memory, at a time: 40 MB of pictures of 224 x 224
Mistake = tuple[str, str, int]  # code, message, status


class EncoderHolder:
    """The model. Pictures are decoded within bounds on threads; a chunk of them is one call."""

    def __init__(self, uri: str, engine: str, batch_rows: int | None, max_pixels: int, threads: int) -> None:
        from hashnet.encoding import Encoder

        self.encoder = Encoder.load(uri, engine=engine, batch_rows=batch_rows)
        self.max_pixels = max_pixels
        self.chunk = max(CHUNK, self.encoder.batch_rows)  # fewer would be padded to a batch
        # Few at a time: a picture at the bound takes 150 MB and more while it is decoded.
        pool = ThreadPoolExecutor(min(threads, 4), thread_name_prefix="decode")
        self._each: Any = pool.map if self.encoder.modality == "image" else map

    def encode(self, batches: Sequence[Queries], deadlines: Sequence[float]) -> list[np.ndarray | Mistake]:
        """One answer a batch: codes uint8 (n, n_bits // 8), or (code, message, status) of what is wrong.

        Rows of all batches are taken in chunks, so that what lies decoded in memory does not grow with
        the requests. Work for a batch ends with the chunk in which its deadline (as time.time())
        passes, or in which a row cannot be used: nobody waits for the rest.
        """
        n_bytes = self.encoder.n_bits // 8
        answers: list[Any] = [np.zeros((len(batch), n_bytes), np.uint8) for batch in batches]
        places = [(i, j) for i, batch in enumerate(batches) for j in range(len(batch))]
        for start in range(0, len(places), self.chunk):
            chunk = [(i, j) for i, j in places[start : start + self.chunk] if not _refused(answers[i])]
            rows = list(self._each(lambda at: self._row(batches[at[0]], at[1], deadlines[at[0]]), chunk))
            for (i, _), row in zip(chunk, rows, strict=True):
                if isinstance(row, HashnetError) and not _refused(answers[i]):
                    answers[i] = blame(row)
            good = [n for n, (i, _) in enumerate(chunk) if not _refused(answers[i])]
            if good:
                logits = self.encoder.logits(np.stack([rows[n] for n in good]))
                usable = ~np.isnan(logits).any(axis=1)
                codes = pack_signs(np.where(usable[:, None], logits, 0))
                for n, code, ok in zip(good, codes, usable, strict=True):
                    i, j = chunk[n]
                    if not ok:
                        answers[i] = "not_finite", f"row {j} is too large for the model", 422
                    elif not _refused(answers[i]):
                        answers[i][j] = code
        return answers

    def _row(self, batch: Queries, number: int, deadline: float) -> np.ndarray | HashnetError:
        """What the model takes of one query, or why it cannot be had."""
        if deadline < time.time():
            return _late()
        if batch.kind == "features":  # their width and values were checked when the request was read
            return batch.values[number]
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


def _refused(answer: np.ndarray | Mistake) -> bool:
    return isinstance(answer, tuple)


def _late() -> HashnetError:
    return bad("timeout", "it waited too long; try again, or send fewer at once", 503)


def check_pixels(picture: bytes, name: str, max_pixels: int) -> None:
    """Refuses a picture by what its header says, before anything is decoded."""
    from PIL import Image

    from hashnet.data import FORMATS

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
