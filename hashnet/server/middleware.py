"""ASGI middleware around the application: access, limits, security headers, counters and the request log.

Nothing of a request's content is logged, and no stack trace leaves the server: the log has it, under
the request id that the client was told.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hashnet.io import events
from hashnet.server.auth import Access
from hashnet.server.errors import ApiError, error_response, server_failure
from hashnet.server.messages import IndexInfo
from hashnet.server.settings import Limits

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Telemetry:
    """Requests, queries and response times by route, and the served index."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "hashnet_requests", "HTTP requests", ["method", "route", "status"], registry=registry
        )
        self._queries = Counter("hashnet_queries", "Queries inside them", ["route"], registry=registry)
        self._seconds = Histogram(
            "hashnet_request_seconds", "Time to respond", ["route"], buckets=SECONDS, registry=registry
        )
        self._version = Gauge("hashnet_index_version", "Version of the index being served", registry=registry)
        self._size = Gauge("hashnet_index_size", "Codes in the index being served", registry=registry)

    def request(self, method: str, route: str, status: int, seconds: float, queries: int) -> None:
        """Counts one request that carried ``queries`` queries."""
        self._requests.labels(method, route, status).inc()
        self._queries.labels(route).inc(queries)
        self._seconds.labels(route).observe(seconds)

    def text(self, index: IndexInfo) -> bytes:
        """All metrics in the Prometheus text format."""
        self._version.set(index.version)
        self._size.set(index.size)
        return generate_latest(self._registry)


log = logging.getLogger(__name__)

OPEN = ("/", "/healthz", "/readyz", "/openapi.json")  # need no token: they reveal nothing about the data
OPEN_BELOW = "/static/"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",  # unless the response says otherwise
}
_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class RequestRecord:
    """What is logged of one request. The application fills it in through ``scope["hashnet"]``."""

    request_id: str
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    queries: int | None = None
    kind: str | None = None  # of the queries
    version: int | None = None  # of the index that was searched
    code: str | None = None  # of the error


def is_write(scope: dict) -> bool:
    """Whether a request may change the index."""
    return scope["path"].startswith("/v1/items") and scope["method"] not in ("GET", "HEAD", "OPTIONS")


class RequestMiddleware:
    """Checks each request, runs it within the time limit, and records how it went."""

    def __init__(self, app: Any, limits: Limits, access: Access, telemetry: Telemetry) -> None:
        self.app, self.limits, self.access, self.telemetry = app, limits, access, telemetry
        self.in_flight = 0

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = scope["hashnet"] = _new_record(headers)
        send = _recording(send, record)
        started = time.perf_counter()
        is_open = scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW)
        self.in_flight += not is_open
        try:
            await self._run(scope, headers, receive, send, is_open)
        except ApiError as error:
            await self._fail(error, record, scope, receive, send)
        except Exception:
            log.exception("request %s failed", record.request_id)
            await self._fail(server_failure(record.request_id), record, scope, receive, send)
        finally:
            self.in_flight -= not is_open
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self.telemetry.request(scope["method"], route, record.status, seconds, record.queries or 0)
            if not is_open:
                events.event("request", **_log_line(scope["method"], route, seconds, record))

    async def _run(
        self, scope: dict, headers: dict[str, str], receive: Any, send: Any, is_open: bool
    ) -> None:
        write = is_write(scope)
        self.access.check_host(headers.get("host", ""))
        if not is_open:
            self.access.check_token(headers.get("authorization", ""), write)
            if self.in_flight > self.limits.max_inflight:
                sentence = f"{self.limits.max_inflight} requests are in flight; try again"
                raise ApiError("overloaded", sentence, 429)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                await self.app(scope, receive, send)
        except TimeoutError:
            sentence = f"no response within {self.limits.timeout_s:g} s"
            if write:
                sentence += "; whether the change was made is not known"
                raise ApiError("timeout", sentence, 504) from None
            raise ApiError("timeout", f"{sentence}; try again, or send fewer queries at once", 503) from None

    async def _fail(
        self, error: ApiError, record: RequestRecord, scope: dict, receive: Any, send: Any
    ) -> None:
        if not record.status:  # nothing has been sent yet
            record.code = error.code
            await error_response(error, record.request_id)(scope, receive, send)


def _new_record(headers: dict[str, str]) -> RequestRecord:
    given, length = headers.get("x-request-id", ""), headers.get("content-length", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
    return RequestRecord(request_id, bytes_in=int(length) if length.isdigit() else 0)


def _recording(send: Any, record: RequestRecord) -> Any:
    """``send`` that adds the security headers and records status and size."""

    async def send_recorded(message: dict) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            present = {name for name, _ in message["headers"]}
            missing = [pair for pair in _HEADERS if pair[0] not in present]
            message = message | {"headers": [*message["headers"], *missing]}
        elif message["type"] == "http.response.body":
            record.bytes_out += len(message.get("body", b""))
        await send(message)

    return send_recorded


def _log_line(method: str, route: str, seconds: float, record: RequestRecord) -> dict[str, Any]:
    """The fields of the request log: which route, how it went, how much; never the contents."""
    line = {
        "request_id": record.request_id,
        "method": method,
        "route": route,
        "status": record.status,
        "ms": round(seconds * 1000, 2),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    further = {name: getattr(record, name) for name in ("queries", "kind", "version", "code")}
    return line | {name: value for name, value in further.items() if value is not None}
