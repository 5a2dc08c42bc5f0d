"""The backend of an HTTP replica: calls to the other replicas through Serve handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from hashnet.client import Queries
from hashnet.server import (
    AddItems,
    ApiError,
    Backend,
    IndexedItems,
    IndexInfo,
    RemoveItems,
    SearchRequest,
    SearchResponse,
    ServedRun,
    Written,
    result_or_raise,
)

LOST = (RayActorError, DeploymentUnavailableError)  # the replica is gone; another one can respond


class RayBackend(Backend):
    """Calls index, encoder and writer replicas. A read that lost its replica is sent to another one."""

    def __init__(self, index: Any, encoder: Any, writer: Any, served: ServedRun, timeout_s: float) -> None:
        super().__init__(served, timeout_s)
        self.index, self.encoder, self.writer = index, encoder, writer

    async def search_index(self, request: SearchRequest) -> SearchResponse:
        return await self._read(lambda: self.index.search.remote(request))

    async def index_info(self) -> IndexInfo:
        return await self._read(lambda: self.index.info.remote())

    async def lookup(self, ids: np.ndarray, with_labels: bool = False) -> IndexedItems:
        return await self._read(lambda: self.index.lookup.remote(ids, with_labels))

    async def encode(self, queries: Queries) -> np.ndarray:
        deadline = time.time() + self.timeout_s
        return await self._read(lambda: self.encoder.encode.remote(queries, deadline))

    async def ready(self) -> None:
        await self.index_info()
        if self.encoder is not None:
            await self._read(lambda: self.encoder.ready.remote())

    async def write(self, change: AddItems | RemoveItems) -> Written:
        try:
            return result_or_raise(await self.writer.write.remote(change))
        except LOST as error:
            sentence = "the writer was lost; whether the change was made is not known"
            raise ApiError("timeout", sentence, 504) from error

    async def _read(self, call: Callable[[], Any]) -> Any:
        """The result of some replica; the request's own time limit ends the attempts."""
        until = time.monotonic() + self.timeout_s
        pause = 0.02
        while True:
            try:
                return result_or_raise(await call())
            except LOST as error:
                if time.monotonic() + pause > until:
                    raise ApiError("unavailable", "no replica responded; try again", 503) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)
            except BackPressureError as error:
                raise ApiError("overloaded", "too many requests are waiting; try again", 503) from error
