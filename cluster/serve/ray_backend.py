"""The backend of an HTTP replica: calls over Serve handles; a read that lost its replica is sent again."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from hashnet.client import Queries, bad
from hashnet.errors import RequestRejected
from hashnet.server import (
    Backend,
    IndexAnswer,
    IndexAsk,
    Meter,
    codes_or_raise,
    gauges,
    prometheus,
    written_or_raise,
)

log = logging.getLogger(__name__)

LOST = (RayActorError, DeploymentUnavailableError)  # the replica went away; another one can answer


class RayBackend(Backend):
    """Sends the open calls to the replicas; a read that lost its replica is sent to another one."""

    def __init__(
        self, index: Any, encoder: Any, keeper: Any, catalog: Any, fixed: dict[str, Any], timeout_s: float
    ) -> None:
        super().__init__(catalog, fixed, timeout_s)
        self.index, self.encoder, self.keeper = index, encoder, keeper
        self.name = f"{os.getpid()}-{os.urandom(4).hex()}"

    async def ask_index(self, ask: IndexAsk) -> IndexAnswer:
        return await self._read(lambda: self.index.search.remote(ask))

    async def ask_about(self) -> dict[str, Any]:
        return await self._read(lambda: self.index.about.remote())

    async def look(self, ids: np.ndarray, with_labels: bool = False) -> Any:
        return await self._read(lambda: self.index.look.remote(ids, with_labels))

    async def encode(self, queries: Queries) -> np.ndarray:
        deadline = time.time() + self.timeout_s
        return codes_or_raise(await self._read(lambda: self.encoder.encode.remote(queries, deadline)))

    async def ready(self) -> None:
        await self.ask_about()
        if self.encoder is not None:
            await self._read(lambda: self.encoder.ready.remote())

    async def write(self, what: str, *arguments: Any) -> tuple[int, int]:
        try:
            return written_or_raise(await self.keeper.write.remote(what, *arguments))
        except LOST as error:
            raise bad(
                "timeout", "the writer was lost; whether the change was made is not known", 504
            ) from error

    async def metrics(self, meter: Meter) -> bytes:
        counts = await self._read(lambda: self.keeper.exchange.remote(self.name, meter.snapshot()))
        return prometheus(counts, gauges(await self.ask_about()))

    async def share_counts(self, meter: Meter, every_s: float = 1.0) -> None:
        """Hands the counters on, again and again, so that they outlive this process."""
        before: Any = None
        while True:
            await asyncio.sleep(every_s)
            counts = meter.snapshot()
            if counts == before:
                continue
            try:
                await self.keeper.exchange.remote(self.name, counts)
                before = counts
            except Exception as error:  # counting must not end serving
                log.warning("counters were not handed on: %s", error)

    async def _read(self, send: Callable[[], Any]) -> Any:
        """The answer of some replica; the request's own time limit ends the attempts."""
        until = time.monotonic() + self.timeout_s
        pause = 0.02
        while True:
            try:
                return await send()
            except LOST as error:
                if time.monotonic() + pause > until:
                    raise bad("unavailable", "no replica is there to answer; try again", 503) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)
            except BackPressureError as error:
                raise bad("overloaded", "too many requests are waiting; try again", 503) from error
            except RayTaskError as error:
                if isinstance(error.cause, RequestRejected):
                    raise error.cause from None
                raise
