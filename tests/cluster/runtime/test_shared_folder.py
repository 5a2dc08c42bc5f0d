"""A local folder as the output of a cluster: refused where another node does not see it."""

import pytest
import ray

from cluster.runtime import capacity
from hashnet.errors import ConfigError


@pytest.fixture
def elsewhere(ray_local, monkeypatch):
    """Lets the node of this Ray look like one with an address, and so a disk, of its own."""
    nodes = [{**record, "NodeName": "far", "NodeManagerAddress": "10.1.2.3"} for record in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


def test_a_folder_that_every_node_sees(elsewhere, tmp_path):
    capacity.require_shared(str(tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []  # nothing is left there


def test_a_folder_of_this_nodes_disk(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.runtime.capacity.storage.exists", lambda uri: False)
    with pytest.raises(
        ConfigError, match=r"run is on this node's own disk: far cannot see it; give a folder"
    ):
        capacity.require_shared(str(tmp_path / "run"))


def test_an_object_store_is_seen_by_all(elsewhere):
    capacity.require_shared("s3://bucket/run?region=us-east-1")  # is not even asked
