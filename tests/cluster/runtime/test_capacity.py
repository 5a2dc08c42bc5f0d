"""The capacity check on invented clusters: no Ray is started."""

import importlib
import json
import logging
from types import SimpleNamespace

import pytest
import ray

from cluster.compare.runner import CellResources, cell_needs
from cluster.encode import pipeline
from cluster.encode.pipeline import ACTOR_CPUS
from cluster.evaluate import Evaluation, run_ranges
from cluster.runtime import capacity, connection
from cluster.runtime.capacity import Need, Node
from cluster.train import worker_resources
from hashnet.comparison.cell import Cell
from hashnet.errors import ClusterError, ConfigError
from hashnet.training.train_config import TrainConfig

HEAD = Node("head", {"CPU": 0, "memory": 1e9, "node:__internal_head__": 1.0}, is_head=True)
CPUS = Node("cpu-1", {"CPU": 4.0})
GPUS = Node("gpu-1", {"CPU": 8.0, "GPU": 2.0})


def kind(name, resources, count):
    """``count`` nodes that an autoscaler may add."""
    return {"name": name, "resources": resources, "max": count}


@pytest.fixture
def invented(monkeypatch):
    """Lets the check see these nodes, kinds that may be added and free resources, instead of Ray's."""

    def set_up(now, more=(), free=None):
        monkeypatch.setattr(connection, "connect", lambda: None)
        monkeypatch.setattr(capacity, "nodes", lambda: now)
        monkeypatch.setattr(
            capacity.ray_internals,
            "node_types",
            lambda: [(k["name"], k["resources"], k["max"]) for k in more],
        )
        names = {name for node in now for name in node.resources}
        whole = {name: sum(node.resources.get(name, 0) for node in now) for name in names}
        monkeypatch.setattr(connection, "resources", lambda: whole)
        monkeypatch.setattr(ray, "available_resources", lambda: whole if free is None else free)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test's may run in this process

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return set_up


@pytest.fixture
def requested(monkeypatch):
    """The placement groups by which nodes are requested; the wait is over at once."""
    groups = importlib.import_module("ray.util.placement_group")  # ray.util has a function of that name
    made = []
    monkeypatch.setattr(groups, "placement_group", lambda b, strategy: made.append((b, strategy)))
    monkeypatch.setenv("HASHNET_WAIT_S", "0")
    return made


def refusal(needs, stage="train"):
    with pytest.raises(ClusterError) as refused:
        capacity.require(stage, needs)
    return str(refused.value)


def test_what_fits_starts_after_a_line_about_the_cluster(invented, caplog):
    caplog.set_level(logging.INFO, "cluster.runtime.capacity")
    invented([HEAD, GPUS, CPUS])
    needs = [Need("decode", 3, {"CPU": 1}), Need("encoder", 2, {"CPU": 1, "GPU": 1})]
    capacity.require("encode", needs)
    assert caplog.messages == [
        "plan: encode runs 3 × decode {CPU 1}, 2 × encoder {CPU 1, GPU 1}; the cluster has 2 nodes with "
        "{CPU 12, GPU 2} (the head takes no work), the largest gpu-1 {CPU 8, GPU 2}"
    ]


def test_what_never_fits_is_refused_with_the_largest_node_and_the_remedy(invented):
    invented([HEAD, CPUS, GPUS])
    need = Need("worker", 3, {"CPU": 1, "GPU": 1}, fix="lower num_workers")
    assert refusal([need]) == (
        "train needs 3 × worker {CPU 1, GPU 1}, but 2 can fit: lower num_workers, or add nodes. The cluster "
        "has 2 nodes with {CPU 12, GPU 2} (the head takes no work), the largest gpu-1 {CPU 8, GPU 2}"
    )
    invented([HEAD])
    assert refusal([need]).endswith("The cluster has no node that takes work")


