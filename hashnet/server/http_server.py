"""HttpServer: uvicorn with uvloop and httptools, robust against slow, half-closed and foreign requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hashnet.server.settings import Access, ServeConfig, ServedRun

HEADERS_S = 10.0  # within which the headers of a request must have arrived
KEEP_ALIVE_S = 75  # an idle connection is kept: longer than a proxy in front or a client's pool keeps it
SHUTDOWN_S = 5  # for requests in flight when the server stops
MAX_HEAD = 1 << 16  # bytes of a request before its body
ERROR = b'{"error": {"code": "%b", "message": "%b", "request_id": ""}}'


class HttpProtocol(HttpToolsProtocol):
    """One connection. In addition to uvicorn's protocol:

    headers that arrive too slowly or are too long end the connection; a client that has closed its side after
    a complete request still gets the response; of an absolute URI the host counts, not the header's.
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


def welcome(config: ServeConfig, served: ServedRun, access: Access, log: str) -> str:
    """What a person should know when the server is up; ``log`` is where its log is."""
    url = config.url
    accepts = {"image": "pictures, ", "features": "features, "}.get(served.modality or "", "")
    token = ' -H "authorization: Bearer $HASHNET_TOKEN"' if access.read else ""
    items = served.open_items()
    some = items.sample(1) if items is not None else []
    lines = [
        f"serving {served.size:,} codes of {served.n_bits} bits ({served.kind}): "
        f"search by {accepts}codes and ids",
        f"  {url}/",
        "try",
        f"  curl{token} {url}/v1/info",
    ]
    if served.modality == "image":
        lines.append(f"  hashnet query PICTURE --url {url} -k 10")
    lines += [
        f"  hashnet query --id {some[0] if some else 0} --url {url}",
        f"writing is {'on' if access.write else 'off (set HASHNET_WRITE_TOKEN to turn it on)'}",
        f"requests and errors are logged in {log}",
        "Ctrl-C stops it",
    ]
    return "\n".join(lines)
