"""How the application is put onto Ray Serve, and the words of Serve that clients never see."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from cluster.runtime import connection, telemetry
from cluster.runtime.capacity import Node, too_large
from cluster.serve import Server, deployment, proxy, replicas
from hashnet import BinaryIndex
from hashnet.client import Queries
from hashnet.errors import ClusterError, ConfigError
from hashnet.server import Access, IndexInfo, SearchRequest, ServeConfig, ServedRun
from hashnet.server.messages import SearchOptions
from tests.support.local_cluster import free_ports
from tests.support.serving_app import BASE, READ, WRITE
from tests.support.small_run import some_codes


def test_replicas_and_devices_by_configuration(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deployment.scaling(2, None, target=32) == {"num_replicas": 2}
    grows = deployment.scaling(1, 8, target=32)["autoscaling_config"]
    assert (grows["min_replicas"], grows["max_replicas"]) == (1, 8)
    config = ServeConfig(run=run)
    monkeypatch.setattr(connection, "resources", lambda: {"CPU": 8.0})
    assert "GPU" not in deployment.encoder_resources(config)
    monkeypatch.setattr(connection, "resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert deployment.encoder_resources(config)["GPU"] > 0  # a GPU where there is one
    assert "GPU" not in deployment.encoder_resources(ServeConfig(run=run, device="cpu"))
    assert "GPU" not in deployment.index_resources(config)
    assert deployment.index_resources(ServeConfig(run=run, index_device="cuda", threads=4)) == {
        "CPU": 4.0,
        "GPU": 0.5,
    }
    needs = deployment.needs(config, ServedRun.open(config))
    assert [need.name for need in needs] == ["writer", "http", "index", "encoder"]
    with pytest.raises(ConfigError, match="max_index_replicas=1 is below index_replicas=3"):
        ServeConfig(run=run, index_replicas=3, max_index_replicas=1)
    with pytest.raises(ConfigError, match="belong together"):
        ServeConfig(run=run, tls_cert="cert.pem")


def test_every_replica_asked_for_must_have_room(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would wait for ever for one that has none. 2 CPUs: 0.05 writer, 0.1 HTTP, 0.5 each other."""
    monkeypatch.setattr(connection, "resources", lambda: {"CPU": 2.0})

    def fits(**settings: Any) -> bool:
        config = ServeConfig(run=run, **settings)
        needs = deployment.needs(config, ServedRun.open(config))
        return not too_large(needs, [Node("a", {"CPU": 2.0})])

    assert fits(index_replicas=2)  # 0.05 + 0.1 + 2 x 0.5 + 0.5
    assert fits(index_replicas=2, max_index_replicas=8)  # more come when there is room
    assert not fits(index_replicas=8)
    assert not fits(index_replicas=3)
    assert not fits(encoder_replicas=3)
    assert fits(index_replicas=3, model="off", http_replicas=4)  # 0.05 + 4 x 0.1 + 3 x 0.5
    assert not fits(index_replicas=3, model="off", http_replicas=5)  # all but the writer


class FakeServe:
    """Ray Serve as far as starting and stopping it goes: it comes up, and then fails to be ready."""

    def __init__(self, patch: pytest.MonkeyPatch, listens: tuple[str, int] | None = None) -> None:
        self.listens, self.calls = listens, list[str]()
        patch.setattr("cluster.serve.server.connection.connect", lambda: None)
        patch.setattr("cluster.serve.server.capacity.require", lambda stage, needs: None)
        patch.setattr("cluster.serve.deployment.connection.resources", lambda: {"CPU": 2.0})
        patch.setattr("ray.is_initialized", lambda: True)
        patch.setattr("ray.serve.context._get_global_client", lambda **_: self.client())
        patch.setattr("ray.serve.start", self.start)
        patch.setattr("ray.serve.delete", lambda name: self.calls.append("delete"))
        patch.setattr("ray.serve.shutdown", lambda: self.calls.append("shutdown"))
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    def client(self) -> Any:
        if self.listens is None:
            return None
        host, port = self.listens
        return SimpleNamespace(http_config=SimpleNamespace(host=host, port=port))

    def start(self, http_options: Any, **_: Any) -> None:
        self.calls.append("start")
        self.listens = http_options.host, http_options.port
        raise TimeoutError("HTTP proxies not available after 60s.")