def test_a_worker_each_on_its_own_node(invented):
    invented([CPUS, GPUS])
    capacity.require("train", [Need("worker", 2, {"CPU": 1}, one_per_node=True)])
    three = Need("worker", 3, {"CPU": 1}, one_per_node=True)
    assert "3 × worker {CPU 1}, each on its own node, but 2 can fit" in refusal([three])


def test_fractions_of_a_gpu_fill_it_exactly():
    third, one = round(1 / 3, 4), [Node("g", {"CPU": 8, "GPU": 1})]
    assert Need("encoder", 1, {"GPU": third}).fitting(one) == 3
    assert Need("encoder", 1, {"GPU": 1 / 3}).fitting(one) == 3
    assert Need("encoder", 1, {"GPU": 0.1}).fitting(one) == 10


def test_a_worker_must_fit_on_one_node():
    big, small = Node("big", {"CPU": 16, "GPU": 4}), Node("small", {"CPU": 2, "GPU": 1})
    assert Need("worker", 1, {"CPU": 4, "GPU": 1}).fitting([small, big]) == 4  # none on the small one


def test_minimums_must_fit_together_and_the_rest_takes_turns(invented):
    needs = [Need("encoder", 8, {"CPU": 1}, at_least=1), Need("decode", 8, {"CPU": 1}, at_least=1)]
    invented([Node("a", {"CPU": 2})])
    capacity.require("encode", needs)
    invented([Node("a", {"CPU": 1})])
    assert "needs 1 × encoder + decode together {CPU 2}, but 0 can fit: request less" in refusal(
        needs, "encode"
    )


def test_nodes_that_an_autoscaler_may_add_are_requested_and_waited_for(invented, requested):
    invented([CPUS], [kind("cpu", {"CPU": 4}, 2)])
    needs = [
        Need("worker", 2, {"CPU": 1}, one_per_node=True),
        Need("other", 3, {"CPU": 1}, at_least=0),
    ]
    message = refusal(needs)
    assert message.startswith(
        "the autoscaler did not add nodes for 1 × worker {CPU 1} within 0s; `ray status`"
    )
    assert "HASHNET_WAIT_S (seconds)" in message
    assert requested == [([{"CPU": 1}] * 2, "STRICT_SPREAD")]  # two would fit on the one node there is


