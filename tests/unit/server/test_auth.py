"""Tokens and host names: who may read, who may write, and where a server may listen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from hashnet.errors import ConfigError
from hashnet.server import Access
from hashnet.server.http_server import RequestMiddleware
from tests.support.serving_app import CODE, READ, WRITE, error_of


def test_tokens(app: Callable[..., RequestMiddleware]) -> None:
    asgi_app = app(access=Access.of(READ, WRITE, local_only=False))

    def bearer(token: str) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"}

    with TestClient(asgi_app, base_url="http://search.example:8000") as http:
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
    assert Access.from_environment("127.0.0.1") == Access()
    assert Access.from_environment("::1") == Access()
    for host in ("0.0.0.0", "192.168.1.5", "::", "search.example"):
        with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
            Access.from_environment(host)
    monkeypatch.setenv("HASHNET_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        Access.from_environment("0.0.0.0")
    monkeypatch.setenv("HASHNET_TOKEN", f"{READ}\n")  # as files and secrets often end
    assert Access.from_environment("0.0.0.0") == Access.of(READ, local_only=False)
    monkeypatch.setenv("HASHNET_WRITE_TOKEN", READ)
    with pytest.raises(ConfigError, match="the same"):
        Access.from_environment("0.0.0.0")
