"""The Serve deployments of a server: HTTP, encoder, writer.

    client ──▶ HTTP replicas             the index, memory-mapped, and the HTTP application around it
                 ├──▶ encoder replicas   torch; pictures of several requests run as one
                 └──▶ writer (one)       the only process that changes the index

An HTTP replica listens on the server's own port: a query by code or id is answered in the process that
accepted it, and no request passes through Serve's proxy. Replicas on one node share the port, and the system
spreads connections over them. Serve starts, watches and replaces replicas.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.runtime import ray_internals, run_name, telemetry
from hashnet.errors import HashnetError
from hashnet.server import (
    Access,
    ApiError,
    Backend,
    BatchEncoder,
    Batcher,
    Change,
    EncodeRequest,
    HttpServer,
    IndexService,
    IndexWriter,
    LiveIndex,
    ServeConfig,
    ServedRun,
    Telemetry,
    Written,
    build_app,
    listen,
)

LOST = (RayActorError, DeploymentUnavailableError)  # the replica is gone; another one can respond
START_S = 60.0  # for the HTTP server to accept connections, once the index is loaded
MAX_ENCODED_TOGETHER = 1024  # rows
MAX_WRITTEN_TOGETHER = 8192  # rows


def set_threads(threads: int | None) -> int:
    """Sets how many threads numerical libraries start; call it before they are imported."""
    n = threads or len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(n)
    return n


class RayTelemetry(Telemetry):
    """The counters of one HTTP replica, which also go to Ray's metrics: those add up over all replicas."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run

    def request(self, method: str, route: str, status: int, seconds: float, queries: int) -> None:
        super().request(method, route, status, seconds, queries)
        telemetry.count("requests", run=self.run, method=method, route=route, status=status)
        telemetry.observe("request_seconds", seconds, run=self.run, route=route)

    def search(self, kind: str, seconds: float, queries: int, refused: int) -> None:
        super().search(kind, seconds, queries, refused)
        telemetry.observe("search_seconds", seconds, run=self.run, kind=kind)
        telemetry.count("search_queries", queries - refused, run=self.run, kind=kind, status="ok")
        telemetry.count("search_queries", refused, run=self.run, kind=kind, status="refused")

    def index(self, version: int, size: int) -> None:
        super().index(version, size)
        telemetry.gauge("index_version", version, run=self.run)
        telemetry.gauge("index_size", size, run=self.run)


class RayModel:
    """The encoder replicas. A request that lost its replica is sent to another one."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        """The result of the request."""
        return await self._call(lambda: self.encoder.encode.remote(request), request.deadline)

    async def ready(self) -> None:
        """Returns when a replica responds."""
        await self._call(lambda: self.encoder.ready.remote(), time.time() + 5)

    async def _call(self, call: Callable[[], Any], deadline: float) -> Any:
        pause = 0.02
        while True:
            try:
                result = await call()
                if isinstance(result, ApiError):  # a replica returns errors that a client is told
                    raise result
                return result
            except LOST as error:
                if time.time() + pause > deadline:
                    raise ApiError("unavailable", "no encoder responded; try again", 503) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)
            except BackPressureError as error:
                raise ApiError("overloaded", "too many requests are waiting; try again", 503) from error


class RayWriter:
    """The writer replica. A call takes milliseconds; changes that arrive during one share the next."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self._changes: Batcher[Change, Written] = Batcher(self._call, max_rows=MAX_WRITTEN_TOGETHER)

    async def write(self, change: Change) -> Written:
        """The index after the change. A write is never sent twice."""
        return await self._changes.submit(change)

    def _call(self, changes: Sequence[Change]) -> list[Written | HashnetError]:
        try:
            return self.writer.write.remote(list(changes)).result()
        except LOST:
            sentence = "the writer was lost; whether the change was made is not known"
            return [ApiError("timeout", sentence, 504) for _ in changes]


@serve.deployment
class HttpReplica:
    """The index and the HTTP application around it, on a thread with an event loop of its own."""

    def __init__(
        self,
        encoder: Any,
        writer: Any,
        slices: list[Any],
        config: ServeConfig,
        served: ServedRun,
        access: Access,
    ) -> None:
        ray_internals.keep_replica_on_loopback()
        set_threads(config.threads)
        counters = RayTelemetry(run_name(config.run))
        index: Any
        if slices:
            from cluster.serve.slices import SlicedIndex

            index = SlicedIndex(slices, config.timeout_s)
        else:
            live = LiveIndex(served.index, config.search_engine, config.index_device, served.model_sha256)
            index = IndexService(live, config.follow_s, counters)
            counters.index(live.version, len(live.index))
        model = RayModel(encoder) if encoder is not None else None
        backend = Backend(served, index, model, RayWriter(writer).write, config.timeout_s)
        up = threading.Event()
        app = build_app(backend, config.limits, access, counters)
        self._server = HttpServer(app, config, when_up=up.set)
        socket = listen(config.address, config.port, shared=True)
        self._thread = threading.Thread(target=self._run, args=(socket,), name="http", daemon=True)
        self._thread.start()
        if not up.wait(START_S):
            raise RuntimeError(f"the HTTP server did not start within {START_S:g} s")

    def _run(self, socket: Any) -> None:
        import uvloop

        uvloop.run(self._server.serve([socket]))

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server ended")

    def __del__(self) -> None:  # Serve calls it when it stops the replica
        self._server.should_exit = True
        self._thread.join(10)


@serve.deployment
class EncoderReplica:
    """Holds the model."""

    def __init__(self, config: ServeConfig, served: ServedRun) -> None:
        ray_internals.keep_replica_on_loopback()
        n = set_threads(config.threads)
        assert served.model is not None
        encoder = BatchEncoder(served.model, config.device, config.max_pixels, n)
        self._batcher: Batcher = Batcher(encoder.encode, max_rows=MAX_ENCODED_TOGETHER, name="encode")

    async def encode(self, request: EncodeRequest) -> np.ndarray | ApiError:
        """The result of the request, or why there is none."""
        try:
            return await self._batcher.submit(request)
        except ApiError as error:
            return error

    async def ready(self) -> bool:
        """True: the model was loaded when the replica started."""
        return True


@serve.deployment
class WriterReplica:
    """The single writer of the index; changes that arrive together are one commit."""

    def __init__(self, config: ServeConfig, served: ServedRun, writable: bool) -> None:
        ray_internals.keep_replica_on_loopback()
        set_threads(None)
        folders = [served.index]
        if config.slices is not None:
            from cluster.serve.slices import slice_folders

            folders = slice_folders(served.index, config.slices)
        self._writer = IndexWriter(*folders, model_sha256=served.model_sha256)
        if writable and config.slices is None:  # slices may not be built yet
            self._writer.open()  # now: the first change should not wait for it

    async def write(self, changes: list[Change]) -> list[Written | ApiError]:
        """For each change, the index after it or why it was not made."""
        return await asyncio.gather(*map(self._write, changes))

    async def _write(self, change: Change) -> Written | ApiError:
        try:
            return await self._writer.write(change)
        except ApiError as error:
            return error
