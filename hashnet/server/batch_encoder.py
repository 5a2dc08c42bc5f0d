"""BatchEncoder: the model inside a process; pictures or features of several requests are encoded together."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hashnet.client import Queries
from hashnet.codes import pack_signs
from hashnet.errors import BadImage, HashnetError
from hashnet.server.errors import ApiError

CHUNK = 256  # rows that are decoded, and held in memory, at a time: 40 MB of pictures of 224 x 224


class BatchEncoder:
    """The model. Pictures are decoded on threads, within limits; one chunk of rows is one call."""

    def __init__(self, uri: str, engine: str, batch_rows: int | None, max_pixels: int, threads: int) -> None:
        from hashnet.encoding import Encoder

        self.encoder = Encoder.load(uri, engine=engine, batch_rows=batch_rows)
        self.max_pixels = max_pixels
        self.chunk = max(CHUNK, self.encoder.batch_rows)  # fewer would be padded to a batch
        # Few at a time: a picture at the limit takes 150 MB and more while it is decoded.
        pool = ThreadPoolExecutor(min(threads, 4), thread_name_prefix="decode")
        self._map: Any = pool.map if self.encoder.modality == "image" else map

    def encode(self, batches: Sequence[Queries], deadlines: Sequence[float]) -> list[np.ndarray | ApiError]:
        """One result per batch: codes uint8 (n, n_bits // 8), or why it cannot be encoded.

        Rows of all batches are handled in chunks, so that memory does not grow with the requests. A batch is
        dropped after the chunk in which its deadline (as time.time()) passes or a row turns out to be
        unusable: nobody needs its other rows.
        """
        n_bytes = self.encoder.n_bits // 8
        results: list[Any] = [np.zeros((len(batch), n_bytes), np.uint8) for batch in batches]
        places = [(i, j) for i, batch in enumerate(batches) for j in range(len(batch))]
        for start in range(0, len(places), self.chunk):
            chunk = [(i, j) for i, j in places[start : start + self.chunk] if not _failed(results[i])]
            rows = list(self._map(lambda at: self._row(batches[at[0]], at[1], deadlines[at[0]]), chunk))
            for (i, _), row in zip(chunk, rows, strict=True):
                if isinstance(row, ApiError) and not _failed(results[i]):
                    results[i] = row
            self._encode_rows(chunk, rows, results)
        return results

    def _encode_rows(self, chunk: list[tuple[int, int]], rows: list[Any], results: list[Any]) -> None:
        """Writes the codes of a chunk's rows into the results of their batches."""
        usable = [n for n, (i, _) in enumerate(chunk) if not _failed(results[i])]
        if not usable:
            return
        logits = self.encoder.logits(np.stack([rows[n] for n in usable]))
        finite = ~np.isnan(logits).any(axis=1)
        codes = pack_signs(np.where(finite[:, None], logits, 0))
        for n, code, ok in zip(usable, codes, finite, strict=True):
            i, j = chunk[n]
            if not ok:
                results[i] = ApiError("not_finite", f"row {j} is too large for the model")
            elif not _failed(results[i]):
                results[i][j] = code

    def _row(self, batch: Queries, number: int, deadline: float) -> np.ndarray | ApiError:
        """One query as the model takes it, or why it cannot be used."""
        if deadline < time.time():
            sentence = "the request waited too long; try again, or send fewer queries at once"
            return ApiError("timeout", sentence, 503)
        if batch.kind == "features":  # their width and values were checked when the request was parsed
            return batch.values[number]
        picture = batch.values[number]
        name = "the file" if len(batch) == 1 else f"image {number}"
        try:
            check_pixels(picture, name, self.max_pixels)
            return self.encoder.prepare([picture])[0]
        except BadImage as error:
            if error.reason == "too_large":
                return ApiError("image_too_large", f"{name} has too many pixels", 413)
            return ApiError("not_an_image", f"{name} cannot be read as a picture ({error.reason})")
        except HashnetError as error:
            return ApiError.of(error)


def _failed(result: np.ndarray | ApiError) -> bool:
    return isinstance(result, ApiError)


def check_pixels(picture: bytes, name: str, max_pixels: int) -> None:
    """Refuses a picture by the size in its header, before anything is decoded."""
    from PIL import Image

    from hashnet.data import FORMATS

    try:
        with Image.open(io.BytesIO(picture), formats=FORMATS) as opened:
            width, height = opened.size
    except Image.DecompressionBombError:
        sentence = f"{name} has far too many pixels; the limit is {max_pixels:,}"
        raise ApiError("image_too_large", sentence, 413) from None
    except Exception:
        raise ApiError("not_an_image", f"{name} is not a picture this server can read") from None
    if width * height > max_pixels:
        sentence = f"{name} has {width} x {height} pixels; the limit is {max_pixels:,}"
        raise ApiError("image_too_large", sentence, 413)
