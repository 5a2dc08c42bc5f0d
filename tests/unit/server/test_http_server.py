"""What every request passes: security headers, limits on number and time, the request log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from hashnet.client import Queries, wire
from hashnet.errors import StorageError
from hashnet.io import events
from hashnet.server import Access, IndexService, IndexWriter
from hashnet.server.http_server import RequestMiddleware
from tests.support.serving_app import BASE, CODE, WRITE, error_of, limits_with
from tests.support.small_run import some_codes


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
    async def fail(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("secret detail")

    asgi_app = app()
    monkeypatch.setattr(IndexService, "info", fail)
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

    async def wait(self: Any, *arguments: Any) -> None:
        await gate.wait()

    monkeypatch.setattr(IndexService, "info", wait)

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

    monkeypatch.setattr(IndexService, "search", never)
    monkeypatch.setattr(IndexWriter, "write", never)
    asgi_app = app(limits=limits_with(timeout_s=0.2), access=Access.of(write=WRITE))
    with TestClient(asgi_app, base_url=BASE) as http:
        response = http.post("/v1/search", json={"codes": [CODE]})
        assert error_of(response) == (503, "timeout")
        assert "retry-after" in response.headers
        headers = {"authorization": f"Bearer {WRITE}"}
        response = http.post("/v1/items/remove", json={"ids": [1]}, headers=headers)
        assert error_of(response) == (504, "timeout")  # 503 would say: nothing was done


def test_metrics(app: Callable[..., RequestMiddleware]) -> None:
    with TestClient(app(), base_url=BASE) as http:
        body = wire.write_queries(Queries("codes", some_codes(3)))
        http.post("/v1/search", content=body, headers={"content-type": wire.ARROW})
        http.get("/v1/items/99999")
        text = http.get("/metrics").text
    assert 'hashnet_requests_total{method="POST",route="/v1/search",status="200"} 1.0' in text
    assert 'hashnet_requests_total{method="GET",route="/v1/items/{id}",status="404"} 1.0' in text
    assert 'hashnet_queries_total{route="/v1/search"} 3.0' in text
    assert "hashnet_index_size 400.0" in text


def test_a_failure_is_in_the_log_with_its_stack_trace(
    app: Callable[..., RequestMiddleware], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an exception nobody expected, and of one of ours that is no client's business."""

    async def fail(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("secret detail") if arguments else StorageError("secret place")

    monkeypatch.setattr(events, "log_folder", lambda: str(tmp_path))
    monkeypatch.setattr(IndexService, "info", fail)
    with TestClient(app(), base_url=BASE, raise_server_exceptions=False) as http:
        for path, secret in (("/v1/info", "secret detail"), ("/readyz", "secret place")):
            response = http.get(path, headers={"x-request-id": path.replace("/", "-")})
            assert error_of(response) == (500, "internal")
            assert "secret" not in response.text
            (file,) = tmp_path.glob("hashnet-*.jsonl")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            (trace,) = [
                one["trace"]
                for one in lines
                if one.get("request_id") == path.replace("/", "-") and "trace" in one
            ]
            assert secret in trace
            assert "in fail" in trace


def test_slow_bodies_take_no_place_of_others(app: Callable[..., RequestMiddleware]) -> None:
    asgi_app = app(limits=limits_with(max_inflight=2, timeout_s=0.5))
    statuses: list[int] = []

    async def send_slowly() -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/search",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-length", b"100")],
        }
        first = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> dict:
            if first:
                return first.pop()
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: dict) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await asgi_app(scope, receive, send)

    async def main() -> None:
        slow = [asyncio.create_task(send_slowly()) for _ in range(300)]
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi_app), base_url=BASE) as http:
            assert (await http.post("/v1/search", json={"codes": [CODE]})).status_code == 200
        await asyncio.gather(*slow)

    asyncio.run(main())
    assert statuses == [408] * 300
    assert asgi_app.arriving_bytes == 0
