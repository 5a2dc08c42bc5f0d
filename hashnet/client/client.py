"""Client and AsyncClient: ask a served index over HTTP. Needs numpy, pyarrow and httpx, nothing else.

    with hashnet.Client("http://127.0.0.1:8000") as client:
        hits = client.search("cat.jpg", k=10)            # SearchResult: ids and distances (1, 10)
        hits = client.search(codes, k=100)               # uint8 (n, n_bits // 8): any n
        near = client.search_radius(features, radius=2)  # float (n, d): list of SearchResult
        hits = client.search(ids=[17, 42], k=10)         # items of the index

Long batches are cut, sent side by side and put together again. Every request has a timeout; one that
got no answer, or a "later" (429, 503), is sent again with growing pauses for ``retry_s`` seconds.
Writes are sent again only when the server cannot have seen them. What a server refuses raises
RequestRejected with its ``code``; no answer in time raises ServerUnavailable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np

from hashnet.client import wire
from hashnet.client.queries import as_queries
from hashnet.client.requests import Ask, Asker, settle, together
from hashnet.results import SearchResult

R = TypeVar("R")


class Client(Asker):
    """Asks a served index; safe to share between threads. ``token`` defaults to HASHNET_TOKEN.

    ``batch`` queries go into one request, ``parallel`` requests are under way at once. ``timeout_s``
    bounds one attempt, ``retry_s`` the time in which attempts are made.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 30.0,
        batch: int = 1024,
        parallel: int = 4,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s, retry_s, batch, parallel)
        self._http = httpx.Client(transport=transport, **self.http_options())
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="hashnet-client")

    def search(
        self,
        queries: Any = None,
        k: int = 10,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
    ) -> SearchResult:
        """The ``k`` nearest items of each query: ids int64 (q, k) and distances int32 (q, k), -1 unused.

        ``queries`` are pictures (paths, bytes, PIL), packed codes (uint8) or features (float); ``ids``
        asks by items of the index instead, and ``exclude_self`` leaves each out of its own answer.
        ``labels`` (class ids or names) keeps only items with at least one of them.
        """
        asks = self.ask_search(as_queries(queries, ids), {"k": k}, labels, exclude_self)
        return together(self._consistent(asks), k)

    def search_radius(
        self,
        queries: Any = None,
        radius: int = 2,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
    ) -> list[SearchResult]:
        """Every item within ``radius`` bits of each query: one 1-D SearchResult a query."""
        asks = self.ask_search(as_queries(queries, ids), {"radius": radius}, labels, exclude_self)
        return [hit for part in self._consistent(asks) for hit in part]

    def encode(self, batch: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), of pictures or features."""
        parts = self._all(self.ask_encode(as_queries(batch, None)), wire.read_codes)
        return np.concatenate(parts) if parts else np.zeros((0, self.info()["n_bits"] // 8), np.uint8)

    def info(self) -> dict[str, Any]:
        """What is served: n_bits, size, kind, version, lineage, modality, classes, limits."""
        return self._send(Ask("GET", "/v1/info")).json()

    def item(self, id: int) -> dict[str, Any]:
        """One indexed item: id, uri, labels, code (hex)."""
        return self._send(Ask("GET", f"/v1/items/{int(id)}")).json()

    def thumbnail(self, id: int) -> bytes:
        """A small JPEG or PNG of one indexed item."""
        return self._send(Ask("GET", f"/v1/items/{int(id)}/thumbnail")).content

    def add(self, queries: Any, ids: Any, labels: Any = None) -> int:
        """Adds items under new ``ids``; returns the index version that holds them. Needs the write token.

        ``labels`` is one list of class ids an item. Searches of this client see the items from here on.
        """
        asks = self.ask_add(as_queries(queries, None), ids, labels)
        return self._write(asks)

    def remove(self, ids: Any) -> int:
        """Removes items; returns the index version without them. Needs the write token."""
        return self._write(self.ask_remove(ids))

    def close(self) -> None:
        """Ends the connections; a client in a ``with`` block does it by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, asks: list[Ask]) -> int:
        for ask in asks:  # what was written is known also when a later part fails
            self.wrote(self._send(ask))
        return self._written

    def _send(self, ask: Ask) -> httpx.Response:
        started, attempt = time.monotonic(), 0
        while True:
            answer: httpx.Response | httpx.TransportError
            try:
                answer = self._http.request(**ask.arguments())
            except httpx.TransportError as error:
                answer = error
            pause = self.judge(ask, answer, attempt, time.monotonic() - started)
            if pause is None:
                assert isinstance(answer, httpx.Response)
                return answer
            time.sleep(pause)
            attempt += 1

    def _all(self, asks: Sequence[Ask], read: Callable[[bytes], R]) -> list[R]:
        if len(asks) == 1:
            return [read(self._send(asks[0]).content)]
        return list(self._pool.map(lambda ask: read(self._send(ask).content), asks))

    def _consistent(self, asks: list[Ask]) -> list[Any]:
        parts = self._all(asks, wire.read_hits)
        for again, newest in settle(parts):
            fresh = self._all([asks[i].at_least(newest) for i in again], wire.read_hits)
            for i, part in zip(again, fresh, strict=True):
                parts[i] = part
        return parts


