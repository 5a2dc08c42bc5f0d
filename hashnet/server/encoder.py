"""The model: BatchEncoder in its process, and EncoderProcess, which reaches it through a Unix socket.

Torch and faiss never share a process, so pictures and features travel to this one: a request is an Arrow
stream as in the API, the response an array of float32 or an error. Whatever arrives together is encoded
together.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.client import Queries, wire
from hashnet.errors import BadImage
from hashnet.server.batching import Batcher
from hashnet.server.schemas import ApiError

CHUNK = 256  # rows that are decoded, and held in memory, at a time: 40 MB of pictures of 224 x 224
MAX_TOGETHER = 1024  # rows of requests encoded together
HEADER = struct.Struct("<d?I")  # of a request: deadline as time.time(), with_vectors, bytes that follow
RESULT = struct.Struct("<?II")  # of a response: whether it worked, rows, bytes that follow


@dataclass(frozen=True)
class EncodeRequest:
    """Pictures or features of one request, and the time (as time.time()) until which the result is needed.

    The result is float32 (n, n_bits), the logits; ``with_vectors``, (n, n_bits + width), behind them the
    model's features, by which hits are rescored.
    """

    queries: Queries
    deadline: float
    with_vectors: bool = False

    def __len__(self) -> int:
        return len(self.queries)


class BatchEncoder:
    """The model. Pictures are decoded on threads, within limits; one chunk of rows is one call."""

    def __init__(self, uri: str, device: str, max_pixels: int, threads: int) -> None:
        import torch

        from hashnet.encoding import Encoder

        torch.set_num_threads(threads)
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        # Most requests are single queries: a small fixed batch encodes them fast on a CPU.
        engine, batch_rows = ("cuda", None) if on_gpu else ("cpu-eager", 4)
        self.encoder = Encoder.load(uri, engine=engine, batch_rows=batch_rows)
        self.max_pixels = max_pixels
        self.chunk = max(CHUNK, self.encoder.batch_rows)  # fewer would be padded to a batch
        # Few at a time: a picture at the limit takes 150 MB and more while it is decoded.
        pool = ThreadPoolExecutor(min(threads, 4), thread_name_prefix="decode")
        self._map: Any = pool.map if self.encoder.modality == "image" else map

    def encode(self, requests: Sequence[EncodeRequest]) -> list[np.ndarray | ApiError]:
        """One result per request, as EncodeRequest says, or why it cannot be encoded.

        Rows of all requests are handled in chunks, so that memory does not grow with them. A request is
        dropped after the chunk in which its deadline passes or a row turns out to be unusable: nobody needs
        its other rows.
        """
        n_bits, width = self.encoder.n_bits, self.encoder.n_features
        results: list[Any] = [
            np.zeros((len(request), n_bits + request.with_vectors * width), np.float32)
            for request in requests
        ]
        places = [(i, j) for i, request in enumerate(requests) for j in range(len(request))]
        for start in range(0, len(places), self.chunk):
            chunk = [(i, j) for i, j in places[start : start + self.chunk] if not _failed(results[i])]
            rows = list(self._map(lambda at: self._row(requests[at[0]], at[1]), chunk))
            for (i, _), row in zip(chunk, rows, strict=True):
                if isinstance(row, ApiError) and not _failed(results[i]):
                    results[i] = row
            self._encode_rows(chunk, rows, results)
        return results

    def _encode_rows(self, chunk: list[tuple[int, int]], rows: list[Any], results: list[Any]) -> None:
        """Writes the logits and vectors of a chunk's rows into the results of their requests."""
        usable = [n for n, (i, _) in enumerate(chunk) if not _failed(results[i])]
        if not usable:
            return
        with_vectors = any(results[chunk[n][0]].shape[1] > self.encoder.n_bits for n in usable)
        found = self._outputs(np.stack([rows[n] for n in usable]), with_vectors)
        finite = ~np.isnan(found).any(axis=1)
        for n, row, ok in zip(usable, found, finite, strict=True):
            i, j = chunk[n]
            if not ok:
                results[i] = ApiError("not_finite", f"row {j} is too large for the model")
            elif not _failed(results[i]):
                results[i][j] = row[: results[i].shape[1]]

    def _outputs(self, rows: np.ndarray, with_vectors: bool) -> np.ndarray:
        """Logits and, if requested, the features behind them, float32; equal to Encoder's own."""
        if not with_vectors:
            return self.encoder.logits(rows)
        features = self.encoder.features(rows)
        is_picture = self.encoder.modality == "image"  # whose logits are those of its features
        logits = self.encoder.head(features) if is_picture else self.encoder.logits(rows)
        return np.concatenate([logits, features], axis=1)

    def _row(self, request: EncodeRequest, number: int) -> np.ndarray | ApiError:
        """One query as the model takes it, or why it cannot be used."""
        queries = request.queries
        if request.deadline < time.time():
            sentence = "the request waited too long; try again, or send fewer queries at once"
            return ApiError("timeout", sentence, 503)
        if queries.kind == "features":  # their width and values were checked when the request was parsed
            return queries.values[number]
        picture = queries.values[number]
        name = "the file" if len(queries) == 1 else f"image {number}"
        try:
            check_pixels(picture, name, self.max_pixels)
            return self.encoder.prepare([picture])[0]
        except BadImage as error:
            if error.reason == "too_large":
                return ApiError("image_too_large", f"{name} has too many pixels", 413)
            return ApiError("not_an_image", f"{name} cannot be read as a picture ({error.reason})")
        except ApiError as error:
            return error


