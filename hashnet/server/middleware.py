"""What every request passes: tokens, host names, limits, security headers, counters and the request log.

Nothing of a request's content is logged, and no stack trace leaves the server: the log has it, under
the request id that the client was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response

from hashnet.errors import ConfigError
from hashnet.io import events
from hashnet.server.schemas import ApiError, error_response, server_failure
from hashnet.server.settings import Limits

if TYPE_CHECKING:
    from hashnet.server.live_index import IndexInfo

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
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
BODIES_AT_ONCE = 8  # bodies of the largest size that may be arriving together; their memory is bounded by it

_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_CACHE_CONTROL = b"cache-control"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROCESS, _NUMBERS = secrets.token_hex(5), count(1)  # the parts of a request id


class Telemetry:
    """Requests, queries and response times by route, and the served index.

    Where several processes share a folder (PROMETHEUS_MULTIPROC_DIR), counters are those of all of them.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._shared = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self._requests = Counter(
            "hashnet_requests", "HTTP requests", ["method", "route", "status"], registry=registry
        )
        self._queries = Counter("hashnet_queries", "Queries inside them", ["route"], registry=registry)
        self._seconds = Histogram(
            "hashnet_request_seconds", "Time to respond", ["route"], buckets=SECONDS, registry=registry
        )
        self._search = Histogram(
            "hashnet_search_seconds", "One batch through the index", buckets=SECONDS, registry=registry
        )
        self._version, self._size = (
            Gauge(name, meaning, registry=registry, multiprocess_mode="livemax")
            for name, meaning in (
                ("hashnet_index_version", "Version of the index being served"),
                ("hashnet_index_size", "Codes in the index being served"),
            )
        )

    def request(self, method: str, route: str, status: int, seconds: float, queries: int) -> None:
        """Counts one request that carried ``queries`` queries."""
        requests, in_them, duration = self._of(method, route, status)
        requests.inc()
        in_them.inc(queries)
        duration.observe(seconds)

    @lru_cache(maxsize=1000)  # noqa: B019 - there is one of them per process
    def _of(self, method: str, route: str, status: int) -> tuple[Counter, Counter, Histogram]:
        """The metrics of such requests: looking them up by label takes longer than counting."""
        return (
            self._requests.labels(method, route, status),
            self._queries.labels(route),
            self._seconds.labels(route),
        )

    def search(self, kind: str, seconds: float, queries: int, refused: int) -> None:
        """Counts one batch through an index of this kind; ``refused`` of its queries had no result."""
        self._search.observe(seconds)

    def index(self, version: int, size: int) -> None:
        """Notes which index is served from here on."""
        self._version.set(version)
        self._size.set(size)

    def text(self, index: IndexInfo) -> bytes:
        """All metrics in the Prometheus text format."""
        self.index(index.version, index.size)
        if not self._shared:
            return generate_latest(self._registry)
        of_all = CollectorRegistry()
        MultiProcessCollector(of_all)  # type: ignore[no-untyped-call]
        return generate_latest(of_all)


@dataclass
class RequestRecord:
    """One request: its body, and what is logged of it. The application finds it as ``scope["hashnet"]``."""

    request_id: str
    headers: dict[bytes, bytes]
    query_string: bytes = b""
    body: bytes = b""
    arrived: bool = True  # whether the body is complete
    bytes_out: int = 0
    status: int = 0
    queries: int | None = None
    kind: str | None = None  # of the queries
    version: int | None = None  # of the index that was searched
    code: str | None = None  # of the error

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    def response_to(self, error: Exception) -> Response:
        """The error response; the stack trace of what no client can act on goes to the log instead."""
        told = ApiError.of(error)
        if told is None:
            trace = "".join(traceback.format_exception(error))
            events.event("error", request_id=self.request_id, trace=trace)
            told = server_failure(self.request_id)
        self.code = told.code
        return error_response(told, self.request_id)


Handler = Callable[[RequestRecord], Awaitable[Response]]


