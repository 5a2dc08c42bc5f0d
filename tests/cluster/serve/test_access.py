"""Tokens, hosts, headers, and what failures and the log keep to themselves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hashnet.client import wire
from hashnet.client.queries import Queries
from hashnet.errors import ConfigError
from hashnet.server.middleware import Guard, digest
from hashnet.server.settings import Tokens, read_tokens
from tests.support.serving_app import BASE, CODE, READ, WRITE, LocalBackend, error_of
from tests.support.small_run import some_codes


def test_tokens(app: Callable[..., Guard]) -> None:
    guard = app(tokens=Tokens(digest(READ), digest(WRITE)), local_only=False)

    def bearer(token: str) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"}

    with TestClient(guard, base_url="http://search.example:8000") as http:
        for path in ("/", "/static/app.js", "/healthz", "/readyz", "/openapi.json"):
            assert http.get(path).status_code == 200
        for path in ("/v1/info", "/v1/items", "/v1/items/1", "/v1/items/1/thumbnail", "/metrics"):
            assert error_of(http.get(path)) == (401, "unauthorized")
            assert http.get(path).headers["www-authenticate"] == "Bearer"
            assert error_of(http.get(path, headers=bearer(READ + "x"))) == (401, "unauthorized")
            assert http.get(path, headers={"authorization": READ}).status_code == 401
            assert http.get(path, headers=bearer(READ)).status_code != 401
            assert http.get(path, headers=bearer(WRITE)).status_code != 401
        change = {"ids": [12_345_678]}
        assert error_of(http.post("/v1/items/remove", json=change)) == (401, "write_token_needed")
        reader = http.post("/v1/items/remove", json=change, headers=bearer(READ))
        assert error_of(reader) == (403, "write_token_needed")
        writer = http.post("/v1/items/remove", json=change, headers=bearer(WRITE))
        assert error_of(writer) == (404, "unknown_id")


def test_without_a_write_token_nobody_writes(http: TestClient) -> None:
    body = {"item_ids": [5000], "codes": [CODE]}
    assert error_of(http.post("/v1/items", json=body)) == (403, "writes_off")
    assert error_of(http.post("/v1/items", json=body, headers={"authorization": "Bearer "})) == (
        403,
        "writes_off",
    )


def test_a_web_page_from_elsewhere_does_not_reach_a_local_server(http: TestClient) -> None:
    assert error_of(http.get("/v1/info", headers={"host": "rebound.example:8000"})) == (421, "wrong_host")
    for host in ("localhost:8000", "127.0.0.1", "127.0.0.7:8000", "[::1]:8000"):
        assert http.get("/v1/info", headers={"host": host}).status_code == 200
    assert (
        "access-control-allow-origin"
        not in http.get("/v1/info", headers={"origin": "http://evil.example"}).headers
    )


def test_listening_outwards_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert read_tokens("127.0.0.1") == ("", "")
    assert read_tokens("::1") == ("", "")
    for host in ("0.0.0.0", "192.168.1.5", "::", "search.example"):
        with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
            read_tokens(host)
    monkeypatch.setenv("HASHNET_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_tokens("0.0.0.0")
    monkeypatch.setenv("HASHNET_TOKEN", f"{READ}\n")  # as files and secrets often end
    assert read_tokens("0.0.0.0") == (READ, "")
    monkeypatch.setenv("HASHNET_WRITE_TOKEN", READ)
    with pytest.raises(ConfigError, match="the same"):
        read_tokens("0.0.0.0")


def test_security_headers_everywhere(http: TestClient) -> None:
    for path in ("/", "/static/app.js", "/v1/info", "/no/such", "/healthz"):
        headers = http.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert http.get("/v1/info").headers["cache-control"] == "no-store"


def test_the_page_asks_nobody_else(http: TestClient) -> None:
    for path in ("/", "/static/app.js", "/static/style.css", "/static/icon.svg"):
        text = http.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
    page = http.get("/").text
    assert "style=" not in page  # the content security policy would drop it
    assert "onclick" not in page


def test_no_stack_trace_reaches_a_client(app: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Any) -> Any:
        raise RuntimeError("secret detail")

    guard = app()
    monkeypatch.setattr(LocalBackend, "ask_about", fail)
    with TestClient(guard, base_url=BASE, raise_server_exceptions=False) as http:
        answer = http.get("/v1/info")
    assert error_of(answer) == (500, "internal")
    assert "secret" not in answer.text


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


def test_metrics(app: Callable[..., Guard]) -> None:
    with TestClient(app(), base_url=BASE) as http:
        body = wire.write_queries(Queries("codes", some_codes(3)))
        http.post("/v1/search", content=body, headers={"content-type": wire.ARROW})
        http.get("/v1/items/99999")
        text = http.get("/metrics").text
    assert 'hashnet_requests_total{method="POST",route="/v1/search",status="200"} 1.0' in text
    assert 'hashnet_requests_total{method="GET",route="/v1/items/{id}",status="404"} 1.0' in text
    assert 'hashnet_queries_total{route="/v1/search"} 3.0' in text
    assert "hashnet_index_size 400.0" in text
