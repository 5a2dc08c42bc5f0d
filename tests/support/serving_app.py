"""The HTTP application over a small run in this process, and what its tests share."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import httpx
import numpy as np
from PIL import Image
from starlette.testclient import TestClient

from hashnet.server import (
    Access,
    ApiError,
    Backend,
    BatchEncoder,
    EncodeRequest,
    IndexService,
    IndexWriter,
    Limits,
    LiveIndex,
    ServeConfig,
    ServedRun,
    Telemetry,
    build_app,
)
from hashnet.server.http_server import RequestMiddleware

READ, WRITE = "r" * 24, "w" * 24
BASE = "http://127.0.0.1:8000"
CODE = "00" * 8


class LocalModel:
    """The model in this process."""

    def __init__(self, encoder: BatchEncoder) -> None:
        self.encoder = encoder

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        (result,) = await asyncio.to_thread(self.encoder.encode, [request])
        if isinstance(result, ApiError):
            raise result
        return result

    async def ready(self) -> None:
        """It is."""


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
    telemetry = Telemetry()
    live = LiveIndex(served.index, engine, model_sha256=served.model_sha256)
    index = IndexService(live, follow_s=3600, telemetry=telemetry)  # tests say when
    model = LocalModel(encoder) if encoder is not None and served.model is not None else None
    writer = IndexWriter(served.index, model_sha256=served.model_sha256)
    backend = Backend(served, index, model, writer.write, limits.timeout_s)
    return build_app(backend, limits, access or Access(), telemetry)


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