def is_write(scope: dict) -> bool:
    """Whether a request may change the index."""
    return scope["path"].startswith("/v1/items") and scope["method"] not in ("GET", "HEAD", "OPTIONS")


class RequestMiddleware:
    """Checks each request, receives its body, runs it within the time limit, and records how it went.

    A request counts as in flight once its body is here: clients that send slowly take no other's place.
    ``direct`` are handlers by (method, path) that are called without the application's routing, which takes
    longer than a search.
    """

    def __init__(
        self,
        app: Any,
        limits: Limits,
        access: Access,
        telemetry: Telemetry,
        direct: dict[tuple[str, str], Handler],
    ) -> None:
        self.app, self.limits, self.access, self.telemetry = app, limits, access, telemetry
        self.direct = direct
        self.in_flight = 0
        self.arriving_bytes = 0  # of bodies that are not complete

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        record = scope["hashnet"] = _new_record(scope)
        send = _recording(send, record)
        is_open = scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW)
        try:
            await self._run(scope, record, receive, send, is_open)
        except Exception as error:
            response = record.response_to(error)
            if not record.arrived:  # nobody reads the rest of it
                response.headers["connection"] = "close"
            if not record.status:  # nothing has been sent yet
                await response(scope, receive, send)
        finally:
            seconds = time.perf_counter() - started
            direct = (scope["method"], scope["path"]) in self.direct
            route = scope["path"] if direct else getattr(scope.get("route"), "path", "unmatched")
            self.telemetry.request(scope["method"], route, record.status, seconds, record.queries or 0)
            if not is_open:
                events.event("request", **_log_line(scope["method"], route, seconds, record))

    async def _run(self, scope: dict, record: RequestRecord, receive: Any, send: Any, is_open: bool) -> None:
        write = is_write(scope)
        self.access.check_host(record.header(b"host"))
        if not is_open:
            self.access.check_token(record.header(b"authorization"), write)
        try:
            async with asyncio.timeout(self.limits.timeout_s) as limit:
                if b"content-length" in record.headers or b"transfer-encoding" in record.headers:
                    record.arrived = False
                    record.body = await self._body(record, receive)
                    record.arrived = True
                    limit.reschedule(asyncio.get_running_loop().time() + self.limits.timeout_s)
                await self._admitted(scope, receive, send, is_open)
        except TimeoutError:
            seconds = f"{self.limits.timeout_s:g} s"
            if not record.arrived:
                raise ApiError("timeout", f"the body did not arrive within {seconds}", 408) from None
            if write:
                sentence = f"no response within {seconds}; whether the change was made is not known"
                raise ApiError("timeout", sentence, 504) from None
            sentence = f"no response within {seconds}; try again, or send fewer queries at once"
            raise ApiError("timeout", sentence, 503) from None

    async def _admitted(self, scope: dict, receive: Any, send: Any, is_open: bool) -> None:
        """Runs the application unless too many requests are in flight."""
        if is_open:
            await self.app(scope, receive, send)
            return
        if self.in_flight >= self.limits.max_inflight:
            sentence = f"{self.limits.max_inflight} requests are in flight; try again"
            raise ApiError("overloaded", sentence, 429)
        self.in_flight += 1
        try:
            handler = self.direct.get((scope["method"], scope["path"]))
            if handler is None:
                await self.app(scope, receive, send)
            else:
                response = await handler(scope["hashnet"])
                await response(scope, receive, send)
        finally:
            self.in_flight -= 1

    async def _body(self, record: RequestRecord, receive: Any) -> bytes:
        """The whole body; one above the limit is not read to its end."""
        most = self.limits.max_body_bytes
        too_large = ApiError("too_large", f"the body must have at most {most:,} bytes", 413)
        length = record.header(b"content-length")
        if length.isdigit() and int(length) > most:
            raise too_large
        chunks: list[bytes] = []
        size = arriving = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError("invalid_request", "the connection was closed before the body's end", 400)
                chunk = message.get("body", b"")
                size += len(chunk)
                chunks.append(chunk)
                if size > most:
                    raise too_large
                if not message.get("more_body"):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                arriving += len(chunk)
                self.arriving_bytes += len(chunk)
                if self.arriving_bytes > BODIES_AT_ONCE * most:
                    sentence = "too many large requests are arriving at the same time; try again"
                    raise ApiError("overloaded", sentence, 503)
        finally:
            self.arriving_bytes -= arriving


