"""A wrong RAY_ADDRESS is a sentence, soon; a Ray that starts here keeps to loopback."""

import os
import socket
import subprocess

import pytest
import ray

from cluster.runtime import connection
from hashnet.errors import ClusterError


@pytest.fixture(autouse=True)
def not_connected(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection, "ANSWER_S", 0.3)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_no_ray_answers(monkeypatch, scheme):
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it would wait without end"))
    with socket.socket() as other:  # a server that is not Ray's, or for Ray's own address nobody
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(ClusterError, match=r"^RAY_ADDRESS=.*no Ray answers at .* give HEAD:6379"):
            connection.connect()


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "https://head:8265", "head"])
def test_an_address_that_is_none(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match="`ray job submit`, in RAY_API_SERVER_ADDRESS"):
        connection.connect()


def test_a_ray_that_was_imported_before_still_listens_on_loopback_alone(python, repo):
    """Ray decides by the environment when it is imported; a sweep once imported it before connecting."""
    code = (
        "import ray; from cluster.runtime import connection; connection.connect(num_cpus=1); "
        "print([node['NodeManagerAddress'] for node in ray.nodes()])"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([python, "-c", code], cwd=repo, env=kept, capture_output=True, text=True)
    assert done.stdout.strip() == "['127.0.0.1']", done.stderr
