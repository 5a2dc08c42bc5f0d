"""What Serve's own HTTP proxy says when no replica answers, made like our answers.

Serve starts it in its proxy when RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names ``middlewares``, which
``run.py`` sets before Ray starts. On a cluster that runs already the client copes without it.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.middleware import Middleware

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PATH = "cluster.serving.proxy.middlewares"
UNAVAILABLE = {
    "error": {"code": "unavailable", "message": "no replica answered; try again", "request_id": ""}
}


def middlewares() -> list[Middleware]:
    """What the proxy wraps itself in."""
    return [Middleware(Polite)]


class Polite:
    """Turns a request that Serve lost (no answer, 500 or 503 of its own) into 503 with Retry-After."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self.app(scope, receive, send)
            return
        started = replaced = False

        async def send_on(message: dict) -> None:
            nonlocal started, replaced
            if message["type"] == "http.response.start":
                started = True
                # our own answers carry a content type of JSON and, at 503, Retry-After already
                names = {name.lower() for name, _ in message["headers"]}
                if message["status"] == 503 and b"retry-after" not in names:
                    replaced = True
                    await _say_unavailable(send)
                    return
            if not replaced:
                await send(message)

        try:
            await self.app(scope, receive, send_on)
        except Exception:
            if started:
                raise
        if not started:
            await _say_unavailable(send)


async def _say_unavailable(send: Any) -> None:
    body = json.dumps(UNAVAILABLE).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
