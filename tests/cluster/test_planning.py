"""Plans over invented clusters: no Ray is started."""

import json

import pytest

from cluster import nodes
from cluster.nodes import Node, NodeType
from cluster.planning import Need, plan
from hashnet.errors import ClusterError, ConfigError

HEAD = Node("head", {"CPU": 0, "memory": 1e9, "node:__internal_head__": 1.0}, is_head=True)
CPUS = Node("cpu-1", {"CPU": 4.0})
GPUS = Node("gpu-1", {"CPU": 8.0, "GPU": 2.0})


def test_workers_without_a_gpu_go_to_nodes_without_one_and_nothing_to_the_head():
    needs = [Need("decode", 3, {"CPU": 1}), Need("encoder", 2, {"CPU": 1, "GPU": 1})]
    made = plan("encode", needs, [HEAD, GPUS, CPUS])
    assert made.placed == {"encoder": {"gpu-1": 2}, "decode": {"cpu-1": 3}}
    assert made.ready
    assert "the head takes no work" in str(made)


def test_decoders_beyond_the_cpu_pool_spill_over():
    made = plan("encode", [Need("decode", 6, {"CPU": 1})], [CPUS, GPUS])
    assert made.placed["decode"] == {"cpu-1": 4, "gpu-1": 2}


def test_pack_fills_a_node_and_spread_alternates():
    pair = [Node("a", {"CPU": 4}), Node("b", {"CPU": 4})]
    assert plan("t", [Need("w", 4, {"CPU": 1})], pair).placed["w"] == {"a": 4}
    assert plan("t", [Need("w", 4, {"CPU": 1}, strategy="spread")], pair).placed["w"] == {"a": 2, "b": 2}
    strict = plan("t", [Need("w", 3, {"CPU": 1}, strategy="strict_spread")], pair)
    assert strict.placed["w"] == {"a": 1, "b": 1}
    assert not strict.possible
    with pytest.raises(ClusterError, match="strategy must be one of"):
        plan("t", [Need("w", 1, {"CPU": 1}, strategy="scatter")], pair)


def test_fractions_of_a_gpu_fill_it_exactly():
    # Three thirds of a GPU make one; a fourth worker has no room on a node with one GPU.
    third = round(1 / 3, 4)
    one = Node("g", {"CPU": 8, "GPU": 1})
    assert plan("e", [Need("encoder", 3, {"GPU": third})], [one]).ready
    assert not plan("e", [Need("encoder", 4, {"GPU": third})], [one]).possible
    assert plan("e", [Need("encoder", 10, {"GPU": 0.1})], [one]).ready


def test_unlike_nodes_take_what_they_can_hold():
    big, small = Node("big", {"CPU": 16, "GPU": 4}), Node("small", {"CPU": 2, "GPU": 1})
    made = plan("train", [Need("worker", 4, {"CPU": 4, "GPU": 1})], [small, big])
    assert made.placed["worker"] == {"big": 4}  # the small one has a GPU but too few cores


def test_every_minimum_is_placed_before_anyone_gets_more():
    needs = [Need("encoder", 8, {"CPU": 1}, at_least=1), Need("decode", 8, {"CPU": 1}, at_least=1)]
    made = plan("encode", needs, [Node("a", {"CPU": 2})])
    assert made.placed == {"encoder": {"a": 1}, "decode": {"a": 1}}
    assert made.ready
    assert "7 when there is room (1 is enough)" in str(made)


def test_what_an_autoscaler_may_add_is_possible_but_not_ready():
    kinds = [NodeType("gpu", {"CPU": 8, "GPU": 1}, spare=2), NodeType("cpu", {"CPU": 8}, spare=1)]
    needs = [Need("encoder", 2, {"CPU": 1, "GPU": 1}), Need("decode", 2, {"CPU": 4})]
    made = plan("encode", needs, [HEAD], kinds)
    assert made.coming == {"encoder": {"gpu": 2}, "decode": {"gpu": 2}}  # two nodes hold both
    assert made.possible
    assert not made.ready
    assert not plan("encode", [Need("encoder", 3, {"GPU": 1})], [HEAD], kinds).possible
    assert plan("encode", [Need("decode", 1, {"CPU": 1})], [HEAD], kinds).coming == {"decode": {"cpu": 1}}


def test_a_hundred_nodes_print_a_line_not_a_page():
    many = [Node(f"n{i:03d}", {"CPU": 1}) for i in range(100)]
    assert str(plan("t", [Need("w", 100, {"CPU": 1})], many)).endswith("and 92 more nodes")


def test_addable_nodes_from_the_environment_less_those_there_are(monkeypatch):
    kinds = [{"name": "gpu", "resources": {"CPU": 8, "GPU": 2}, "max": 3}]
    monkeypatch.setenv(nodes.NODE_TYPES, json.dumps(kinds))
    assert nodes.addable([HEAD, GPUS, CPUS]) == [NodeType("gpu", {"CPU": 8, "GPU": 2}, 2)]
    monkeypatch.setenv(nodes.NODE_TYPES, "gpu=3")
    with pytest.raises(ConfigError, match="HASHNET_NODE_TYPES must be JSON like"):
        nodes.addable([])


def test_addable_nodes_from_what_ray_up_leaves_on_the_head(monkeypatch, tmp_path):
    (tmp_path / "bootstrap.yaml").write_text(
        "max_workers: 5\nhead_node_type: head\navailable_node_types:\n"
        "  head: {resources: {CPU: 0}, max_workers: 0}\n"
        "  cpu: {resources: {CPU: 4}, max_workers: 3}\n  gpu: {resources: {CPU: 8, GPU: 1}}\n"
    )
    monkeypatch.setattr(nodes, "BOOTSTRAP", str(tmp_path / "bootstrap.yaml"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert [(k.name, k.spare) for k in nodes.addable([HEAD, CPUS])] == [("cpu", 2), ("gpu", 5)]
