"""The HTTP application over a small run in this process, and what its tests share."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import httpx
import numpy as np
from fastapi.testclient import TestClient
from PIL import Image

from hashnet.client import Queries
from hashnet.server import (
    Access,
    AddItems,
    Backend,
    BatchEncoder,
    IndexedItems,
    IndexInfo,
    IndexWriter,
    Limits,
    LiveIndex,
    RemoveItems,
    SearchRequest,
    SearchResponse,
    ServeConfig,
    ServedRun,
    Telemetry,
    Written,
    build_app,
    result_or_raise,
)
from hashnet.server.middleware import RequestMiddleware

READ, WRITE = "r" * 24, "w" * 24
BASE = "http://127.0.0.1:8000"
CODE = "00" * 8


class LocalBackend(Backend):
    """Index, model and writer in this process."""

    def __init__(
        self, index: LiveIndex, encoder: BatchEncoder | None, served: ServedRun, timeout_s: float
    ) -> None:
        super().__init__(served, timeout_s)
        self.index, self.encoder = index, encoder
        self._writer: IndexWriter | None = None

    async def search_index(self, request: SearchRequest) -> SearchResponse:
        if self.index.version < request.min_version:
            await asyncio.to_thread(self.index.follow)
        return result_or_raise((await asyncio.to_thread(self.index.search, [request]))[0])

    async def index_info(self) -> IndexInfo:
        return self.index.info()

    async def lookup(self, ids: np.ndarray, with_labels: bool = False) -> IndexedItems:
        return await asyncio.to_thread(self.index.lookup, ids, with_labels)

    async def encode(self, queries: Queries) -> np.ndarray:
        assert self.encoder is not None  # what cannot be encoded was refused by the parser
        deadline = time.time() + self.timeout_s
        return result_or_raise((await asyncio.to_thread(self.encoder.encode, [queries], [deadline]))[0])

    async def write(self, change: AddItems | RemoveItems) -> Written:
        self._writer = self._writer or IndexWriter(self.index.uri, self.index.model_sha256)
        written = await asyncio.to_thread(self._writer.write, change)
        await asyncio.to_thread(self.index.follow)
        return written


def limits_with(**settings: Any) -> Limits:
    """The default limits with some of them changed, by the keys of ServeConfig."""
    return ServeConfig(run="unused", **settings).limits


def make_app(
    served: ServedRun,
    encoder: BatchEncoder | None,
    limits: Limits | None = None,
    access: Access | None = None,
    engine: str = "auto",
) -> RequestMiddleware:
    """The application over a run; by default with the default limits, without tokens, for local names."""
    limits = limits or limits_with()
    index = LiveIndex(served.index, engine, model_sha256=served.model_sha256)
    backend = LocalBackend(index, encoder, served, limits.timeout_s)
    return build_app(backend, limits, access or Access(), Telemetry())


def picture(http: TestClient, id_: int) -> bytes:
    """The thumbnail of an item."""
    return http.get(f"/v1/items/{id_}/thumbnail").content


def blank_png(width: int, height: int) -> bytes:
    """A PNG file of one colour."""
    sink = io.BytesIO()
    Image.new("L", (width, height)).save(sink, "PNG")
    return sink.getvalue()


def error_of(response: httpx.Response) -> tuple[int, str]:
    """(status, code) of an error response, which must say what is wrong and nothing of the server's code."""
    error = response.json()["error"]
    assert len(error["message"]) > 5
    assert error["request_id"]
    assert "Traceback" not in response.text
    return response.status_code, error["code"]
