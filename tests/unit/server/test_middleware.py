"""What every request passes: security headers, limits on number and time, the request log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from hashnet.server import (
    Access,
)
from hashnet.server.middleware import RequestMiddleware
from tests.support.serving_app import (
    BASE,
    CODE,
    WRITE,
    LocalBackend,
    error_of,
    limits_with,
)


def test_security_headers_everywhere(http: TestClient) -> None:
    for path in ("/", "/static/app.js", "/v1/info", "/no/such", "/healthz"):
        headers = http.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert http.get("/v1/info").headers["cache-control"] == "no-store"


def test_no_stack_trace_reaches_a_client(
    app: Callable[..., RequestMiddleware], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Any) -> Any:
        raise RuntimeError("secret detail")

    asgi_app = app()
    monkeypatch.setattr(LocalBackend, "index_info", fail)
    with TestClient(asgi_app, base_url=BASE, raise_server_exceptions=False) as http:
        response = http.get("/v1/info")
    assert error_of(response) == (500, "internal")
    assert "secret" not in response.text


def test_the_log_has_no_contents(http: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    secret = "0123456789abcdef"
    with caplog.at_level(logging.DEBUG):
        headers = {"authorization": "Bearer top-secret-token", "x-request-id": "my-id-1"}
        http.post("/v1/search", json={"codes": [secret], "k": 3}, headers=headers)
    assert secret not in caplog.text
    assert "top-secret" not in caplog.text
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "hashnet.events"]
    line = next(line for line in lines if line.get("request_id") == "my-id-1")
    assert (line["method"], line["route"], line["status"], line["queries"]) == ("POST", "/v1/search", 200, 1)
    assert line["kind"] == "codes"
    assert line["ms"] > 0


def test_too_many_requests_at_once_get_429(
    app: Callable[..., RequestMiddleware], monkeypatch: pytest.MonkeyPatch
) -> None:
    asgi_app = app(limits=limits_with(max_inflight=2))
    gate = asyncio.Event()

    async def wait(self: Any) -> None:
        await gate.wait()

    monkeypatch.setattr(LocalBackend, "index_info", wait)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi_app), base_url=BASE) as http:
            waiting = [asyncio.create_task(http.get("/v1/info")) for _ in range(2)]
            await asyncio.sleep(0.05)
            refused = await http.get("/v1/info")
            assert error_of(refused) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await http.get("/healthz")).status_code == 200  # a busy server is still alive
            for task in waiting:
                task.cancel()

    asyncio.run(main())


def test_no_request_takes_longer_than_the_limit(
    app: Callable[..., RequestMiddleware], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Any, *arguments: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(LocalBackend, "search_index", never)
    monkeypatch.setattr(LocalBackend, "write", never)
    asgi_app = app(limits=limits_with(timeout_s=0.2), access=Access.of(write=WRITE))
    with TestClient(asgi_app, base_url=BASE) as http:
        response = http.post("/v1/search", json={"codes": [CODE]})
        assert error_of(response) == (503, "timeout")
        assert "retry-after" in response.headers
        headers = {"authorization": f"Bearer {WRITE}"}
        response = http.post("/v1/items/remove", json={"ids": [1]}, headers=headers)
        assert error_of(response) == (504, "timeout")  # 503 would say: nothing was done
