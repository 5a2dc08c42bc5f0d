"""What every request passes first and last: who may ask, how much, how long; headers, count, log line.

Nothing of a request's content is logged, and no stack trace leaves the server: the log has it, under
the request id that the client was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from typing import Any

from hashnet.errors import RequestRejected
from hashnet.io import events
from hashnet.server.settings import Limits, Tokens, is_loopback
from hashnet.server.telemetry import Meter

log = logging.getLogger(__name__)

OPEN = ("/", "/healthz", "/readyz", "/openapi.json")  # say nothing about the data
OPEN_BELOW = "/static/"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",  # unless the answer says otherwise
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def writes(scope: dict) -> bool:
    """Whether a request may change the index."""
    return scope["path"].startswith("/v1/items") and scope["method"] not in ("GET", "HEAD", "OPTIONS")


def digest(token: str) -> str:
    """What is kept of a token; empty for none."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: Any, limits: Limits, tokens: Tokens, local_only: bool, meter: Meter) -> None:
        self.app, self.limits, self.tokens, self.local_only, self.meter = (
            app,
            limits,
            tokens,
            local_only,
            meter,
        )
        self.inflight = 0

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        about: dict[str, Any] = {
            "request_id": given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16],
            "bytes_in": headers.get("content-length", "0"),
        }
        scope["hashnet"] = about
        started = time.perf_counter()
        status, sent = 0, 0

        async def send_on(message: dict) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                have = {name for name, _ in message["headers"]}
                extra = [pair for pair in _HEADERS if pair[0] not in have]
                message = message | {"headers": [*message["headers"], *extra]}
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        counts = scope["path"] not in OPEN and not scope["path"].startswith(OPEN_BELOW)
        self.inflight += counts
        try:
            await self._answer(scope, headers, receive, send_on, counts)
        except RequestRejected as error:
            if not status:
                await reply(send_on, error, about["request_id"])
        except Exception:
            log.exception("request %s failed", about["request_id"])
            if not status:
                sentence = f"the server failed; its log has the details of request {about['request_id']}"
                await reply(send_on, RequestRejected(sentence, "internal", 500), about["request_id"])
        finally:
            self.inflight -= counts
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self.meter.request(scope["method"], route, status, seconds, about.get("queries", 0))
            if counts:
                events.event("request", **_line(scope["method"], route, status, seconds, sent, about))

    async def _answer(self, scope: dict, headers: dict, receive: Any, send: Any, counts: bool) -> None:
        self._check_host(headers.get("host", ""))
        changes = writes(scope)
        if counts:
            self._check_token(headers.get("authorization", ""), changes)
            if self.inflight > self.limits.max_inflight:
                raise later(
                    "overloaded", f"{self.limits.max_inflight} requests are under way; try again", 429
                )
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                await self.app(scope, receive, send)
        except TimeoutError:
            sentence = f"no answer within {self.limits.timeout_s:g} s"
            if changes:
                raise RequestRejected(
                    f"{sentence}; whether it was done is not known", "timeout", 504
                ) from None
            raise later("timeout", f"{sentence}; try again, or ask for less at once") from None

    def _check_host(self, host: str) -> None:
        """On loopback without a token only local names are answered: a web page elsewhere cannot reach in."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.local_only and not is_loopback(name.strip("[]").lower()):
            raise RequestRejected("this server answers only to its local name", "wrong_host", 421)

    def _check_token(self, authorization: str, changes: bool) -> None:
        scheme, _, token = authorization.partition(" ")
        given = digest(token.strip()) if scheme.lower() == "bearer" else ""
        may_write = bool(self.tokens.write) and hmac.compare_digest(given, self.tokens.write)
        if changes:
            if not self.tokens.write:
                raise RequestRejected(
                    "this server was started without a write token (HASHNET_WRITE_TOKEN)", "writes_off", 403
                )
            if not may_write:
                status = 403 if given else 401
                raise RequestRejected(
                    "adding and removing need the write token", "write_token_needed", status
                )
        elif self.tokens.read and not (hmac.compare_digest(given, self.tokens.read) or may_write):
            raise RequestRejected("send the token as: Authorization: Bearer TOKEN", "unauthorized", 401)


def later(code: str, message: str, status: int = 503) -> RequestRejected:
    """An error that goes away by itself: the answer carries Retry-After."""
    return RequestRejected(message, code=code, status=status)


def error_headers(error: RequestRejected) -> dict[str, str]:
    """The headers an error answer needs."""
    if error.status in (429, 503):
        return {"retry-after": "1"}
    return {"www-authenticate": "Bearer"} if error.status == 401 else {}


def error_body(error: RequestRejected, request_id: str) -> dict[str, Any]:
    """What a client is told."""
    return {"error": {"code": error.code, "message": str(error), "request_id": request_id}}


async def reply(send: Any, error: RequestRejected, request_id: str) -> None:
    """Answers an error without the application."""
    body = json.dumps(error_body(error, request_id)).encode()
    own = {"content-type": "application/json", "content-length": str(len(body))}
    headers = HEADERS | own | error_headers(error)
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _line(
    method: str, route: str, status: int, seconds: float, sent: int, about: dict[str, Any]
) -> dict[str, Any]:
    """What the log says: what was asked of which route and how it went, never what was in it."""
    line = {
        "request_id": about["request_id"],
        "method": method,
        "route": route,
        "status": status,
        "ms": round(seconds * 1000, 2),
        "bytes_in": int(about["bytes_in"]) if about["bytes_in"].isdigit() else 0,
        "bytes_out": sent,
    }
    for name in ("queries", "kind", "version", "code"):
        if name in about:
            line[name] = about[name]
    return line
