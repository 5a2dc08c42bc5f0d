"""Error responses in the format of the API where Serve's own HTTP proxy has no replica to respond.

Serve adds ``middlewares`` to its proxy when RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names them, which
``server.py`` sets before Ray starts. On a cluster that is running already the client copes without them.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

from hashnet.server import SECURITY_HEADERS, ApiError, error_response, is_write

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PATH = "cluster.serve.proxy.middlewares"
UNAVAILABLE = ApiError("unavailable", "no replica responded; try again", 503)
LOST_WRITE = ApiError("timeout", "the server was lost; whether the change was made is not known", 504)


def middlewares() -> list[Middleware]:
    """The middleware of the proxy."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Responds where Serve has no replica or lost it: 503, or 504 for a write, which may have been done."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self.app(scope, receive, send)
            return
        started = replaced = False

        async def respond(error: ApiError) -> None:
            response = error_response(error, request_id="")
            response.headers.update(SECURITY_HEADERS)
            await response(scope, receive, send)

        async def send_or_replace(message: dict) -> None:
            nonlocal started, replaced
            if message["type"] == "http.response.start":
                started = True
                # the application's own 503 carries Retry-After
                names = {name.lower() for name, _ in message["headers"]}
                if message["status"] == 503 and b"retry-after" not in names:
                    replaced = True
                    await respond(UNAVAILABLE)
                    return
            if not replaced:
                await send(message)

        try:
            await self.app(scope, receive, send_or_replace)
        except Exception:
            if started:
                raise
        if not started:
            await respond(LOST_WRITE if is_write(scope) else UNAVAILABLE)