def test_a_serve_that_does_not_come_up_is_taken_down(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe(monkeypatch)
    with (
        pytest.raises(TimeoutError, match="proxies"),
        Server(ServeConfig(run=run, host="localhost", port=free_ports(1)[0])),
    ):
        pass
    assert fake.calls == ["start", "delete", "shutdown"]
    assert fake.listens is not None
    assert fake.listens[0] == "127.0.0.1"


def test_localhost_is_the_address_that_serve_tells(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe(monkeypatch, ("127.0.0.1", 8000))
    assert Server(ServeConfig(run=run, host="localhost"))._serve_is_running()
    assert Server(ServeConfig(run=run))._serve_is_running()
    with pytest.raises(ClusterError, match="listens on 127"), Server(ServeConfig(run=run, port=8001)):
        pass
    assert fake.calls == []  # somebody else's is left alone


def test_a_server_that_is_there_is_neither_replaced_nor_deleted(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeServe(monkeypatch, ("127.0.0.1", 8000))
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"hashnet": None}))
    monkeypatch.setattr("ray.serve.run", lambda *_, **__: fake.calls.append("run"))
    with (
        pytest.raises(ClusterError, match=r"serves hashnet in this cluster already; stop that first"),
        Server(ServeConfig(run=run)),
    ):
        pass
    assert fake.calls == []


