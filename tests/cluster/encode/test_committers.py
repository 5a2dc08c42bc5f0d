"""Committers share the nodes of a cluster: the codes of all encoders do not pass through one of them."""

from __future__ import annotations

import json

import pytest

from cluster.encode import pipeline
from tests.support.local_cluster import LocalCluster

PLACED = """
    import json
    from types import SimpleNamespace
    from cluster.encode import pipeline
    from cluster.runtime import connection
    connection.connect()
    import ray

    settings = SimpleNamespace(run="run", targets=(), repair=False)
    committers = pipeline.start_committers(settings, [], pipeline.n_committers(8)).values()
    node = lambda self: ray.get_runtime_context().get_node_id()
    nodes = ray.get([committer.__ray_call__.remote(node) for committer in committers])
    print(json.dumps([connection.node_names()[node] for node in nodes]))
"""


@pytest.mark.parametrize(
    ("nodes", "n_actors", "expected"),
    [(1, 4, 1), (2, 4, 1), (5, 8, 4), (5, 3, 3), (5, 1, 1)],  # one of the nodes is the head
)
def test_one_committer_per_node_and_no_more_than_encoders(monkeypatch, nodes, n_actors, expected):
    names = {str(i): f"node-{i}" for i in range(nodes)}
    monkeypatch.setattr(pipeline.connection, "node_names", lambda: names)
    assert pipeline.n_committers(n_actors) == expected


def test_they_are_spread_over_the_nodes(drive):
    with LocalCluster() as cluster:
        cluster.add_node("head", cpus=0)
        for name in ("one", "two"):
            cluster.add_node(name, cpus=1)
        done = drive(cluster, PLACED)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == ["one", "two"]