def _new_record(scope: dict) -> RequestRecord:
    headers = dict(scope["headers"])
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if not given or not _REQUEST_ID.fullmatch(given):
        given = f"{_PROCESS}{next(_NUMBERS):06x}"
    return RequestRecord(given, headers, scope["query_string"])


def _recording(send: Any, record: RequestRecord) -> Any:
    """``send`` that adds the security headers and records status and size."""

    async def send_recorded(message: dict) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            headers = message["headers"]
            cached = any(name == _CACHE_CONTROL for name, _ in headers)
            message["headers"] = [*headers, *(_HEADERS[:-1] if cached else _HEADERS)]
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
        "bytes_in": len(record.body),
        "bytes_out": record.bytes_out,
    }
    further = {name: getattr(record, name) for name in ("queries", "kind", "version", "code")}
    return line | {name: value for name, value in further.items() if value is not None}


# ---------------------------------------------------------------- tokens and host names
# Who may do what: the read and the write token, and the host names a local server responds to.

READ_TOKEN, WRITE_TOKEN = "HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"


@dataclass(frozen=True)
class Access:
    """sha256 digests of the tokens, "" for none. The tokens themselves stay in the launcher.

    ``local_only``: a server on loopback without a read token responds to local host names alone, so
    that a web page from elsewhere cannot reach it through a name it controls (DNS rebinding).
    """

    read: str = ""
    write: str = ""
    local_only: bool = True

    @classmethod
    def of(cls, read: str = "", write: str = "", *, local_only: bool = True) -> Access:
        """The rules for these tokens."""
        return cls(_digest(read), _digest(write), local_only)

    @classmethod
    def from_environment(cls, host: str) -> Access:
        """The rules for the tokens of the environment; refuses to listen on ``host`` without one."""
        read, write = (os.environ.get(name, "").strip() for name in (READ_TOKEN, WRITE_TOKEN))
        mistakes = []
        if not is_loopback(host) and not read:
            mistakes.append(
                f"host={host} is reachable from other machines: set {READ_TOKEN} to a long random text "
                "(clients send it as a bearer token), or listen on host=127.0.0.1"
            )
        if read and read == write:
            mistakes.append(
                f"{READ_TOKEN} and {WRITE_TOKEN} are the same; readers could write: make them differ"
            )
        for name, value in ((READ_TOKEN, read), (WRITE_TOKEN, write)):
            if value and len(value) < 16:
                mistakes.append(
                    f"{name} has {len(value)} characters; use at least 16, for example openssl rand -hex 24"
                )
        if mistakes:
            raise ConfigError(mistakes)
        return cls.of(read, write, local_only=is_loopback(host) and not read)

    def check_host(self, host: str) -> None:
        """Refuses a Host header that is not a local name, where only those are served."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.local_only and not is_loopback(name.strip("[]").lower()):
            raise ApiError("wrong_host", "this server responds only to its local name", 421)

    def check_token(self, authorization: str, write: bool) -> None:
        """Refuses an Authorization header that does not allow reading or, with ``write``, writing."""
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip()) if scheme.lower() == "bearer" else ""
        may_write = bool(self.write) and hmac.compare_digest(given, self.write)
        if write:
            if not self.write:
                raise ApiError(
                    "writes_off", f"this server was started without a write token ({WRITE_TOKEN})", 403
                )
            if not may_write:
                status = 403 if given else 401
                raise ApiError("write_token_needed", "adding and removing need the write token", status)
        elif self.read and not (hmac.compare_digest(given, self.read) or may_write):
            raise ApiError("unauthorized", "send the token as: Authorization: Bearer TOKEN", 401)


@lru_cache(maxsize=100)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""
