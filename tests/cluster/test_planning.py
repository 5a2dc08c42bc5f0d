"""Plans over invented clusters: no Ray is started."""

import importlib
import json
import logging
from types import SimpleNamespace

import pytest
import ray

from cluster.compare.cells import needs_of
from cluster.encode import setup as encode_setup
from cluster.encode.stages import ACTOR_CPUS
from cluster.evaluate import tasks as counting
from cluster.runtime import connection, nodes, placement, planning
from cluster.runtime.nodes import Node, NodeType
from cluster.runtime.planning import Need, plan
from cluster.train import worker_resources
from hashnet.errors import ClusterError, ConfigError
from hashnet.reports.comparison.cells import Cell
from hashnet.training.config import TrainConfig

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


def test_memory_that_a_type_does_not_state_is_no_limit_of_nodes_to_come():
    need = Need("slice", 3, {"CPU": 1, "memory": 64e9}, strategy="spread")
    silent = NodeType("cpu", {"CPU": 2}, spare=2)
    stated = NodeType("cpu", {"CPU": 2, "memory": 32e9}, spare=2)
    assert plan("index", [need], [HEAD], [silent]).coming == {"slice": {"cpu": 3}}
    assert not plan("index", [need], [HEAD], [stated]).possible
    assert not plan("index", [need], [CPUS]).possible  # a node that is up has said what it has
    assert not plan("index", [Need("w", 1, {"TPU": 1})], [HEAD], [silent]).possible


def test_a_plan_takes_a_few_looks_a_worker(monkeypatch):
    looks, fits = [], planning._Room.fits
    monkeypatch.setattr(planning._Room, "fits", lambda room, need: looks.append(1) or fits(room, need))
    kinds = [NodeType("gpu", {"CPU": 8, "GPU": 2}, spare=10_000)]
    need = Need("encoder", 2000, {"GPU": 1}, at_least=1, strategy="spread")
    made = plan("encode", [need], [HEAD, CPUS], kinds)
    assert made.coming == {"encoder": {"gpu": 2000}}
    assert len(looks) < 5 * 2000


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


@pytest.fixture
def invented(monkeypatch):
    """Lets placement see these nodes, kinds to be added and free resources; Ray is not asked."""

    def set_up(now, more=(), free=None):
        monkeypatch.setattr(connection, "connect", lambda: None)
        monkeypatch.setattr(nodes, "alive", lambda: now)
        monkeypatch.setattr(nodes, "addable", lambda _: list(more))
        names = {name for node in now for name in node.resources}
        whole = {name: sum(node.resources.get(name, 0) for node in now) for name in names}
        monkeypatch.setattr(connection, "resources", lambda: whole)
        monkeypatch.setattr(ray, "available_resources", lambda: whole if free is None else free)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test's may run in this process

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return set_up


def test_memory_is_shown_where_a_need_names_it(invented):
    invented([Node("a", {"CPU": 4, "memory": 4e9, "object_store_memory": 1e9})])
    assert str(nodes.alive()[0]) == "a {CPU 4}"
    with pytest.raises(ClusterError, match=r"slice of \{CPU 1, memory 8 GB\}.*has a \{CPU 4, memory 4 GB\}$"):
        placement.ensure("index", [Need("slice", 1, {"CPU": 1, "memory": 8e9})])


def test_a_ray_started_here_refuses_at_once_and_a_cluster_gives_a_node_time_to_join(invented, monkeypatch):
    slept = []
    monkeypatch.setattr(placement.time, "sleep", lambda s: slept.append(s) or invented([CPUS, GPUS]))
    need = Need("worker", 1, {"GPU": 1})
    invented([CPUS])
    with pytest.raises(ClusterError, match="0 can ever be placed"):
        placement.ensure("train", [need])
    assert slept == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert placement.ensure("train", [need]).ready
    assert slept == [0.5]


def test_the_autoscaler_is_asked_for_as_many_nodes_as_a_strategy_wants(invented, monkeypatch):
    asked = []
    groups = importlib.import_module("ray.util.placement_group")  # ray.util has a function of that name
    monkeypatch.setattr(groups, "placement_group", lambda b, strategy: asked.append((b, strategy)))
    monkeypatch.setenv("HASHNET_WAIT_S", "0")
    invented([CPUS], [NodeType("cpu", {"CPU": 4}, spare=1)])
    needs = [
        Need("worker", 2, {"CPU": 1}, strategy="strict_spread"),
        Need("other", 3, {"CPU": 1}, at_least=0),
    ]
    with pytest.raises(ClusterError, match=r"1 × worker \{CPU 1\} within 0s.*HASHNET_WAIT_S \(seconds\)"):
        placement.ensure("train", needs)
    assert asked == [([{"CPU": 1}] * 2, "STRICT_SPREAD")]  # two would fit on the one node there is
    for wrong in ("soon", "nan", "inf", "-1"):
        monkeypatch.setenv("HASHNET_WAIT_S", wrong)
        with pytest.raises(ConfigError, match=f"HASHNET_WAIT_S must be a number of seconds, got '{wrong}'"):
            placement.ensure("train", needs)


