"""What Serve's own HTTP proxy says when no replica answers, made like our answers.

Serve starts it in its proxy when RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names ``middlewares``, which
``run.py`` sets before Ray starts. On a cluster that runs already the client copes without it.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

from hashnet.errors import RequestRejected
from hashnet.server import later, reply, writes

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PATH = "cluster.serve.proxy.middlewares"
UNAVAILABLE = later("unavailable", "no replica answered; try again")
LOST = RequestRejected("the server was lost; whether the change was made is not known", "timeout", 504)


def middlewares() -> list[Middleware]:
    """What the proxy wraps itself in."""
    return [Middleware(Polite)]


class Polite:
    """Answers for Serve where it has no replica or lost it: come later; a lost write may have been done."""

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
                    await reply(send, UNAVAILABLE, "")
                    return
            if not replaced:
                await send(message)

        try:
            await self.app(scope, receive, send_on)
        except Exception:
            if started:
                raise
        if not started:
            await reply(send, LOST if writes(scope) else UNAVAILABLE, "")
