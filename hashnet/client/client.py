"""Client and AsyncClient: search a served index over HTTP. They need numpy, pyarrow and httpx, nothing else.

    with hashnet.Client("http://127.0.0.1:8000") as client:
        hits = client.search("cat.jpg", k=10)            # SearchResult: ids and distances (1, 10)
        hits = client.search(codes, k=100)               # uint8 (n, n_bits // 8): any n
        near = client.search_radius(features, radius=2)  # float (n, d): list of SearchResult
        hits = client.search(ids=[17, 42], k=10)         # items of the index

Long batches are split, sent in parallel and joined. Every request has a timeout. A request that got no
response, or 429 or 503, is sent again with growing pauses for ``retry_s`` seconds; a write only when the
server cannot have seen it. A request the server refuses raises RequestRejected with its ``code``; no
response in time raises ServerUnavailable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np

from hashnet.client.requests import ApiRequest, BaseClient, Exchange, join_parts
from hashnet.client.wire import as_queries, with_vectors
from hashnet.errors import ClientError
from hashnet.results import SearchResult

R = TypeVar("R")


class Client(BaseClient):
    """A client of a served index; safe to share between threads. ``token`` defaults to HASHNET_TOKEN.

    One request carries at most ``batch`` queries; at most ``parallel`` requests are in flight.
    ``timeout_s`` limits one attempt, ``retry_s`` the time during which attempts are made.
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
        self._http = httpx.Client(transport=transport, **self._http_options())
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="hashnet-client")

    def search(
        self,
        queries: Any = None,
        k: int = 10,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
        ranking: str = "hamming",
        where: str | None = None,
        rescore: str | None = None,
        oversample: float | None = None,
        features: Any = None,
        metric: str | None = None,
    ) -> SearchResult:
        """The ``k`` nearest items of each query: ids int64 (q, k) and distances int32 (q, k), -1 unused.

        ``queries`` are pictures (paths, bytes, PIL), packed codes (uint8) or features (float). ``ids``
        searches by items of the index instead; ``exclude_self`` leaves each out of its own hits.
        ``labels`` (class ids or names) keeps only items with at least one of them, ``where`` those for which
        a condition on their columns holds (``"year >= 2020"``). With
        ``ranking="asymmetric"`` pictures and features are ranked by their logits against the codes: the
        result has ``scores``, the largest first.

        ``rescore="features"`` orders the first k x ``oversample`` items (none: 4, or what ``tune`` found) by
        the ``metric``, cosine (none) or inner_product, of their stored vectors and the queries' own, which
        ``scores`` hold then. Of pictures, features and ids the server knows the vectors; codes come with
        theirs, ``features`` (q, width).
        """
        bound = {"k": int(k), "ranking": ranking, "where": where}
        bound |= {"rescore": rescore, "oversample": oversample, "metric": metric}
        given = with_vectors(as_queries(queries, ids), features)
        parts = self._run(self._search(given, bound, labels, exclude_self))
        return join_parts(parts, k)

    def search_radius(
        self,
        queries: Any = None,
        radius: int = 2,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
        where: str | None = None,
    ) -> list[SearchResult]:
        """Every item within ``radius`` bits of each query: one 1-D SearchResult per query."""
        bound = {"radius": int(radius), "where": where}
        parts = self._run(self._search(as_queries(queries, ids), bound, labels, exclude_self))
        return [hits for part in parts for hits in part]

    def encode(self, batch: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), of pictures or features."""
        parts = self._run(self._encode(batch))
        codes = [part.values for part in parts]
        return np.concatenate(codes) if codes else np.zeros((0, self.info()["n_bits"] // 8), np.uint8)

    def info(self) -> dict[str, Any]:
        """What is served: n_bits, size, kind, version, lineage, modality, classes, limits."""
        return self._send(ApiRequest("GET", "/v1/info", self._own_writes())).json()

    def item(self, id: int) -> dict[str, Any]:
        """One indexed item: id, uri, labels, code (hex)."""
        return self._send(ApiRequest("GET", f"/v1/items/{int(id)}", self._own_writes())).json()

    def thumbnail(self, id: int) -> bytes:
        """A small JPEG or PNG of one indexed item."""
        return self._send(ApiRequest("GET", f"/v1/items/{int(id)}/thumbnail")).content

    def add(
        self,
        queries: Any,
        ids: Any,
        labels: Any = None,
        *,
        columns: Any = None,
        features: Any = None,
        upsert: bool = False,
    ) -> int:
        """Adds items under new ``ids``; returns the index version that holds them. Needs the write token.

        ``labels`` is one list of class ids, or of class names, per item; ``columns`` an Arrow table or
        name → values: any index takes "uri" and "key", others only where it has such a column. With
        ``upsert``, items that have one of the ids are replaced. An index with vectors for rescoring also
        needs those of codes, ``features`` (n, width). All items are added or none (beyond 250,000, or 24 MB
        of vectors, the error says how many were). Later reads by this client see them.
        """
        return self._run(self._add(queries, ids, labels, columns, features, upsert))

    def remove(self, ids: Any) -> int:
        """Removes items; returns the index version without them. Needs the write token."""
        return self._run(self._remove(ids))

    def close(self) -> None:
        """Closes the connections; a client in a ``with`` block does so by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, exchange: Exchange[R]) -> R:
        try:
            requests = next(exchange)
            while True:
                try:
                    bodies = self._send_all(requests)
                except ClientError as error:
                    requests = exchange.throw(error)
                else:
                    requests = exchange.send(bodies)
        except StopIteration as end:
            return end.value

    def _send_all(self, requests: list[ApiRequest]) -> list[bytes]:
        if len(requests) == 1:
            return [self._send(requests[0]).content]
        return list(self._pool.map(lambda request: self._send(request).content, requests))

    def _send(self, request: ApiRequest) -> httpx.Response:
        for attempt in self.retry_policy.attempts(request.idempotent):
            if attempt.pause_s:
                time.sleep(attempt.pause_s)
            with attempt:
                attempt.response = self._http.request(**request.arguments())
        assert attempt.response is not None  # the policy raises otherwise
        return attempt.response