class AsyncClient(Asker):
    """The same as Client with ``await``; see there for what the arguments mean."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 30.0,
        batch: int = 1024,
        parallel: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s, retry_s, batch, parallel)
        self._http = httpx.AsyncClient(transport=transport, **self.http_options())
        self._places = asyncio.Semaphore(parallel)

    async def search(
        self,
        queries: Any = None,
        k: int = 10,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
    ) -> SearchResult:
        """The ``k`` nearest items of each query, as Client.search."""
        asks = self.ask_search(as_queries(queries, ids), {"k": k}, labels, exclude_self)
        return together(await self._consistent(asks), k)

    async def search_radius(
        self,
        queries: Any = None,
        radius: int = 2,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
    ) -> list[SearchResult]:
        """Every item within ``radius`` bits of each query, as Client.search_radius."""
        asks = self.ask_search(as_queries(queries, ids), {"radius": radius}, labels, exclude_self)
        return [hit for part in await self._consistent(asks) for hit in part]

    async def encode(self, batch: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), of pictures or features."""
        parts = await self._all(self.ask_encode(as_queries(batch, None)), wire.read_codes)
        return np.concatenate(parts) if parts else np.zeros((0, (await self.info())["n_bits"] // 8), np.uint8)

    async def info(self) -> dict[str, Any]:
        """What is served, as Client.info."""
        return (await self._send(Ask("GET", "/v1/info"))).json()

    async def item(self, id: int) -> dict[str, Any]:
        """One indexed item: id, uri, labels, code (hex)."""
        return (await self._send(Ask("GET", f"/v1/items/{int(id)}"))).json()

    async def thumbnail(self, id: int) -> bytes:
        """A small JPEG or PNG of one indexed item."""
        return (await self._send(Ask("GET", f"/v1/items/{int(id)}/thumbnail"))).content

    async def add(self, queries: Any, ids: Any, labels: Any = None) -> int:
        """Adds items under new ``ids``, as Client.add."""
        asks = self.ask_add(as_queries(queries, None), ids, labels)
        return await self._write(asks)

    async def remove(self, ids: Any) -> int:
        """Removes items; returns the index version without them."""
        return await self._write(self.ask_remove(ids))

    async def close(self) -> None:
        """Ends the connections; a client in an ``async with`` block does it by itself."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _write(self, asks: list[Ask]) -> int:
        for ask in asks:
            self.wrote(await self._send(ask))
        return self._written

    async def _send(self, ask: Ask) -> httpx.Response:
        started, attempt = time.monotonic(), 0
        while True:
            answer: httpx.Response | httpx.TransportError
            try:
                answer = await self._http.request(**ask.arguments())
            except httpx.TransportError as error:
                answer = error
            pause = self.judge(ask, answer, attempt, time.monotonic() - started)
            if pause is None:
                assert isinstance(answer, httpx.Response)
                return answer
            await asyncio.sleep(pause)
            attempt += 1

    async def _all(self, asks: Sequence[Ask], read: Callable[[bytes], R]) -> list[R]:
        async def one(ask: Ask) -> R:
            async with self._places:
                return read((await self._send(ask)).content)

        tasks: list[Awaitable[R]] = [asyncio.ensure_future(one(ask)) for ask in asks]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()  # type: ignore[attr-defined] # futures, all of them
            raise

    async def _consistent(self, asks: list[Ask]) -> list[Any]:
        parts = await self._all(asks, wire.read_hits)
        for again, newest in settle(parts):
            fresh = await self._all([asks[i].at_least(newest) for i in again], wire.read_hits)
            for i, part in zip(again, fresh, strict=True):
                parts[i] = part
        return parts
