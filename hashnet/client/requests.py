"""What both clients share without touching the network: settings, requests, and joining responses.

A method of ``BaseClient`` is a generator: it yields the requests to send, gets their bodies back, and
returns the result. Client and AsyncClient differ only in how they send.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import numpy as np

from hashnet import __version__
from hashnet.client import wire
from hashnet.client.queries import Queries, as_ids, as_queries, label_lists
from hashnet.client.retry import RetryPolicy
from hashnet.errors import ClientError, DataError
from hashnet.results import SearchResult

R = TypeVar("R")
WRITE_ROWS = 250_000  # in one request to add or remove: 8 MB with codes of 64 bits and a label each
ROUNDS = 5  # how often parts answered by an older index version are requested again


@dataclass(frozen=True)
class ApiRequest:
    """One HTTP request. An idempotent one changes nothing, so it may be sent twice."""

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    idempotent: bool = True

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``httpx.Client.request``."""
        headers = {"content-type": wire.ARROW} if self.body is not None else {}
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params or None,
            "content": self.body,
            "headers": headers,
        }

    def at_least(self, version: int) -> ApiRequest:
        """The same request, to be answered by this index version or a newer one."""
        return replace(self, params=self.params | {"min_version": version})


Exchange = Generator[list[ApiRequest], list[bytes], R]  # requests out, bodies in, a result at the end


class BaseClient:
    """The settings of a client and its exchanges with the server."""

    def __init__(
        self, url: str, token: str | None, timeout_s: float, retry_s: float, batch: int, parallel: int
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
        queries: Queries,
        bound: dict[str, Any],
        labels: Sequence[int | str] | None,
        exclude_self: bool,
    ) -> Exchange[list[Any]]:
        """One result per part of the queries, all from one index version where that can be had.

        ``bound`` is ``{"k": …, …}`` or ``{"radius": …, …}``. An index that keeps changing faster
        than parts can be requested again is given up on after ROUNDS.
        """
        params = {name: value for name, value in bound.items() if value is not None} | _label_params(labels)
        if params.get("ranking") == "hamming":  # the default: servers of before know no other
            del params["ranking"]
        if exclude_self:
            params["exclude_self"] = "true"
        params |= self._own_writes()
        requests = [
            ApiRequest("POST", "/v1/search", params, wire.write_queries(part))
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

    def _encode(self, batch: Any) -> Exchange[list[np.ndarray]]:
        queries = as_queries(batch)
        if queries.kind not in ("images", "features"):
            raise DataError(f"only pictures and features can be encoded, got {queries.kind}")
        bodies = yield [
            ApiRequest("POST", "/v1/encode", {}, wire.write_queries(part))
            for part in queries.parts(self.batch)
        ]
        return [wire.read_codes(body) for body in bodies]

    def _add(self, queries: Any, ids: Any, labels: Any, columns: Any, upsert: bool) -> Exchange[int]:
        """Pictures and features are encoded first, so that all items fit into one request: all or nothing."""
        items, ids = as_queries(queries), as_ids(ids)
        for name, column in (("ids", ids), ("labels", labels)):
            if column is not None and len(column) != len(items):
                raise DataError(f"{len(items)} items came with {len(column)} {name}")
        lists = None if labels is None else label_lists(labels)
        table = None if columns is None else wire.as_columns(columns, len(items))
        if len(items) and items.kind in ("images", "features"):
            items = Queries("codes", np.concatenate((yield from self._encode(items))))
        requests = []
        for rows in _write_parts(len(items)):
            some = None if lists is None else lists[rows]
            further = None if table is None else table.slice(rows.start, WRITE_ROWS)
            part = Queries(items.kind, items.values[rows])
            body = wire.write_items(part, ids[rows], some, further, upsert)
            requests.append(ApiRequest("POST", "/v1/items", {}, body, idempotent=upsert))
        return (yield from self._write(requests, len(items), "added"))

    def _remove(self, ids: Any) -> Exchange[int]:
        ids = as_ids(ids)
        bodies = [wire.write_queries(Queries("ids", ids[rows])) for rows in _write_parts(len(ids))]
        requests = [ApiRequest("POST", "/v1/items/remove", {}, body, idempotent=False) for body in bodies]
        return (yield from self._write(requests, len(ids), "removed"))

    def _write(self, requests: list[ApiRequest], n: int, verb: str) -> Exchange[int]:
        """One after another; the error of a later one says what the earlier ones did."""
        for number, request in enumerate(requests):
            try:
                (body,) = yield [request]
            except ClientError as error:
                if number:
                    done = f"the first {number * WRITE_ROWS:,} of {n:,} were {verb} before"
                    error.args = (f"{error.args[0]}; {done}, the others were not", *error.args[1:])
                raise
            self._written = max(self._written, wire.read_version(body))
        return self._written

    def _own_writes(self) -> dict[str, Any]:
        """The query parameter that makes a read see what this client wrote."""
        return {"min_version": self._written} if self._written else {}


def _write_parts(n: int) -> list[slice]:
    """Rows of each request of a write; almost always one, which is made whole or not at all."""
    return [slice(start, start + WRITE_ROWS) for start in range(0, n, WRITE_ROWS)]


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
    return SearchResult(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.distances for part in parts]),
        versions.pop() if len(versions) == 1 else None,
        np.concatenate(scores) if scores else None,
    )