def test_what_others_hold_is_said_once(invented, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.runtime.placement")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    invented([GPUS], free={"CPU": 3.0})
    placement.ensure("train", [Need("worker", 2, {"CPU": 2, "GPU": 1}, at_least=1)])
    assert caplog.messages[-1] == "busy: 2 of 2 GPU in use; this starts when there is room"
    placement.ensure("train", [Need("worker", 3, {"CPU": 1})])
    assert caplog.messages[-1].startswith("plan: ")


def test_encoding_asks_for_the_gpus_that_its_rows_keep_busy(invented):
    """Of a pool without a maximum, one for 65,536 rows; what is up already is used in any case."""
    unbounded = NodeType("gpu", {"CPU": 8, "GPU": 2}, spare=10_000)
    invented([HEAD, CPUS], [unbounded], free={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_wait", lambda result, wait_s: result)
        asked = [encode_setup.place(None, 1, rows) for rows in (100, 200_000, 10**9)]
        assert asked == [1, 4, encode_setup.MOST_NEW_ACTORS]
        assert encode_setup.place(300, 1, 100) == 300
    invented([HEAD, GPUS], [unbounded])
    assert encode_setup.place(None, 1, 100) == 2


def test_settling_the_engine_needs_no_more_than_the_plan_found_room_for(monkeypatch):
    asked = []

    def remote(**options):
        asked.append(options)
        answers = iter([None, ("cuda", "as asked")])
        return lambda function: SimpleNamespace(remote=lambda *_: answers)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    assert encode_setup.settle_engine("cuda", "never opened", "image", 0.5) == "cuda"
    assert (asked[0]["num_cpus"], asked[0]["num_gpus"]) == (ACTOR_CPUS, 0.5)


def test_counting_on_a_gpu_waits_for_one_or_is_refused(invented, monkeypatch):
    """device=cuda never runs without: tasks would end with `torch finds no GPU`."""
    groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "placement_group", lambda bundles, strategy: None)
    monkeypatch.setenv("HASHNET_WAIT_S", "0")

    def count():
        next(counting.run_ranges(0, "cuda", None, None, None, 10, [(0, 1)], [(0,)]))

    invented([HEAD, CPUS], [NodeType("gpu", {"CPU": 8, "GPU": 1}, spare=1)])
    with pytest.raises(ClusterError, match=r"did not bring the nodes for 1 × counter \{CPU 1, GPU 1\}"):
        count()
    invented([HEAD, CPUS])
    with pytest.raises(ClusterError, match=r"0 can ever be placed: use device=cpu"):
        count()


CELLS = [Cell("main", method, 16, 0) for method in ("lsh", "hashnet", "dhn")]


def test_deep_cells_that_want_a_gpu_are_refused_where_there_is_none(invented):
    invented([CPUS])
    with pytest.raises(
        ClusterError, match=r"compare needs 1 × deep cell of \{CPU 2, GPU 1\}.*give device=cpu"
    ):
        placement.ensure("compare", needs_of(CELLS, cpus=2, gpu=True))
    made = placement.ensure("compare", needs_of(CELLS, cpus=2, gpu=False))
    assert made.placed == {"cell": {"cpu-1": 2}}


def test_cells_take_turns_on_a_node_that_holds_one(invented):
    invented([Node("gpu", {"CPU": 1, "GPU": 1})])
    made = placement.ensure("compare", needs_of(CELLS, cpus=1, gpu=True))
    assert made.placed == {"deep cell": {"gpu": 1}}
    assert "1 × {CPU 1}  →  1 when there is room" in str(made)
    assert "0 is enough" not in str(made)


@pytest.mark.parametrize(
    ("now", "more", "free", "options", "expected"),
    [
        ([HEAD], [NodeType("gpu", {"CPU": 6, "GPU": 1}, 2)], 0, {}, {"CPU": 6, "GPU": 1}),
        ([HEAD, CPUS], [NodeType("gpu", {"CPU": 64, "GPU": 4}, 1)], 4, {}, {"CPU": 8, "GPU": 1}),
        ([HEAD, GPUS], [NodeType("gpu", {"CPU": 64, "GPU": 8}, 1)], 8, {}, {"CPU": 4, "GPU": 1}),
        ([HEAD], [NodeType("cpu", {"CPU": 8}, 1)], 0, {}, {"CPU": 4}),
        ([CPUS], [], 4, {}, {"CPU": 2}),
        ([CPUS], [], 0, {}, {"CPU": 1}),  # all in use: no more than there must be
        ([CPUS], [], 4, {"num_workers": 9}, {"CPU": 1}),  # refused later, by what is missing
        ([CPUS], [], 4, {"cpus_per_worker": 3}, {"CPU": 3}),
    ],
)
def test_cpus_of_a_training_worker(invented, now, more, free, options, expected):
    invented(now, more, {"CPU": free})
    assert worker_resources(TrainConfig(**{"run": "/r", "num_workers": 2} | options)) == expected
