"""The Serve deployments of a server (HTTP, index, encoder, writer), and how HTTP replicas call the others.

    HTTP replicas ──▶ index replicas      faiss or the kernels; small searches of several requests run as one
          │     └───▶ encoder replicas    torch; pictures of several requests run as one
          └─────────▶ writer (one)        the only process that changes the index

Index and encoder never share a process: torch and faiss each bring an OpenMP runtime. Index replicas look
for a new version on disk every ``follow_s`` seconds and switch to it while searches go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.runtime import ray_internals, run_name, telemetry
from hashnet.client import Queries
from hashnet.server import (
    Access,
    AddItems,
    ApiError,
    Backend,
    IndexedItems,
    IndexInfo,
    IndexWriter,
    RemoveItems,
    SearchRequest,
    SearchResponse,
    ServeConfig,
    ServedRun,
    Telemetry,
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


log = logging.getLogger(__name__)

BULK = 64  # queries from which a request is searched on its own
WAIT_FOR_VERSION_S = 2.0


def set_threads(threads: int | None) -> int:
    """Sets how many threads numerical libraries start; call it before they are imported."""
    n = threads or len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(n)
    return n


@serve.deployment
class IndexReplica:
    """Holds the index. One search at a time runs, on all threads; small requests that wait run as one."""

    def __init__(self, config: ServeConfig, served: ServedRun) -> None:
        ray_internals.keep_replica_on_loopback()
        set_threads(config.threads)
        from hashnet.server import LiveIndex

        self.index = LiveIndex(served.index, config.search_engine, config.index_device, served.model_sha256)
        self.follow_s, self.run = config.follow_s, run_name(config.run)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._following = asyncio.Lock()
        self._follower: asyncio.Task | None = None
        self._report_index()

    async def search(self, request: SearchRequest) -> SearchResponse | ApiError:
        """The response to one request."""
        self._start_following()
        if self.index.version < request.min_version:
            await self._wait_for_version(request)
        if len(request) >= BULK:
            return (await self._run([request]))[0]
        return await self._search_small(request)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.001)
    async def _search_small(self, requests: list[SearchRequest]) -> list[SearchResponse | ApiError]:
        return await self._run(requests)

    async def _run(self, requests: list[SearchRequest]) -> list[SearchResponse | ApiError]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._search, requests)

    def _search(self, requests: list[SearchRequest]) -> list[SearchResponse | ApiError]:
        started = time.perf_counter()
        results = self.index.search(requests)
        tags = {"run": self.run, "kind": self.index.index.kind}
        telemetry.observe("search_seconds", time.perf_counter() - started, **tags)
        refused = sum(
            len(r) for r, found in zip(requests, results, strict=True) if isinstance(found, ApiError)
        )
        telemetry.count("search_queries", sum(map(len, requests)) - refused, **tags, status="ok")
        telemetry.count("search_queries", refused, **tags, status="refused")
        return results

    async def lookup(self, ids: np.ndarray, with_labels: bool = False) -> IndexedItems:
        """As LiveIndex.lookup."""
        self._start_following()
        return await asyncio.to_thread(self.index.lookup, ids, with_labels)

    async def info(self) -> IndexInfo:
        """As LiveIndex.info."""
        self._start_following()
        return self.index.info()

    async def _wait_for_version(self, request: SearchRequest) -> None:
        """Returns when the version a request needs is served here, or when it does not come in time."""
        until = min(time.time() + WAIT_FOR_VERSION_S, request.deadline)
        while await self._follow() and self.index.version < request.min_version and time.time() < until:
            await asyncio.sleep(0.02)

    async def _follow(self) -> bool:
        """False where storage cannot be read; the version held here is served until it can."""
        try:
            async with self._following:
                if await asyncio.to_thread(self.index.follow):
                    self._report_index()
        except Exception as error:
            log.warning("cannot look for a new index version: %s", error)
            return False
        return True

    def _start_following(self) -> None:
        if self._follower is None:  # the first call: an event loop is running now
            self._follower = asyncio.create_task(self._follow_forever())

    async def _follow_forever(self) -> None:
        while True:
            await self._follow()
            await asyncio.sleep(self.follow_s)

    def _report_index(self) -> None:
        telemetry.gauge("index_version", self.index.version, run=self.run)
        telemetry.gauge("index_size", len(self.index.index), run=self.run)


@serve.deployment
class EncoderReplica:
    """Holds the model."""

    def __init__(self, config: ServeConfig, served: ServedRun) -> None:
        ray_internals.keep_replica_on_loopback()
        n = set_threads(config.threads)
        import torch

        from hashnet.server import BatchEncoder

        torch.set_num_threads(n)
        on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        engine = "cuda" if on_gpu else "cpu-eager"
        # Most requests are single queries: a small fixed batch encodes them fast on a CPU.
        batch_rows = None if on_gpu else 4
        assert served.model is not None
        self.encoder = BatchEncoder(served.model, engine, batch_rows, config.max_pixels, n)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="encode")

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def encode(self, batches: list[Queries], deadlines: list[float]) -> list[np.ndarray | ApiError]:
        """As BatchEncoder.encode."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.encoder.encode, batches, deadlines)

    async def ready(self) -> bool:
        """True: the model was loaded when the replica started."""
        return True


@serve.deployment
class WriterReplica:
    """The single writer of the index. It loads the index with the first change."""

    def __init__(self, served: ServedRun) -> None:
        ray_internals.keep_replica_on_loopback()
        set_threads(None)
        self.served = served
        self._writer: IndexWriter | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")  # one change after another

    async def write(self, change: AddItems | RemoveItems) -> Written | ApiError:
        """The index after the change, or why it was not made."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._write, change)

    def _write(self, change: AddItems | RemoveItems) -> Written | ApiError:
        try:
            self._writer = self._writer or IndexWriter(self.served.index, self.served.model_sha256)
            return self._writer.write(change)
        except ApiError as error:
            return error


class RayTelemetry(Telemetry):
    """The counters of one HTTP replica, which also go to Ray's metrics: those add up over all replicas."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run

    def request(self, method: str, route: str, status: int, seconds: float, queries: int) -> None:
        super().request(method, route, status, seconds, queries)
        telemetry.count("requests", run=self.run, method=method, route=route, status=status)
        telemetry.observe("request_seconds", seconds, run=self.run, route=route)


@serve.deployment
@serve.ingress()
class HttpReplica:
    """Runs the HTTP application: looks up items and pictures itself, calls other replicas for the rest."""

    def __init__(
        self, index: Any, encoder: Any, writer: Any, config: ServeConfig, served: ServedRun, access: Access
    ) -> None:
        ray_internals.keep_replica_on_loopback()
        from cluster.serve.replicas import RayBackend

        self.backend = RayBackend(index, encoder, writer, served, config.timeout_s)
        self.config, self.access = config, access

    def __serve_build_asgi_app__(self) -> Any:  # the name Serve looks for
        from hashnet.server import build_app

        return build_app(
            self.backend, self.config.limits, self.access, RayTelemetry(run_name(self.config.run))
        )