async def serve_encoder(encoder: BatchEncoder, path: str) -> None:
    """Responds to EncoderProcess on the Unix socket at ``path`` until cancelled."""
    batcher: Batcher = Batcher(encoder.encode, max_rows=MAX_TOGETHER, name="encode")

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            deadline, with_vectors, size = HEADER.unpack(await reader.readexactly(HEADER.size))
            queries = wire.read_queries(wire.read_table(await reader.readexactly(size)))
            try:
                result = await batcher.submit(EncodeRequest(queries, deadline, with_vectors))
                found, rows, body = True, len(result), result.tobytes()
            except ApiError as error:
                described = {"code": error.code, "message": error.message, "status": error.status}
                found, rows, body = False, 0, json.dumps(described).encode()
            writer.write(RESULT.pack(found, rows, len(body)) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the worker that sent the request is gone
        finally:
            writer.close()

    server = await asyncio.start_unix_server(respond, path)
    async with server:
        await server.serve_forever()


class EncoderProcess:
    """Encodes in the process behind the Unix socket at ``path``, which may be starting or restarting."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        """The result of the request; waits for the process while the deadline allows."""
        body = wire.write_queries(request.queries)
        header = HEADER.pack(request.deadline, request.with_vectors, len(body))
        pause = 0.02
        while True:
            try:
                return await self._ask(header, body)
            except (OSError, asyncio.IncompleteReadError) as error:
                if time.time() + pause > request.deadline:
                    sentence = "the model is being loaded; try again"
                    raise ApiError("unavailable", sentence, 503) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)

    async def ready(self) -> None:
        """Returns when the process accepts requests; 503 as long as it does not."""
        try:
            _, writer = await asyncio.open_unix_connection(self.path)
        except OSError as error:
            raise ApiError("unavailable", "the model is being loaded; try again", 503) from error
        writer.close()

    async def _ask(self, header: bytes, body: bytes) -> np.ndarray:
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.writelines([header, body])
            found, rows, size = RESULT.unpack(await reader.readexactly(RESULT.size))
            data = await reader.readexactly(size)
        finally:
            writer.close()
        if not found:
            raise ApiError(**json.loads(data))
        return np.frombuffer(data, dtype=np.float32).reshape(rows, -1)


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
        sentence = f"{name} is not a picture in a format that is read here ({', '.join(FORMATS)})"
        raise ApiError("not_an_image", sentence) from None
    if width * height > max_pixels:
        sentence = f"{name} has {width} x {height} pixels; the limit is {max_pixels:,}"
        raise ApiError("image_too_large", sentence, 413)
