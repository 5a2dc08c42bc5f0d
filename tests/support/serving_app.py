"""The HTTP application over a small run, and what its tests share."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import numpy as np
from fastapi.testclient import TestClient

from hashnet.client.queries import Queries
from hashnet.server.app import build_app
from hashnet.server.backend import Backend, behind, codes_or_raise
from hashnet.server.calls import IndexAnswer, IndexAsk
from hashnet.server.encoder_holder import EncoderHolder
from hashnet.server.index_holder import IndexHolder
from hashnet.server.middleware import Guard
from hashnet.server.settings import Limits, ServeConfig, Tokens
from hashnet.server.startup import look_over, open_catalog
from hashnet.server.telemetry import Meter
from hashnet.server.writer import Writer, written_or_raise
from hashnet.store.lookup import ItemLookup

READ, WRITE = "r" * 24, "w" * 24
BASE = "http://127.0.0.1:8000"
CODE = "00" * 8


class LocalBackend(Backend):
    """What the replicas do, in this process."""

    def __init__(
        self,
        index: IndexHolder,
        encoder: EncoderHolder | None,
        catalog: ItemLookup | None,
        fixed: dict[str, Any],
        timeout_s: float = 20.0,
    ) -> None:
        super().__init__(catalog, fixed, timeout_s)
        self.index, self.encoder = index, encoder
        self._writer: Writer | None = None

    async def ask_index(self, ask: IndexAsk) -> IndexAnswer:
        if self.index.version < ask.min_version:
            await asyncio.to_thread(self.index.follow)
        if self.index.version < ask.min_version:
            raise behind(self.index.version, ask.min_version)
        return (await asyncio.to_thread(self.index.answer, [ask]))[0]

    async def ask_about(self) -> dict[str, Any]:
        return self.index.about()

    async def look(
        self, ids: np.ndarray, with_labels: bool = False
    ) -> tuple[int, np.ndarray, np.ndarray, list[list[int]] | None]:
        return await asyncio.to_thread(self.index.look, ids, with_labels)

    async def encode(self, queries: Queries) -> np.ndarray:
        assert self.encoder is not None  # what cannot be encoded is refused before
        deadline = time.time() + self.timeout_s
        return codes_or_raise((await asyncio.to_thread(self.encoder.encode, [queries], [deadline]))[0])

    async def write(self, what: str, *arguments: Any) -> tuple[int, int]:
        self._writer = self._writer or Writer(self.index.uri, self.index.model_sha256)
        done = written_or_raise(await asyncio.to_thread(self._writer.write, what, *arguments))
        await asyncio.to_thread(self.index.follow)
        return done


def make_app(
    run: str, encoder: EncoderHolder | None, limits: Limits, tokens: Tokens, engine: str, local_only: bool
) -> Guard:
    ground = look_over(ServeConfig(run=run))
    holder = IndexHolder(f"{run}/index", engine, model_sha256=ground.model_sha256)
    catalog = open_catalog(ground.paths)
    backend = LocalBackend(holder, encoder, catalog, ground.fixed, limits.timeout_s)
    return build_app(backend, limits, tokens, local_only, Meter())


def picture(run_client: TestClient, id_: int) -> bytes:
    return run_client.get(f"/v1/items/{id_}/thumbnail").content


def error_of(answer: httpx.Response) -> tuple[int, str]:
    said = answer.json()["error"]
    assert len(said["message"]) > 5
    assert said["request_id"]
    assert "Traceback" not in answer.text
    return answer.status_code, said["code"]
