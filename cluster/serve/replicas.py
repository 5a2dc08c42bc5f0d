"""The processes of a server on Ray Serve: HTTP, index, encoder, and one keeper that writes and counts.

    HTTP replicas ──▶ index replicas      faiss or our kernel; searches of several requests run as one
          │     └───▶ encoder replicas    torch; pictures of several requests run as one
          └─────────▶ keeper (one)        the only writer of the index; sums the counters up

Index and encoder never share a process: torch and faiss bring an OpenMP runtime each. Index replicas
look for a new version on disk every ``follow_s`` seconds and take it over beside the searches that run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ray import serve

from cluster.runtime import ray_internals, telemetry
from hashnet.client import Queries
from hashnet.server import IndexAnswer, IndexAsk, Limits, Meter, Tokens, Writer, behind

log = logging.getLogger(__name__)

BULK = 64  # queries from which a request is a batch of its own


def use_threads(threads: int) -> int:
    """Sets how many threads numerical libraries start; call it before they are imported."""
    n = threads or len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(n)
    return n


@serve.deployment
class IndexReplica:
    """Holds the index. One search at a time runs on all threads; what arrives meanwhile goes together."""

    def __init__(
        self,
        uri: str,
        engine: str,
        device: str,
        model_sha256: str | None,
        follow_s: float,
        threads: int,
        run: str,
    ) -> None:
        ray_internals.keep_replica_on_loopback()
        use_threads(threads)
        from hashnet.server import IndexHolder

        self.holder = IndexHolder(uri, engine, device, model_sha256)
        self.follow_s, self.run = follow_s, run
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._following = asyncio.Lock()
        self._follower: asyncio.Task | None = None
        self._report()

    async def search(self, ask: IndexAsk) -> IndexAnswer:
        """Answers one ask, together with others where they are small."""
        self._keep_following()
        if self.holder.version < ask.min_version and not await self._reach(ask):
            error = behind(self.holder.version, ask.min_version)
            return IndexAnswer(self.holder.version, error=(error.code, str(error), error.status))
        if len(ask) >= BULK:
            return (await self._run([ask]))[0]
        return await self._together(ask)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.001)
    async def _together(self, asks: list[IndexAsk]) -> list[IndexAnswer]:
        return await self._run(asks)

    async def _run(self, asks: list[IndexAsk]) -> list[IndexAnswer]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, asks)

    def _answer(self, asks: list[IndexAsk]) -> list[IndexAnswer]:
        started = time.perf_counter()
        answers = self.holder.answer(asks)
        kind = self.holder.index.kind
        telemetry.observe("search_seconds", time.perf_counter() - started, run=self.run, kind=kind)
        good = sum(len(ask) for ask, answer in zip(asks, answers, strict=True) if answer.error is None)
        telemetry.count("search_queries", good, run=self.run, kind=kind, status="ok")
        telemetry.count(
            "search_queries", sum(map(len, asks)) - good, run=self.run, kind=kind, status="refused"
        )
        return answers

    async def look(self, ids: np.ndarray, with_labels: bool = False) -> Any:
        """As IndexHolder.look."""
        self._keep_following()
        return await asyncio.to_thread(self.holder.look, ids, with_labels)

    async def about(self) -> dict[str, Any]:
        """As IndexHolder.about."""
        self._keep_following()
        return self.holder.about()

    async def _reach(self, ask: IndexAsk) -> bool:
        """Waits until the version asked for is on disk and here; False when it does not come."""
        until = min(time.time() + 2.0, ask.deadline)
        while True:
            looked = await self._follow()
            if self.holder.version >= ask.min_version:
                return True
            if not looked or time.time() >= until:
                return False
            await asyncio.sleep(0.02)

    async def _follow(self) -> bool:
        """False where it could not look: storage that is away comes back, the version here goes on."""
        try:
            async with self._following:
                if await asyncio.to_thread(self.holder.follow):
                    self._report()
        except Exception as error:
            log.warning("cannot look for a new index version: %s", error)
            return False
        return True

    def _keep_following(self) -> None:
        if self._follower is None:  # the first call: from here on an event loop is running
            self._follower = asyncio.create_task(self._follow_for_ever())

    async def _follow_for_ever(self) -> None:
        while True:
            await self._follow()
            await asyncio.sleep(self.follow_s)

    def _report(self) -> None:
        telemetry.gauge("index_version", self.holder.version, run=self.run)
        telemetry.gauge("index_size", len(self.holder.index), run=self.run)


@serve.deployment
class EncoderReplica:
    """Holds the model."""

    def __init__(self, uri: str, engine: str, max_pixels: int, threads: int) -> None:
        ray_internals.keep_replica_on_loopback()
        n = use_threads(threads)
        import torch

        from hashnet.server import EncoderHolder

        torch.set_num_threads(n)
        engine = engine if engine != "auto" else ("cuda" if torch.cuda.is_available() else "cpu-eager")
        # Single queries are the rule: a small fixed batch answers them fast on a CPU.
        rows = None if engine == "cuda" else 4
        self.holder = EncoderHolder(uri, engine, rows, max_pixels, n)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="encode")

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def encode(self, batches: list[Queries], deadlines: list[float]) -> list[Any]:
        """Codes, or (code, message, status), of each request."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.holder.encode, batches, deadlines)

    async def ready(self) -> bool:
        return True


@serve.deployment
class Keeper:
    """The one writer of the index, and the place where the counters of all HTTP processes meet."""

    def __init__(self, uri: str, model_sha256: str | None) -> None:
        ray_internals.keep_replica_on_loopback()
        use_threads(0)
        self.uri, self.model_sha256 = uri, model_sha256
        self._writer: Writer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")  # one change after another
        self._counts: dict[str, Any] = {}

    async def write(self, what: str, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._write, what, *arguments)

    def _write(self, what: str, *arguments: Any) -> Any:
        self._writer = self._writer or Writer(self.uri, self.model_sha256)
        return self._writer.write(what, *arguments)

    async def exchange(self, name: str, counts: dict[str, Any]) -> list[dict[str, Any]]:
        """Takes the counts of one process and gives those of all; a process that is gone keeps its last."""
        self._counts[name] = counts
        return list(self._counts.values())


@serve.deployment
@serve.ingress()
class HttpReplica:
    """Speaks HTTP. Looks items and pictures up itself; everything else it asks the others for."""

    def __init__(
        self,
        index: Any,
        encoder: Any,
        keeper: Any,
        paths: dict[str, str | None],
        fixed: dict[str, Any],
        limits: Limits,
        tokens: Tokens,
        local_only: bool,
    ) -> None:
        ray_internals.keep_replica_on_loopback()
        from cluster.serve.ray_backend import RayBackend
        from hashnet.server import open_catalog

        catalog = open_catalog(paths)
        self.backend = RayBackend(index, encoder, keeper, catalog, fixed, limits.timeout_s)
        self.limits, self.tokens, self.local_only = limits, tokens, local_only
        self.meter = Meter()

    def __serve_build_asgi_app__(self) -> Any:  # the name Serve looks for
        from hashnet.server import build_app

        self._sharing = asyncio.ensure_future(self.backend.share_counts(self.meter))
        return build_app(self.backend, self.limits, self.tokens, self.local_only, self.meter)
