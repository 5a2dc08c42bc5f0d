"""How the application is put onto Ray Serve, and the words of Serve that clients never see."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.runtime import connection, telemetry
from cluster.runtime.capacity import Node, too_large
from cluster.serve import Server, deployment, replicas
from hashnet import BinaryIndex
from hashnet.client import Queries
from hashnet.errors import ClusterError, ConfigError
from hashnet.server import (
    Access,
    IndexInfo,
    IndexService,
    LiveIndex,
    SearchOptions,
    SearchRequest,
    ServeConfig,
    ServedRun,
)
from tests.support.local_cluster import free_ports
from tests.support.serving_app import READ, WRITE
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
    assert "GPU" not in deployment.http_resources(config)
    assert deployment.http_resources(ServeConfig(run=run, index_device="cuda", threads=4)) == {
        "CPU": 4.0,
        "GPU": 0.5,
    }
    needs = deployment.needs(config, ServedRun.open(config))
    assert [need.name for need in needs] == ["writer", "http", "encoder"]
    with pytest.raises(ConfigError, match="max_encoder_replicas=1 is below encoder_replicas=3"):
        ServeConfig(run=run, encoder_replicas=3, max_encoder_replicas=1)
    with pytest.raises(ConfigError, match="belong together"):
        ServeConfig(run=run, tls_cert="cert.pem")
    logged = ServeConfig(run=run, log_dir="logs")
    with pytest.raises(ConfigError, match="log_dir= is for `hashnet serve`"):
        deployment.build(logged, ServedRun.open(logged), Access.of())


@pytest.mark.parametrize(
    ("device", "gpus", "used"),
    [("auto", 0, "cpu"), ("auto", 1, "cuda"), ("cpu", 1, "cpu"), ("cuda", 0, "cuda")],
)
def test_encoders_use_what_is_reserved_for_them(
    run: str, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, used: str
) -> None:
    """Not what torch sees on their node: other processes may use the GPU there."""
    monkeypatch.setattr(connection, "resources", lambda: {"CPU": 8.0, "GPU": gpus})
    config = ServeConfig(run=run, device=device)
    http = deployment.build(config, ServedRun.open(config), Access())
    encoder = http._bound_deployment.init_args[0]._bound_deployment
    assert encoder.init_args[0].device == used
    assert encoder.ray_actor_options.get("num_gpus", 0) == (0.5 if used == "cuda" else 0)


def test_every_replica_asked_for_must_have_room(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would wait for ever for one that has none. 2 CPUs: 0.05 writer, 0.5 each other."""
    monkeypatch.setattr(connection, "resources", lambda: {"CPU": 2.0})

    def fits(**settings: Any) -> bool:
        config = ServeConfig(run=run, **settings)
        needs = deployment.needs(config, ServedRun.open(config))
        return not too_large(needs, [Node("a", {"CPU": 2.0})])

    assert fits(replicas=2)  # 0.05 + 2 x 0.5 + 0.5
    assert fits(replicas=2, max_encoder_replicas=8)  # more come when there is room
    assert not fits(replicas=8)
    assert not fits(replicas=3)
    assert not fits(encoder_replicas=4)
    assert fits(replicas=3, model="off")
    assert not fits(replicas=4, model="off")  # all but the writer


class FakeServe:
    """Ray Serve as far as starting and stopping it goes: it comes up, and then fails to be ready."""

    def __init__(self, patch: pytest.MonkeyPatch, running: bool = False) -> None:
        self.running, self.calls = running, list[str]()
        patch.setattr("cluster.serve.server.connection.connect", lambda: None)
        patch.setattr("cluster.serve.server.capacity.require", lambda stage, needs: None)
        patch.setattr("cluster.serve.server.capacity.require_shared", lambda folder: None)
        patch.setattr("cluster.serve.deployment.connection.resources", lambda: {"CPU": 2.0})
        patch.setattr("ray.is_initialized", lambda: True)
        patch.setattr("ray.serve.context._get_global_client", lambda **_: self.client())
        patch.setattr("ray.serve.start", self.start)
        patch.setattr("ray.serve.delete", lambda name: self.calls.append("delete"))
        patch.setattr("ray.serve.shutdown", lambda: self.calls.append("shutdown"))
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    def client(self) -> Any:
        return SimpleNamespace() if self.running else None

    def start(self, **_: Any) -> None:
        self.calls.append("start")
        self.running = True
        raise TimeoutError("not available after 60s.")


def test_a_serve_that_does_not_come_up_is_taken_down(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe(monkeypatch)
    with (
        pytest.raises(TimeoutError, match="not available"),
        Server(ServeConfig(run=run, host="localhost", port=free_ports(1)[0])),
    ):
        pass
    assert fake.calls == ["start", "delete", "shutdown"]


def test_a_server_that_is_there_is_neither_replaced_nor_deleted(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeServe(monkeypatch, running=True)
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"hashnet": None}))
    monkeypatch.setattr("ray.serve.run", lambda *_, **__: fake.calls.append("run"))
    with (
        pytest.raises(ClusterError, match=r"hashnet runs on this cluster already; stop that first"),
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
    config = ServeConfig(run=own_run, model="off")
    counters = replicas.RayTelemetry("run")
    live = LiveIndex(ServedRun.open(config).index)
    service = IndexService(live, 1.0, counters)
    served = {"run": "run"}
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
    service._search(requests)
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
    asyncio.run(service.follow())
    assert sent_metrics == [("index_version", 2, served), ("index_size", 405, served)]


def test_requests_are_counted_in_this_process_and_in_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(telemetry, "count", lambda name, n=1, **tags: sent.append((name, tags)))
    monkeypatch.setattr(telemetry, "observe", lambda name, seconds, **tags: sent.append((name, tags)))
    counted = replicas.RayTelemetry("demo")
    counted.request("POST", "/v1/search", 200, seconds=0.01, queries=3)
    info = IndexInfo(64, 400, "flat", "kernel", 1, None, None, None, {})
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
    config = ServeConfig(run=run, max_encoder_replicas=5, replicas=2, device="cpu")
    built = deployment.build(config, ServedRun.open(config), Access())._bound_deployment
    encoder, writer = (one._bound_deployment for one in built.init_args[:2])
    assert (built.name, built.num_replicas) == ("HttpReplica", 2)
    assert (writer.name, writer.num_replicas) == ("WriterReplica", 1)  # one writer
    scaled = encoder._deployment_config.autoscaling_config
    assert (encoder.name, scaled.min_replicas, scaled.max_replicas) == ("EncoderReplica", 1, 5)


def test_an_operators_serve_needs_a_token(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
        deployment.application({"run": run})
    monkeypatch.setenv("HASHNET_TOKEN", READ)
    built = deployment.application({"run": run, "replicas": 2, "device": "cpu"})
    assert built._bound_deployment.name == "HttpReplica"
    with pytest.raises(ConfigError, match="did you mean 'replicas'"):
        deployment.application({"run": run, "replica": 2})
