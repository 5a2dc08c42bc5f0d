"""Every port a replica listens on: none answers without the token, whoever reaches it directly."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from cluster.serve import Server
from hashnet.server import ServeConfig
from tests.support.local_cluster import free_ports

READ, WRITE = "r" * 24, "w" * 24
REQUESTS = [
    ("GET", "/v1/info", None),
    ("GET", "/v1/items/0", None),
    ("GET", "/metrics", None),
    ("POST", "/v1/search", '{"codes": ["0000000000000000"]}'),
    ("POST", "/v1/items", '{"item_ids": [1], "codes": ["0000000000000000"]}'),
    ("POST", "/v1/items/remove", '{"ids": [0]}'),
]


@pytest.fixture(scope="module")
def server(own_ray: Any, run: str) -> Iterator[Server]:
    """Two replicas with both tokens, on a Ray whose Serve opens direct ingress ports where it can."""
    from cluster.runtime import connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_ENABLE_DIRECT_INGRESS", "1")
        patch.setenv(
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1"
        )  # nobody's requests are waited for
        patch.setenv("HASHNET_TOKEN", READ)
        patch.setenv("HASHNET_WRITE_TOKEN", WRITE)
        connection.connect(num_cpus=2, object_store_memory=200_000_000)
        config = ServeConfig(run=run, port=free_ports(1)[0], replicas=2, model="off")
        with Server(config) as started:
            yield started


def replica_ports() -> dict[int, set[int]]:
    """pid → ports of every replica of the server."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        if "ServeReplica" in " ".join(process.cmdline()):
            sockets = process.net_connections(kind="tcp")
            found[process.pid] = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


def ask(port: int, method: str, path: str, body: str | None, token: str = "") -> tuple[int, bytes]:
    """(status, body) of one request on a connection of its own; status 0 where it is no HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def test_no_port_of_a_replica_answers_without_a_token(server: Server) -> None:
    ports = replica_ports()
    own = [pid for pid, of_it in ports.items() if server.config.port in of_it]
    assert len(own) == 2, ports  # each accepts connections itself
    for port in sorted(set().union(*ports.values())):
        for request in REQUESTS:
            for token in ("", "x" * 24):
                status, body = ask(port, *request, token)
                if port == server.config.port:
                    assert status in (401, 403), (port, request, status, body)
                else:
                    assert not 200 <= status < 300, (port, request, status, body)
        status, body = ask(port, *REQUESTS[4], READ)  # reading does not allow writing
        assert status == (403 if port == server.config.port else status), body
        assert not 200 <= status < 300


def test_every_replica_checks_by_itself(server: Server) -> None:
    refused, passed = set(), set()  # the processes, by the beginning of their request ids
    for _ in range(400):
        for token, expected, seen in (("", 401, refused), (READ, 404, passed)):
            status, body = ask(server.config.port, "GET", "/v1/items/999999999", None, token)
            assert status == expected
            seen.add(json.loads(body)["error"]["request_id"][:10])
        if len(refused) == len(passed) == 2:
            break
    assert len(refused) == 2
    assert refused == passed