class AsyncClient(BaseClient):
    """The same as Client with ``await``; its arguments are described there."""

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
        self._http = httpx.AsyncClient(transport=transport, **self._http_options())
        self._in_flight = asyncio.Semaphore(parallel)

    async def search(
        self,
        queries: Any = None,
        k: int = 10,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
        ranking: str = "hamming",
        where: str | None = None,
        rescore: str | None = None,
        oversample: float | None = None,
        features: Any = None,
        metric: str | None = None,
    ) -> SearchResult:
        """The ``k`` nearest items of each query, as Client.search."""
        bound = {"k": int(k), "ranking": ranking, "where": where}
        bound |= {"rescore": rescore, "oversample": oversample, "metric": metric}
        given = with_vectors(as_queries(queries, ids), features)
        parts = await self._run(self._search(given, bound, labels, exclude_self))
        return join_parts(parts, k)

    async def search_radius(
        self,
        queries: Any = None,
        radius: int = 2,
        *,
        ids: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
        where: str | None = None,
    ) -> list[SearchResult]:
        """Every item within ``radius`` bits of each query, as Client.search_radius."""
        bound = {"radius": int(radius), "where": where}
        parts = await self._run(self._search(as_queries(queries, ids), bound, labels, exclude_self))
        return [hits for part in parts for hits in part]

    async def encode(self, batch: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), of pictures or features."""
        parts = await self._run(self._encode(batch))
        codes = [part.values for part in parts]
        return np.concatenate(codes) if codes else np.zeros((0, (await self.info())["n_bits"] // 8), np.uint8)

    async def info(self) -> dict[str, Any]:
        """What is served, as Client.info."""
        return (await self._send(ApiRequest("GET", "/v1/info", self._own_writes()))).json()

    async def item(self, id: int) -> dict[str, Any]:
        """One indexed item: id, uri, labels, code (hex)."""
        return (await self._send(ApiRequest("GET", f"/v1/items/{int(id)}", self._own_writes()))).json()

    async def thumbnail(self, id: int) -> bytes:
        """A small JPEG or PNG of one indexed item."""
        return (await self._send(ApiRequest("GET", f"/v1/items/{int(id)}/thumbnail"))).content

    async def add(
        self,
        queries: Any,
        ids: Any,
        labels: Any = None,
        *,
        columns: Any = None,
        features: Any = None,
        upsert: bool = False,
    ) -> int:
        """Adds items under new ``ids``, as Client.add."""
        return await self._run(self._add(queries, ids, labels, columns, features, upsert))

    async def remove(self, ids: Any) -> int:
        """Removes items; returns the index version without them."""
        return await self._run(self._remove(ids))

    async def close(self) -> None:
        """Closes the connections; a client in an ``async with`` block does so by itself."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, exchange: Exchange[R]) -> R:
        try:
            requests = next(exchange)
            while True:
                try:
                    bodies = await self._send_all(requests)
                except ClientError as error:
                    requests = exchange.throw(error)
                else:
                    requests = exchange.send(bodies)
        except StopIteration as end:
            return end.value

    async def _send_all(self, requests: list[ApiRequest]) -> list[bytes]:
        async def body(request: ApiRequest) -> bytes:
            async with self._in_flight:
                return (await self._send(request)).content

        tasks = [asyncio.ensure_future(body(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _send(self, request: ApiRequest) -> httpx.Response:
        for attempt in self.retry_policy.attempts(request.idempotent):
            if attempt.pause_s:
                await asyncio.sleep(attempt.pause_s)
            with attempt:
                attempt.response = await self._http.request(**request.arguments())
        assert attempt.response is not None  # the policy raises otherwise
        return attempt.response