def test_the_wait_ends_when_the_node_is_there(invented, requested, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.runtime.capacity")
    monkeypatch.setenv("HASHNET_WAIT_S", "60")
    gpus = [kind("gpu", {"CPU": 8, "GPU": 2}, 1)]
    monkeypatch.setattr(capacity.time, "sleep", lambda s: invented([CPUS, GPUS], gpus))
    invented([CPUS], gpus)
    capacity.require("train", [Need("worker", 2, {"CPU": 1, "GPU": 1})])
    assert caplog.messages[-1] == "waiting for the autoscaler (0s so far): 2 × worker {CPU 1, GPU 1}"
    assert requested == [([{"CPU": 1, "GPU": 1}] * 2, "PACK")]


@pytest.mark.parametrize("wrong", ["soon", "nan", "inf", "-1"])
def test_a_wait_that_is_not_a_number_of_seconds(invented, monkeypatch, wrong):
    invented([CPUS])
    monkeypatch.setenv("HASHNET_WAIT_S", wrong)
    with pytest.raises(ConfigError, match=f"HASHNET_WAIT_S must be a number of seconds, got '{wrong}'"):
        capacity.require("train", [])


def test_memory_that_a_type_does_not_state_is_no_limit_of_nodes_to_come(invented, requested):
    need = Need("slice", 3, {"CPU": 1, "memory": 64e9})
    invented([HEAD], [kind("cpu", {"CPU": 2}, 2)])
    assert "did not add nodes for 3 × slice" in refusal([need])
    invented([HEAD], [kind("cpu", {"CPU": 2, "memory": 32e9}, 2)])
    assert "but 0 can fit" in refusal([need])
    invented([CPUS])  # a node that is up states what it has
    assert "but 0 can fit" in refusal([need])
    invented([HEAD], [kind("cpu", {"CPU": 2}, 2)])
    assert "but 0 can fit" in refusal([Need("w", 1, {"TPU": 1})])


def test_memory_is_shown_where_a_need_names_it(invented):
    invented([Node("a", {"CPU": 4, "memory": 4e9, "object_store_memory": 1e9})])
    message = refusal([Need("slice", 1, {"CPU": 1, "memory": 8e9})], "index")
    assert "slice {CPU 1, memory 8 GB}" in message
    assert message.endswith("the largest a {CPU 4, memory 4 GB}")
    assert "memory" not in refusal([Need("slice", 1, {"CPU": 8})], "index")


def test_addable_nodes_from_the_environment_less_those_there_are(monkeypatch):
    monkeypatch.setenv(capacity.NODE_TYPES, json.dumps([kind("gpu", {"CPU": 8, "GPU": 2}, 3)]))
    assert [(k.name, k.count) for k in capacity.addable([HEAD, GPUS, CPUS])] == [("gpu", 2)]
    assert capacity.addable([HEAD, GPUS, GPUS, GPUS]) == []
    monkeypatch.setenv(capacity.NODE_TYPES, "gpu=3")
    with pytest.raises(ConfigError, match="HASHNET_NODE_TYPES must be JSON like"):
        capacity.addable([])


def test_addable_nodes_from_what_ray_up_leaves_on_the_head(monkeypatch, tmp_path):
    (tmp_path / "bootstrap.yaml").write_text(
        "max_workers: 5\nhead_node_type: head\navailable_node_types:\n"
        "  head: {resources: {CPU: 0}, max_workers: 0}\n"
        "  cpu: {resources: {CPU: 4}, max_workers: 3}\n  gpu: {resources: {CPU: 8, GPU: 1}}\n"
    )
    monkeypatch.setattr(capacity, "BOOTSTRAP", str(tmp_path / "bootstrap.yaml"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert [(k.name, k.count) for k in capacity.addable([HEAD, CPUS])] == [("cpu", 2), ("gpu", 5)]


def test_a_ray_started_here_refuses_at_once_and_a_cluster_gives_a_node_time_to_join(invented, monkeypatch):
    slept = []
    monkeypatch.setattr(capacity.time, "sleep", lambda s: slept.append(s) or invented([CPUS, GPUS]))
    need = Need("worker", 1, {"GPU": 1})
    invented([CPUS])
    assert "but 0 can fit" in refusal([need])
    assert slept == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    capacity.require("train", [need])
    assert slept == [0.5]


def test_what_others_hold_is_reported_once(invented, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.runtime.capacity")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    invented([GPUS], free={"CPU": 3.0})
    capacity.require("train", [Need("worker", 2, {"CPU": 2, "GPU": 1}, at_least=1)])
    assert caplog.messages[-1] == "busy: 2 of 2 GPU in use; this starts when there is room"
    capacity.require("train", [Need("worker", 3, {"CPU": 1})])
    assert caplog.messages[-1].startswith("plan: ")


def test_decoding_prefers_the_cpu_pool_where_there_is_one(invented):
    invented([GPUS, CPUS])
    assert capacity.on_cpu_nodes() == {}
    invented([GPUS, Node("cpu-1", {"CPU": 4}, {"hashnet.io/pool": "cpu"})])
    assert capacity.on_cpu_nodes()["label_selector"] == {"hashnet.io/pool": "cpu"}


def test_encoding_requests_the_gpus_that_its_rows_keep_busy(invented):
    """Of a pool without a maximum, one per 65,536 rows; what is up already is used in any case."""
    unbounded = kind("gpu", {"CPU": 8, "GPU": 2}, 10_000)
    invented([HEAD, CPUS], [unbounded], free={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "_wait", lambda needs, wait_s: None)
        actors = [pipeline.reserve_actors(None, 1, rows) for rows in (100, 200_000, 10**9)]
        assert actors == [1, 4, pipeline.MAX_NEW_ACTORS]
        assert pipeline.reserve_actors(300, 1, 100) == 300
    invented([HEAD, GPUS], [unbounded])
    assert pipeline.reserve_actors(None, 1, 100) == 2


def test_choosing_the_engine_needs_no_more_than_the_check_found_room_for(monkeypatch, caplog):
    """And a cluster that is busy is reported while the worker is waited for."""
    requested, waits = [], iter([False, True])

    def remote(**options):
        requested.append(options)
        return lambda function: SimpleNamespace(remote=lambda *_: ("cuda", "as requested"))

    caplog.set_level(logging.INFO, "cluster.encode.pipeline")
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []) if next(waits) else ([], refs))
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    assert pipeline.engine_of_workers("cuda", None, "image", 0.5) == "cuda"
    assert (requested[0]["num_cpus"], requested[0]["num_gpus"]) == (ACTOR_CPUS, 0.5)
    assert caplog.messages[0] == "waiting for room: a worker of {GPU 0.5}, to choose the engine"


def test_counting_on_a_gpu_waits_for_one_or_is_refused(invented, requested):
    """device=cuda never runs without: tasks would end with `torch finds no GPU`."""

    def count():
        evaluation = Evaluation(store=None, codes=None, labels=None, k=10, seed=0, device="cuda")
        next(run_ranges(evaluation, [(0, 1)], [(0,)]))

    invented([HEAD, CPUS], [kind("gpu", {"CPU": 8, "GPU": 1}, 1)])
    with pytest.raises(ClusterError, match=r"did not add nodes for 1 × counter \{CPU 1, GPU 1\}"):
        count()
    invented([HEAD, CPUS])
    with pytest.raises(ClusterError, match=r"0 can fit: use device=cpu"):
        count()


CELLS = [Cell("main", method, 16, 0) for method in ("lsh", "hashnet", "dhn")]


def test_deep_cells_that_request_a_gpu_are_refused_where_there_is_none(invented):
    invented([CPUS])
    message = refusal(cell_needs(CELLS, CellResources(cpus=2), gpu=True), "compare")
    assert message.startswith("compare needs 1 × deep cell {CPU 2, GPU 1}, but 0 can fit: give device=cpu")
    capacity.require("compare", cell_needs(CELLS, CellResources(cpus=2), gpu=False))


def test_cells_take_turns_on_a_node_that_holds_one(invented):
    invented([Node("gpu", {"CPU": 1, "GPU": 1})])
    capacity.require("compare", cell_needs(CELLS, CellResources(cpus=1), gpu=True))


@pytest.mark.parametrize(
    ("now", "more", "free", "options", "expected"),
    [
        ([HEAD], [kind("gpu", {"CPU": 6, "GPU": 1}, 2)], 0, {}, {"CPU": 6, "GPU": 1}),
        ([HEAD, CPUS], [kind("gpu", {"CPU": 64, "GPU": 4}, 1)], 4, {}, {"CPU": 8, "GPU": 1}),
        ([HEAD, GPUS], [kind("gpu", {"CPU": 64, "GPU": 8}, 1)], 8, {}, {"CPU": 4, "GPU": 1}),
        ([HEAD], [kind("cpu", {"CPU": 8}, 1)], 0, {}, {"CPU": 4}),
        ([CPUS], [], 4, {}, {"CPU": 2}),
        ([CPUS], [], 0, {}, {"CPU": 1}),  # all in use: no more than there must be
        ([CPUS], [], 4, {"num_workers": 9}, {"CPU": 1}),  # refused later, by what is missing
        ([CPUS], [], 4, {"cpus_per_worker": 3}, {"CPU": 3}),
    ],
)
def test_cpus_of_a_training_worker(invented, now, more, free, options, expected):
    invented(now, more, {"CPU": free})
    assert worker_resources(TrainConfig(**{"run": "/r", "num_workers": 2} | options)) == expected