def test_a_replica_reports_what_it_searches_and_serves(own_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_metrics: list[tuple[str, float, dict[str, Any]]] = []

    def tell(kind: str) -> Any:
        def tell_one(name: str, value: float, **tags: Any) -> None:
            assert telemetry.METRICS[name].kind == kind
            assert set(tags) == {"run", *telemetry.METRICS[name].tags}
            sent_metrics.append((name, value, tags))

        return tell_one

    for function, kind in (("count", "counter"), ("gauge", "gauge"), ("observe", "histogram")):
        monkeypatch.setattr(telemetry, function, tell(kind))
    monkeypatch.setattr(replicas, "set_threads", lambda threads: 1)  # it would set this process's environment
    of_index: Any = replicas.IndexReplica
    config = ServeConfig(run=own_run, model="off")
    replica = of_index.func_or_class(config, ServedRun.open(config))
    served = {"run": "run"}
    assert sent_metrics == [("index_version", 1, served), ("index_size", 400, served)]
    sent_metrics.clear()
    codes = some_codes(5)
    requests = [
        SearchRequest(queries, SearchOptions(k=k), max_hits=100)
        for queries, k in (
            (Queries("codes", codes), 3),
            (Queries("ids", np.array([99_999, 1])), 3),
            (Queries("codes", codes), 1),
        )
    ]
    started = time.perf_counter()
    asyncio.run(replica._run(requests))
    (name, seconds, tags), *counts = sent_metrics
    flat = {"run": "run", "kind": "flat"}
    assert (name, tags) == ("search_seconds", flat)
    assert 0 < seconds < time.perf_counter() - started
    assert counts == [
        ("search_queries", 10, flat | {"status": "ok"}),
        ("search_queries", 2, flat | {"status": "refused"}),
    ]
    sent_metrics.clear()
    BinaryIndex.load(f"{own_run}/index").add(codes, ids=np.arange(5) + 9000)
    asyncio.run(replica._follow())
    assert sent_metrics == [("index_version", 2, served), ("index_size", 405, served)]


def test_requests_are_counted_in_this_process_and_in_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(telemetry, "count", lambda name, n=1, **tags: sent.append((name, tags)))
    monkeypatch.setattr(telemetry, "observe", lambda name, seconds, **tags: sent.append((name, tags)))
    counted = replicas.RayTelemetry("demo")
    counted.request("POST", "/v1/search", 200, seconds=0.01, queries=3)
    info = IndexInfo(64, 400, "flat", "kernel", 1, None, {})
    text = counted.text(info).decode()
    assert 'hashnet_requests_total{method="POST",route="/v1/search",status="200"} 1.0' in text
    assert sent == [
        ("requests", {"run": "demo", "method": "POST", "route": "/v1/search", "status": 200}),
        ("request_seconds", {"run": "demo", "route": "/v1/search"}),
    ]
    for name, tags in sent:
        assert set(tags) == {"run", *telemetry.METRICS[name].tags}


def test_a_ray_that_starts_for_the_server_does_not_inherit_the_tokens(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect() -> None:
        assert not {"HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"} & os.environ.keys()
        raise ClusterError("no Ray today")

    monkeypatch.setenv("HASHNET_TOKEN", READ)
    monkeypatch.setenv("HASHNET_WRITE_TOKEN", WRITE)
    monkeypatch.setattr(connection, "connect", connect)
    with pytest.raises(ClusterError, match="no Ray today"), Server(ServeConfig(run=run)):
        pass
    assert (os.environ["HASHNET_TOKEN"], os.environ["HASHNET_WRITE_TOKEN"]) == (READ, WRITE)


def test_what_is_configured_reaches_serve(run: str) -> None:
    config = ServeConfig(run=run, index_replicas=3, max_encoder_replicas=5, http_replicas=2, device="cpu")
    built = deployment.build(config, ServedRun.open(config), Access())._bound_deployment
    index, encoder, writer = (one._bound_deployment for one in built.init_args[:3])
    assert (built.name, built.num_replicas) == ("HttpReplica", 2)
    assert (index.name, index.num_replicas) == ("IndexReplica", 3)
    assert (writer.name, writer.num_replicas) == ("WriterReplica", 1)  # one writer
    scaled = encoder._deployment_config.autoscaling_config
    assert (encoder.name, scaled.min_replicas, scaled.max_replicas) == ("EncoderReplica", 1, 5)


def test_an_operators_serve_needs_a_token(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
        deployment.application({"run": run})
    elsewhere = {"host": "127.0.0.1", "port": 8001, "tls_cert": "cert.pem", "tls_key": "key.pem"}
    with pytest.raises(ConfigError) as caught:  # Serve would listen as before, and ask for no token
        deployment.application({"run": run, **elsewhere})
    assert [mistake.partition(" is set by Serve")[0] for mistake in caught.value.mistakes] == list(elsewhere)
    monkeypatch.setenv("HASHNET_TOKEN", READ)
    built = deployment.application({"run": run, "index_replicas": 2, "device": "cpu"})
    assert built._bound_deployment.name == "HttpReplica"
    with pytest.raises(ConfigError, match="did you mean 'index_replicas'"):
        deployment.application({"run": run, "index_replica": 2})


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [("/v1/search", "POST", 503, "unavailable"), ("/v1/items", "GET", 503, "unavailable"),
     ("/v1/items", "POST", 504, "timeout"), ("/v1/items/remove", "POST", 504, "timeout")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["silent", "raises"])
def test_a_request_that_serve_lost_gets_an_error(
    path: str, method: str, status: int, code: str, how: str
) -> None:
    """A read is sent again; a write may have been done, so 504 and no Retry-After."""

    async def lost(scope: Any, receive: Any, send: Any) -> None:
        if how == "raises":
            raise RuntimeError("secret detail")

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(proxy.ProxyErrors(lost))
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            return await http.request(method, path)

    response = asyncio.run(main())
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "secret" not in response.text


def test_serves_own_503_is_replaced_and_other_responses_pass() -> None:
    async def say(scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        status = int(scope["path"].strip("/"))
        await PlainTextResponse("words of Serve", status)(scope, receive, send)

    http = TestClient(proxy.ProxyErrors(say), base_url=BASE)
    busy = http.post("/503")
    assert (busy.json()["error"]["code"], busy.headers["retry-after"]) == ("unavailable", "1")
    assert http.get("/404").text == "words of Serve"
