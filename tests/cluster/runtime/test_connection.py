"""A wrong RAY_ADDRESS is a sentence, soon; a Ray that starts here keeps to loopback; nodes come and go."""

import os
import socket
import subprocess

import pytest
import ray

from cluster.runtime import connection, ray_internals
from cluster.runtime.connection import NodeMonitor
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


def test_a_node_that_goes_is_not_called_lost_and_counted_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(connection, "node_names", lambda: {"a": "cpu-1", "b": "cpu-2"})
    monitor = NodeMonitor()
    monkeypatch.setattr(connection, "node_names", lambda: {"a": "cpu-1"})
    monitor.update()
    (said,) = caplog.messages  # an autoscaler that removed an idle node says the same to Ray
    assert said == "node cpu-2 left after 0s; Ray repeats elsewhere what ran there, if anything did"
    summary = monitor.stop().to_dict()
    assert (summary["nodes"], summary["lost"], summary["joined"]) == (2, 1, 0)


def test_the_nodes_of_another_ray_are_not_taken_for_changes(monkeypatch, caplog):
    monkeypatch.setattr(ray_internals, "connected", lambda: True)
    monkeypatch.setattr(ray_internals, "head_address", lambda: ("127.0.0.1", 1))
    monkeypatch.setattr(connection, "node_names", lambda: {"a": "cpu-1"})
    monitor = NodeMonitor()
    monkeypatch.setattr(ray_internals, "head_address", lambda: ("127.0.0.1", 2))
    monkeypatch.setattr(connection, "node_names", lambda: {"b": "cpu-1"})
    assert monitor.stop().events == []
    assert caplog.messages == []


@pytest.fixture
def lost_head(monkeypatch):
    """The address of a head that is gone, and no patience."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        head = other.getsockname()
    monkeypatch.setattr(connection, "node_names", lambda: {"a": "cpu-1"})
    monkeypatch.setattr(connection, "SILENCE_S", 0.0)
    monkeypatch.setattr(ray_internals, "head_address", lambda: head)


def test_a_cluster_whose_head_is_silent_is_reported_and_waited_for(lost_head, caplog):
    monitor = NodeMonitor(in_cluster=True)
    assert not monitor._head_answers()
    assert caplog.messages == []  # it may have been a moment
    assert not monitor._head_answers()
    assert caplog.messages == ["the head of the cluster does not answer; Ray waits a minute for it to return"]


def test_a_job_whose_own_ray_is_gone_ends_with_a_sentence(lost_head, monkeypatch, capsys, tmp_path):
    class Exited(Exception):
        pass

    def leave(code):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    monitor = NodeMonitor(in_cluster=False)
    assert not monitor._head_answers()
    assert not monitor._head_answers()  # not in a job: whoever uses the library decides
    log = (tmp_path / "the.log").open("w")
    monkeypatch.setattr(connection, "_log", log)
    with log, pytest.raises(Exited, match="1"):
        monitor._head_answers()
    sentence, details = capsys.readouterr().err.splitlines()
    assert (
        sentence
        == "error: Ray on this machine stopped (its head died); run the same command again to continue"
    )
    assert details == f"details: {log.name}"
