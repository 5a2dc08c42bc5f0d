"""How the application is put onto Ray Serve, and the words of Serve that clients never see."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from cluster.serving import application, proxy, service
from cluster.serving.config import ServeConfig, Tokens
from cluster.serving.opening import look_over
from hashnet.errors import ConfigError
from tests.serving_app import BASE, READ


def test_replicas_and_devices_by_configuration(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert application.scaling(2, 0, target=32) == {"num_replicas": 2}
    grows = application.scaling(1, 8, target=32)["autoscaling_config"]
    assert (grows["min_replicas"], grows["max_replicas"]) == (1, 8)
    config = ServeConfig(run=run)
    monkeypatch.setattr(application.session, "resources", lambda: {"CPU": 8.0})
    assert "GPU" not in application.size("encoder", config)
    monkeypatch.setattr(application.session, "resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert application.size("encoder", config)["GPU"] > 0  # a GPU where there is one
    assert "GPU" not in application.size("encoder", ServeConfig(run=run, encoder_device="cpu"))
    assert "GPU" not in application.size("index", config)
    assert application.size("index", ServeConfig(run=run, index_device="cuda", threads=4)) == {
        "CPU": 4.0,
        "GPU": 0.5,
    }
    needs = application.needs(config, look_over(config))
    assert [need.name for need in needs] == ["http", "index", "encoder"]
    with pytest.raises(ConfigError, match="max_index_replicas=1 is below index_replicas=3"):
        ServeConfig(run=run, index_replicas=3, max_index_replicas=1)
    with pytest.raises(ConfigError, match="belong together"):
        ServeConfig(run=run, tls_cert="cert.pem")


def test_what_is_configured_reaches_serve(run: str) -> None:
    config = ServeConfig(
        run=run, index_replicas=3, max_encoder_replicas=5, http_replicas=2, encoder_device="cpu"
    )
    built = application.build(config, look_over(config), Tokens())._bound_deployment
    index, encoder, keeper = (one._bound_deployment for one in built.init_args[:3])
    assert (built.name, built.num_replicas) == ("HttpReplica", 2)
    assert (index.name, index.num_replicas) == ("IndexReplica", 3)
    assert (keeper.name, keeper.num_replicas) == ("Keeper", 1)  # one writer
    scaled = encoder._deployment_config.autoscaling_config
    assert (encoder.name, scaled.min_replicas, scaled.max_replicas) == ("EncoderReplica", 1, 5)


def test_an_operators_serve_needs_a_token(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
        service.application({"run": run})
    monkeypatch.setenv("HASHNET_TOKEN", READ)
    built = service.application({"run": run, "index_replicas": 2, "encoder_device": "cpu"})
    assert built._bound_deployment.name == "HttpReplica"
    with pytest.raises(ConfigError, match="did you mean 'index_replicas'"):
        service.application({"run": run, "index_replica": 2})


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [("/v1/search", "POST", 503, "unavailable"), ("/v1/items", "GET", 503, "unavailable"),
     ("/v1/items", "POST", 504, "timeout"), ("/v1/items/remove", "POST", 504, "timeout")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["silent", "raises"])
def test_a_request_that_serve_lost_is_told_so(
    path: str, method: str, status: int, code: str, how: str
) -> None:
    """A read is sent again; a write may have been done, so 504 and no Retry-After."""

    async def lost(scope: Any, receive: Any, send: Any) -> None:
        if how == "raises":
            raise RuntimeError("secret detail")

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(proxy.Polite(lost))
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            return await http.request(method, path)

    answer = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "secret" not in answer.text


def test_serves_own_503_is_replaced_and_other_answers_pass() -> None:
    async def say(scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        status = int(scope["path"].strip("/"))
        await PlainTextResponse("words of Serve", status)(scope, receive, send)

    http = TestClient(proxy.Polite(say), base_url=BASE)
    busy = http.post("/503")
    assert (busy.json()["error"]["code"], busy.headers["retry-after"]) == ("unavailable", "1")
    assert http.get("/404").text == "words of Serve"
