"""HttpServer and what every request passes: tokens, host names, limits, security headers, counters, the log.

The server is uvicorn with uvloop and httptools, robust against slow, half-closed and foreign requests.
Nothing of a request's content is logged, and no stack trace leaves the server: the log has it, under the
request id that the client was told.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import httptools
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hashnet.io import events
from hashnet.server.schemas import ApiError, Response, error_response
from hashnet.server.settings import Access, Limits, ServeConfig

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
BODIES_AT_ONCE = 8  # this many bodies of the largest size may be arriving together: it bounds their memory

_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_ITEM_PATH = re.compile(r"(/v1/items)/([^/]+)(/thumbnail)?")
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
    """One request as its handler gets it, and what is logged of it."""

    request_id: str
    path: str
    headers: dict[bytes, bytes]
    query_string: bytes = b""
    body: bytes = b""
    arrived: bool = True  # whether the body is complete
    route: str = "unmatched"  # the path with {id} in the place of an id
    path_id: str = ""  # what stands in that place
    allowed: str = ""  # the methods that the path takes, where the request's is another
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
            sentence = f"the server failed; its log has the details of request {self.request_id}"
            told = ApiError("internal", sentence, 500)
        self.code = told.code
        return error_response(told, self.request_id)


Handler = Callable[[RequestRecord], Awaitable[Response]]


class Router:
    """Handlers by method and path. ``{id}`` in a path stands for a part of it, ``record.path_id``."""

    def __init__(self, routes: Iterable[tuple[str, str, Handler]]) -> None:
        self._handlers: dict[str, dict[str, Handler]] = {}  # path → method → handler
        for method, path, handler in routes:
            self._handlers.setdefault(path, {})[method] = handler

    def find(self, method: str, record: RequestRecord) -> Handler:
        """The handler of a request; ApiError (404, 405) where there is none. Sets ``record.route``."""
        handlers = self._handlers.get(record.path)
        record.route = record.path
        if handlers is None and (item := _ITEM_PATH.fullmatch(record.path)) is not None:
            record.path_id, record.route = item[2], f"{item[1]}/{{id}}{item[3] or ''}"
            handlers = self._handlers.get(record.route)
        if handlers is None:
            record.route = "unmatched"
            raise ApiError("not_found", "there is nothing at this path; /openapi.json lists what is", 404)
        handler = handlers.get(method)
        if handler is None:
            record.allowed = ", ".join(handlers)
            raise ApiError("method_not_allowed", f"{record.route} takes {record.allowed}", 405)
        return handler


class RequestMiddleware:
    """The ASGI application: checks each request, receives its body, runs its handler within the time limit,
    and records how it went.

    A request counts as in flight once its body has arrived: slow clients do not take others' places.
    """

    def __init__(self, router: Router, limits: Limits, access: Access, telemetry: Telemetry) -> None:
        self.router, self.limits, self.access, self.telemetry = router, limits, access, telemetry
        self.in_flight = 0
        self.arriving_bytes = 0  # of bodies that are not complete

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        started = time.perf_counter()
        record, method = _new_record(scope), scope["method"]
        is_open = record.path in OPEN or record.path.startswith(OPEN_BELOW)
        try:
            response = await self._response(method, record, receive, is_open)
        except Exception as error:
            response = record.response_to(error)
            if not record.arrived:  # the rest of it is never read
                response.headers["connection"] = "close"
            if record.allowed:
                response.headers["allow"] = record.allowed
        try:
            await _send(response, send)
        finally:
            seconds = time.perf_counter() - started
            status = response.status
            self.telemetry.request(method, record.route, status, seconds, record.queries or 0)
            if not is_open:
                events.event("request", **_log_line(method, seconds, record, response))

    async def _response(self, method: str, record: RequestRecord, receive: Any, is_open: bool) -> Response:
        write = record.path.startswith("/v1/items") and method not in ("GET", "HEAD", "OPTIONS")
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
                handler = self.router.find(method, record)
                return await (handler(record) if is_open else self._admitted(handler, record))
        except TimeoutError:
            seconds = f"{self.limits.timeout_s:g} s"
            if not record.arrived:
                raise ApiError("timeout", f"the body did not arrive within {seconds}", 408) from None
            if write:
                sentence = f"no response within {seconds}; whether the change was made is not known"
                raise ApiError("timeout", sentence, 504) from None
            sentence = f"no response within {seconds}; try again, or send fewer queries at once"
            raise ApiError("timeout", sentence, 503) from None

    async def _admitted(self, handler: Handler, record: RequestRecord) -> Response:
        """Runs the handler unless too many requests are in flight."""
        if self.in_flight >= self.limits.max_inflight:
            sentence = f"{self.limits.max_inflight} requests are in flight; try again"
            raise ApiError("overloaded", sentence, 429)
        self.in_flight += 1
        try:
            return await handler(record)
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


async def _lifespan(receive: Any, send: Any) -> None:
    """Nothing is to be done when a server starts and ends."""
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})


def _new_record(scope: dict) -> RequestRecord:
    headers = dict(scope["headers"])
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if not given or not _REQUEST_ID.fullmatch(given):
        given = f"{_PROCESS}{next(_NUMBERS):06x}"
    return RequestRecord(given, scope["path"], headers, scope["query_string"])


async def _send(response: Response, send: Any) -> None:
    """Sends a response with the security headers."""
    headers = [(name.encode(), value.encode("latin-1")) for name, value in response.headers.items()]
    if response.status != 304:
        headers.append((b"content-type", response.media_type.encode()))
        headers.append((b"content-length", b"%d" % len(response.body)))
    headers += _HEADERS[:-1] if "cache-control" in response.headers else _HEADERS
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


def _log_line(method: str, seconds: float, record: RequestRecord, response: Response) -> dict[str, Any]:
    """The fields of the request log: which route, how it went, how much; never the contents."""
    line = {
        "request_id": record.request_id,
        "method": method,
        "route": record.route,
        "status": response.status,
        "ms": round(seconds * 1000, 2),
        "bytes_in": len(record.body),
        "bytes_out": len(response.body),
    }
    further = {name: getattr(record, name) for name in ("queries", "kind", "version", "code")}
    return line | {name: value for name, value in further.items() if value is not None}


# ---------------------------------------------------------------- connections
HEADERS_S = 10.0  # within which the headers of a request must have arrived
KEEP_ALIVE_S = 75  # an idle connection is kept: longer than a proxy in front or a client's pool keeps it
SHUTDOWN_S = 5  # for requests in flight when the server stops
MAX_HEAD = 1 << 16  # bytes of a request before its body
ERROR = b'{"error": {"code": "%b", "message": "%b", "request_id": ""}}'


class HttpProtocol(HttpToolsProtocol):
    """One connection. In addition to uvicorn's protocol:

    headers that arrive too slowly or are too long end the connection; a client that has closed its side after
    a complete request still gets the response; the host of an absolute URI takes precedence over the Host
    header.
    """

    _late: asyncio.TimerHandle | None = None
    _head = 0  # bytes of the headers so far

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is not None:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(
                    b"431 Request Header Fields Too Large", b"too_large", b"the headers are too long"
                )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            raise ValueError("the headers are too long")  # uvicorn responds with 400
        super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._headers_are_here()
        if not self.url.startswith(b"/"):
            host = httptools.parse_url(self.url).host
            if host:  # RFC 9112, 3.2.2: it replaces the Host header
                self.headers[:] = [(n, v) for n, v in self.headers if n != b"host"] + [(b"host", host)]
        super().on_headers_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return None  # nothing to respond to, or a TLS connection, which cannot be half closed
        cycle.keep_alive = False
        return True

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._give_up)

    def _headers_are_here(self) -> None:
        self._head = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._refuse(b"408 Request Timeout", b"timeout", b"the headers did not arrive in time")

    def _refuse(self, status: bytes, code: bytes, message: bytes) -> None:
        self._headers_are_here()
        body = ERROR % (code, message)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n" % status
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves an application on a listening socket; ``when_up`` is called once it accepts connections."""

    def __init__(self, app: Any, config: ServeConfig, when_up: Callable[[], object] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                access_log=False,  # the middleware logs requests
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self.when_up = when_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.when_up()
