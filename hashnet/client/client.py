"""Client and AsyncClient: search a served index over HTTP. They need numpy, pyarrow and httpx, nothing else.

    with hashnet.Client("http://127.0.0.1:8000") as client:
        hits = client.search("cat.jpg", k=10)            # SearchResult: ids and distances (1, 10)
        hits = client.search(codes, k=100)               # uint8 (n, n_bits // 8): any n
        near = client.search_radius(features, radius=2)  # float (n, d): list of SearchResult
        hits = client.search(ids=[17, 42], k=10)         # items of the index; keys=["cat.jpg"] by their keys

Long batches are split, sent in parallel and joined. Every request has a timeout. A request that got no
response, or 429 or 503, is sent again with growing pauses for ``retry_s`` seconds; a write only when the
server cannot have seen it. A request the server refuses raises RequestRejected with its ``code``; no
response in time raises ServerUnavailable.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
import numpy as np
import pyarrow as pa

from hashnet import __version__
from hashnet.client import wire
from hashnet.client.retries import ApiRequest, RetryPolicy
from hashnet.client.wire import Queries, as_ids, as_keys, as_queries, label_lists, with_vectors
from hashnet.errors import ClientError, DataError
from hashnet.results import SearchResult

P = ParamSpec("P")
R = TypeVar("R")
WRITE_ROWS = 250_000  # in one request to add or remove: 8 MB with codes of 64 bits and a label each
WRITE_BYTES = 24_000_000  # of vectors in one request to add, which is applied completely or not at all
ROUNDS = 5  # how often parts answered by an older index version are requested again

Exchange = Generator[list[ApiRequest], list[bytes], R]  # requests out, bodies in, a result at the end


class BaseClient:
    """What both clients share: their settings and, without touching the network, what they send.

    ``_search`` and the other exchanges are generators: each yields the requests to send, gets their bodies
    back, and returns the result. The clients' methods are made of them and differ only in how they send.
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
        transport: Any = None,
    ) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise DataError(f"{url!r} is not a server's address; give one like http://127.0.0.1:8000")
        for name, value in (("timeout_s", timeout_s), ("batch", batch), ("parallel", parallel)):
            if value <= 0:
                raise DataError(f"{name} must be positive, got {value}")
        self.url = str(url).rstrip("/")
        self.timeout_s, self.batch, self.parallel = timeout_s, batch, parallel
        self.retry_policy = RetryPolicy(self.url, retry_s)
        self._token = (token or os.environ.get("HASHNET_TOKEN", "")).strip()
        self._written = 0  # the newest version this client wrote: its own reads must not be older
        self._connect(transport)

    def _connect(self, transport: Any) -> None:
        """Prepares for sending; ``transport`` is httpx's, None for its own."""
        raise NotImplementedError

    def _http_options(self) -> dict[str, Any]:
        """The arguments of the httpx client."""
        headers = {
            "user-agent": f"hashnet/{__version__}",
            "accept": f"{wire.ARROW}, application/json, image/*",
        }
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=min(5.0, self.timeout_s)),
            "limits": httpx.Limits(max_connections=self.parallel + 4),
        }

    def _search(
        self,
        queries: Any = None,
        k: int = 10,
        *,
        ids: Any = None,
        keys: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
        ranking: str = "hamming",
        where: str | None = None,
        columns: Sequence[str] | None = None,
        rescore: str | None = None,
        oversample: float | None = None,
        features: Any = None,
        metric: str | None = None,
    ) -> Exchange[SearchResult]:
        """The ``k`` nearest items of each query: ids int64 (q, k) and distances int32 (q, k), -1 unused.

        ``queries`` are pictures (paths, bytes, PIL), packed codes (uint8) or features (float). ``ids`` or
        ``keys`` searches by items of the index instead; ``exclude_self`` leaves each out of its own hits.
        ``labels`` (class ids or names) keeps only items with at least one of them, ``where`` those for which
        a condition on their columns holds (``"year >= 2020"``). ``columns`` names those to return as the
        result's ``.columns``, ``"key"`` among them. With
        ``ranking="asymmetric"`` pictures and features are ranked by their logits against the codes: the
        result has ``scores``, the largest first.

        ``rescore="features"`` orders the first k x ``oversample`` items (none: 4, or what ``tune`` found) by
        the ``metric``, cosine (none) or inner_product, of their stored vectors and the queries' own;
        ``scores`` holds its values. The server knows the vectors of pictures, features and items; codes come
        with their own, ``features`` (q, width).
        """
        bound = {"k": int(k), "ranking": ranking, "where": where, "columns": columns}
        bound |= {"rescore": rescore, "oversample": oversample, "metric": metric}
        given = with_vectors(as_queries(queries, ids, keys), features)
        parts = yield from self._parts(given, bound, labels, exclude_self)
        return join_parts(parts, k)

    def _search_radius(
        self,
        queries: Any = None,
        radius: int = 2,
        *,
        ids: Any = None,
        keys: Any = None,
        labels: Sequence[int | str] | None = None,
        exclude_self: bool = False,
        where: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> Exchange[list[SearchResult]]:
        """Every item within ``radius`` bits of each query: one 1-D SearchResult per query."""
        bound = {"radius": int(radius), "where": where, "columns": columns}
        parts = yield from self._parts(as_queries(queries, ids, keys), bound, labels, exclude_self)
        return [hits for part in parts for hits in part]

    def _encode(self, batch: Any) -> Exchange[np.ndarray]:
        """Packed codes, uint8 (n, n_bits // 8), of pictures or features."""
        codes = [part.values for part in (yield from self._encoded(batch))]
        if codes:
            return np.concatenate(codes)
        about = yield from self._info()
        return np.zeros((0, about["n_bits"] // 8), np.uint8)

    def _info(self) -> Exchange[dict[str, Any]]:
        """What is served: n_bits, size, kind, version, lineage, modality, classes, limits."""
        (body,) = yield [ApiRequest("GET", "/v1/info", self._own_writes())]
        return json.loads(body)

    def _item(self, id: int | None = None, *, key: str | None = None) -> Exchange[dict[str, Any]]:
        """One indexed item, by its id or its key: id, uri, labels, code (hex), key and further columns."""
        if (id is None) == (key is None):
            raise DataError("give the id or the key of an item, one of them")
        if key is not None:
            (body,) = yield [ApiRequest("GET", "/v1/items", {"key": key} | self._own_writes())]
            return json.loads(body)["items"][0]
        assert id is not None
        (body,) = yield [ApiRequest("GET", f"/v1/items/{int(id)}", self._own_writes())]
        return json.loads(body)

    def _thumbnail(self, id: int) -> Exchange[bytes]:
        """A small JPEG or PNG of one indexed item."""
        (body,) = yield [ApiRequest("GET", f"/v1/items/{int(id)}/thumbnail")]
        return body

    def _add(
        self,
        queries: Any,
        ids: Any = None,
        labels: Any = None,
        *,
        keys: Any = None,
        columns: Any = None,
        features: Any = None,
        upsert: bool = False,
    ) -> Exchange[int]:
        """Adds items under new ``ids``, ``keys`` or both; returns the index version that holds them.

        Needs the write token. ``labels`` is one list of class ids, or of class names, per item; ``columns``
        an Arrow table or name → values: any index takes "uri", others only where it has such a column. With
        ``upsert``, items that have one of the ids or, without ids, of the keys are replaced; without ids, an
        item with a new key gets a new id. An index with vectors for rescoring also needs those of codes,
        ``features`` (n, width). All items are added or none (beyond 250,000, or 24 MB of vectors, the error
        says how many were). Later reads by this client see them.
        """
        items = as_queries(queries)
        ids, keys = None if ids is None else as_ids(ids), None if keys is None else as_keys(keys)
        for name, column in (("ids", ids), ("labels", labels)):
            if column is not None and len(column) != len(items):
                raise DataError(f"{len(items)} items came with {len(column)} {name}")
        lists = None if labels is None else label_lists(labels)
        table = wire.as_columns(columns, keys, len(items))
        if ids is None and (table is None or "key" not in table.column_names):
            raise DataError("items need ids= or keys=")
        if len(items) and items.kind in ("images", "features"):
            encoded = yield from self._encoded(items, vectors=features is None)
            found = [part.vectors for part in encoded if part.vectors is not None]
            codes = np.concatenate([part.values for part in encoded])
            items = Queries("codes", codes, np.concatenate(found) if found else None)
        items = with_vectors(items, features)
        requests, most = [], WRITE_ROWS
        if items.vectors is not None and len(items):
            most = max(1, min(most, WRITE_BYTES // items.vectors[0].nbytes))
        for rows in _write_parts(len(items), most):
            some = None if lists is None else lists[rows]
            further = None if table is None else table.slice(rows.start, most)
            own = None if ids is None else ids[rows]
            body = wire.write_items(items.rows(rows), own, some, further, upsert)
            requests.append(ApiRequest("POST", "/v1/items", {}, body, idempotent=upsert))
        return (yield from self._write(requests, len(items), most, "added"))

    def _remove(self, ids: Any = None, *, keys: Any = None) -> Exchange[int]:
        """Removes items by id or key; returns the index version without them. Needs the write token."""
        items = as_queries(None, ids, keys)
        parts = _write_parts(len(items), WRITE_ROWS)
        bodies = [wire.write_queries(items.rows(rows)) for rows in parts]
        requests = [ApiRequest("POST", "/v1/items/remove", {}, body, idempotent=False) for body in bodies]
        return (yield from self._write(requests, len(items), WRITE_ROWS, "removed"))

    def _parts(
        self,
        queries: Queries,
        bound: dict[str, Any],
        labels: Sequence[int | str] | None,
        exclude_self: bool,
    ) -> Exchange[list[Any]]:
        """One result per part of the queries, all from one index version where that can be had.

        ``bound`` is ``{"k": …, …}`` or ``{"radius": …, …}``; options that are None are left out. An index
        that keeps changing faster than parts can be requested again is abandoned after ROUNDS.
        """
        params = {name: value for name, value in bound.items() if value is not None} | _label_params(labels)
        if params.get("ranking") == "hamming":  # the default: older servers know no other
            del params["ranking"]
        if exclude_self:
            params["exclude_self"] = "true"
        params |= self._own_writes()
        requests = [
            ApiRequest("POST", "/v1/search", params, wire.write_queries(part), names=part.names)
            for part in queries.parts(self.batch)
        ]
        parts = [wire.read_hits(body) for body in (yield requests)]
        for _ in range(ROUNDS):
            older, newest = _outdated(parts)
            if not older:
                break
            bodies = yield [requests[i].at_least(newest) for i in older]
            for i, body in zip(older, bodies, strict=True):
                parts[i] = wire.read_hits(body)
        return parts

    def _encoded(self, batch: Any, vectors: bool = False) -> Exchange[list[Queries]]:
        """Codes and, with ``vectors``, those that an index rescores by which has any of this model."""
        queries = as_queries(batch)
        if queries.kind not in ("images", "features"):
            raise DataError(f"only pictures and features can be encoded, got {queries.kind}")
        params = {"vectors": "true"} if vectors else {}
        bodies = yield [
            ApiRequest("POST", "/v1/encode", params, wire.write_queries(part), names=part.names)
            for part in queries.parts(self.batch)
        ]
        return [wire.read_queries(wire.read_table(body)) for body in bodies]

    def _write(self, requests: list[ApiRequest], n: int, each: int, verb: str) -> Exchange[int]:
        """One after another; the error of a later one says what the earlier ones did."""
        for number, request in enumerate(requests):
            try:
                (body,) = yield [request]
            except ClientError as error:
                if number:
                    done = f"the first {number * each:,} of {n:,} were {verb} before"
                    error.args = (f"{error.args[0]}; {done}, the others were not", *error.args[1:])
                raise
            self._written = max(self._written, wire.read_version(body))
        return self._written

    def _own_writes(self) -> dict[str, Any]:
        """The query parameter that makes a read see what this client wrote."""
        return {"min_version": self._written} if self._written else {}


def _blocking(exchange: Callable[Concatenate[Any, P], Exchange[R]]) -> Callable[Concatenate[Client, P], R]:
    """The method of Client that makes an exchange, with its name, parameters and docstring."""

    @wraps(exchange)
    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(exchange(self, *args, **kwargs))

    method.__name__ = exchange.__name__.removeprefix("_")
    return method


def _awaited(
    exchange: Callable[Concatenate[Any, P], Exchange[R]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """The same for AsyncClient."""

    @wraps(exchange)
    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(exchange(self, *args, **kwargs))

    method.__name__ = exchange.__name__.removeprefix("_")
    return method


class Client(BaseClient):
    """A client of a served index; safe to share between threads. ``token`` defaults to HASHNET_TOKEN.

    One request carries at most ``batch`` queries; at most ``parallel`` requests are in flight.
    ``timeout_s`` limits one attempt, ``retry_s`` the time during which attempts are made.
    """

    search = _blocking(BaseClient._search)
    search_radius = _blocking(BaseClient._search_radius)
    encode = _blocking(BaseClient._encode)
    info = _blocking(BaseClient._info)
    item = _blocking(BaseClient._item)
    thumbnail = _blocking(BaseClient._thumbnail)
    add = _blocking(BaseClient._add)
    remove = _blocking(BaseClient._remove)

    def _connect(self, transport: httpx.BaseTransport | None) -> None:
        self._http = httpx.Client(transport=transport, **self._http_options())
        self._pool = ThreadPoolExecutor(self.parallel, thread_name_prefix="hashnet-client")

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
        for attempt in self.retry_policy.attempts(request.idempotent, request.names):
            if attempt.pause_s:
                time.sleep(attempt.pause_s)
            with attempt:
                attempt.response = self._http.request(**request.arguments())
        assert attempt.response is not None  # the policy raises otherwise
        return attempt.response


class AsyncClient(BaseClient):
    """The same as Client with ``await``; its arguments are described there."""

    search = _awaited(BaseClient._search)
    search_radius = _awaited(BaseClient._search_radius)
    encode = _awaited(BaseClient._encode)
    info = _awaited(BaseClient._info)
    item = _awaited(BaseClient._item)
    thumbnail = _awaited(BaseClient._thumbnail)
    add = _awaited(BaseClient._add)
    remove = _awaited(BaseClient._remove)

    def _connect(self, transport: httpx.AsyncBaseTransport | None) -> None:
        self._http = httpx.AsyncClient(transport=transport, **self._http_options())
        self._in_flight = asyncio.Semaphore(self.parallel)

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
        for attempt in self.retry_policy.attempts(request.idempotent, request.names):
            if attempt.pause_s:
                await asyncio.sleep(attempt.pause_s)
            with attempt:
                attempt.response = await self._http.request(**request.arguments())
        assert attempt.response is not None  # the policy raises otherwise
        return attempt.response


def _write_parts(n: int, most: int) -> list[slice]:
    """Rows of each request of a write; almost always one, which is applied completely or not at all."""
    return [slice(start, start + most) for start in range(0, n, most)]


def _label_params(labels: Sequence[int | str] | None) -> dict[str, Any]:
    """A label filter as query parameters.

    Names and ids travel apart: in an address all is text, and a class named "1" need not be class 1.
    """
    if labels is None:
        return {}
    listed = [labels] if isinstance(labels, (int, str, np.integer)) else list(labels)
    if not listed:
        raise DataError("labels= names none; leave it out to search everything")
    odd = [v for v in listed if isinstance(v, bool) or not isinstance(v, (int, str, np.integer))]
    if odd:
        raise DataError(f"labels= takes class ids and names, got {odd[0]!r}")
    return {
        "labels": [label for label in listed if isinstance(label, str)],
        "label_ids": [int(label) for label in listed if not isinstance(label, str)],
    }


def _outdated(parts: list[SearchResult | list[SearchResult]]) -> tuple[list[int], int]:
    """(numbers of the parts of an older index version than others, the newest version)."""
    versions = [
        {part.version} if isinstance(part, SearchResult) else {h.version for h in part} for part in parts
    ]
    known = {i: max(v for v in seen if v is not None) for i, seen in enumerate(versions) if seen - {None}}
    newest = max(known.values(), default=0)
    return [i for i, version in known.items() if version < newest], newest


def join_parts(parts: list[SearchResult], k: int) -> SearchResult:
    """One (q, k) result from the parts of a batch; without a version where parts have different ones."""
    if not parts:
        return SearchResult(np.zeros((0, k), np.int64), np.zeros((0, k), np.int32))
    versions = {part.version for part in parts}
    scores = [part.scores for part in parts if part.scores is not None]
    columns = [part.columns for part in parts if part.columns is not None]
    return SearchResult(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.distances for part in parts]),
        versions.pop() if len(versions) == 1 else None,
        np.concatenate(scores) if scores else None,
        pa.concat_tables(columns) if columns else None,
    )
