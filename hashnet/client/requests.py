"""What both clients share without touching the network: settings, requests, and joining responses.

A method of ``BaseClient`` is a generator: it yields the requests to send, gets their bodies back, and
returns the result. Client and AsyncClient differ only in how they send.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any, TypeVar

import httpx
import numpy as np

from hashnet import __version__
from hashnet.client import wire
from hashnet.client.wire import ARROW, Queries, as_ids, as_queries, label_lists, with_vectors
from hashnet.errors import ClientError, DataError, RequestRejected, ServerFailed, ServerUnavailable
from hashnet.results import SearchResult

R = TypeVar("R")
WRITE_ROWS = 250_000  # in one request to add or remove: 8 MB with codes of 64 bits and a label each
WRITE_BYTES = 24_000_000  # of vectors in one request to add, which is made whole or not at all
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

        ``bound`` is ``{"k": …, …}`` or ``{"radius": …, …}``; options that are None are left out. An index
        that keeps changing faster than parts can be requested again is given up on after ROUNDS.
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

    def _encode(self, batch: Any, vectors: bool = False) -> Exchange[list[Queries]]:
        """Codes and, with ``vectors``, those that an index rescores by which has any of this model."""
        queries = as_queries(batch)
        if queries.kind not in ("images", "features"):
            raise DataError(f"only pictures and features can be encoded, got {queries.kind}")
        params = {"vectors": "true"} if vectors else {}
        bodies = yield [
            ApiRequest("POST", "/v1/encode", params, wire.write_queries(part))
            for part in queries.parts(self.batch)
        ]
        return [wire.read_codes(body) for body in bodies]

    def _add(
        self, queries: Any, ids: Any, labels: Any, columns: Any, features: Any, upsert: bool
    ) -> Exchange[int]:
        """Pictures and features are encoded first, so that all items fit into one request: all or nothing."""
        items, ids = as_queries(queries), as_ids(ids)
        for name, column in (("ids", ids), ("labels", labels)):
            if column is not None and len(column) != len(items):
                raise DataError(f"{len(items)} items came with {len(column)} {name}")
        lists = None if labels is None else label_lists(labels)
        table = None if columns is None else wire.as_columns(columns, len(items))
        if len(items) and items.kind in ("images", "features"):
            encoded = yield from self._encode(items, vectors=features is None)
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
            body = wire.write_items(items.rows(rows), ids[rows], some, further, upsert)
            requests.append(ApiRequest("POST", "/v1/items", {}, body, idempotent=upsert))
        return (yield from self._write(requests, len(items), most, "added"))

    def _remove(self, ids: Any) -> Exchange[int]:
        ids = as_ids(ids)
        bodies = [
            wire.write_queries(Queries("ids", ids[rows])) for rows in _write_parts(len(ids), WRITE_ROWS)
        ]
        requests = [ApiRequest("POST", "/v1/items/remove", {}, body, idempotent=False) for body in bodies]
        return (yield from self._write(requests, len(ids), WRITE_ROWS, "removed"))

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


def _write_parts(n: int, most: int) -> list[slice]:
    """Rows of each request of a write; almost always one, which is made whole or not at all."""
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
    return SearchResult(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.distances for part in parts]),
        versions.pop() if len(versions) == 1 else None,
        np.concatenate(scores) if scores else None,
    )


# ---------------------------------------------------------------- retries
# When a request is sent again, and which error its caller gets in the end.
#
# Both clients loop over the same attempts and only differ in how they send and sleep:
#
#     for attempt in policy.attempts(idempotent=True):
#         time.sleep(attempt.pause_s)
#         with attempt:
#             attempt.response = http.request(...)
#     return attempt.response

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass
class Attempt:
    """One attempt at a request, made ``pause_s`` seconds after the one before it.

    As a context manager it keeps the transport error that sending raised.
    """

    pause_s: float = 0.0
    response: httpx.Response | None = field(default=None, init=False)
    error: httpx.TransportError | None = field(default=None, init=False)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, httpx.TransportError):
            self.error = error
            return True
        return False


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed, whether another may succeed, and how long the server asked to wait."""

    error: Exception
    retry: bool = False
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """Growing, jittered pauses for at most ``retry_s`` seconds; a server's Retry-After is respected."""

    url: str
    retry_s: float

    def attempts(self, idempotent: bool) -> Iterator[Attempt]:
        """Attempts until one has a good response; raises the last one's error when time is up.

        A request that is not idempotent is repeated only when the server cannot have carried it out.
        """
        started, attempt = time.monotonic(), Attempt()
        for number in count():
            yield attempt
            failure = self._failure(attempt, idempotent)
            if failure is None:
                return
            pause_s = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            pause_s = max(pause_s, failure.retry_after_s)
            if not failure.retry or time.monotonic() - started + pause_s > self.retry_s:
                raise failure.error from attempt.error
            attempt = Attempt(pause_s)

    def _failure(self, attempt: Attempt, idempotent: bool) -> Failure | None:
        if attempt.error is not None:
            return self._transport_failure(attempt.error, idempotent)
        assert attempt.response is not None
        if attempt.response.is_success and _is_known_content(attempt.response):
            return None
        return self._response_failure(attempt.response, idempotent)

    def _response_failure(self, response: httpx.Response, idempotent: bool) -> Failure:
        status, (code, message) = response.status_code, _error_of(response)
        if status < 400:
            content = _content_type(response) or "no content type"
            sentence = f"{self.url} responds with {status} and {content}: is this the address of a server?"
            return Failure(ServerFailed(sentence))
        if status in (429, 503):  # with an error code: refused before anything was done
            busy = ServerUnavailable(f"{self.url} is busy: {message}")
            return Failure(busy, idempotent or bool(code), _retry_after_s(response))
        if status < 500:
            return Failure(RequestRejected(message, code=code, status=status))
        # Without an error code it was not the application that responded: its process was lost.
        failed = ServerFailed(f"{self.url} failed with {status}: {message}")
        return Failure(failed, idempotent and not code)

    def _transport_failure(self, error: httpx.TransportError, idempotent: bool) -> Failure:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)):
            reason = str(error) or type(error).__name__
            sentence = (
                f"cannot reach {self.url} ({reason}); is a server running there? hashnet serve RUN starts one"
            )
            return Failure(ServerUnavailable(sentence), retry=True)
        if isinstance(error, httpx.UnsupportedProtocol):
            return Failure(DataError(str(error)))
        timed_out = isinstance(error, httpx.TimeoutException)
        what = "did not respond in time" if timed_out else "broke the connection"
        return Failure(ServerUnavailable(f"{self.url} {what} ({type(error).__name__})"), retry=idempotent)


def _content_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_known_content(response: httpx.Response) -> bool:
    """Whether it carries what a hashnet server sends: Arrow, JSON or a picture."""
    content = _content_type(response)
    return content in (ARROW, "application/json") or content.startswith("image/")


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """(code, message) of an error response; no code when the application did not write it."""
    try:
        error = response.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", response.text[:200].strip() or response.reason_phrase


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds of the Retry-After header, given as a number or as a date; bounded."""
    text = response.headers.get("retry-after", "")
    try:
        return min(float(text), LONGEST_PAUSE_S) if text else 0.0
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(text)
        return min(max(moment.timestamp() - time.time(), 0.0), LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
