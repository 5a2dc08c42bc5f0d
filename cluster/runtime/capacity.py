"""Whether the cluster can run a job: a check before work starts, a wait for the autoscaler, or a refusal.

    needs = [Need("decode", 4, {"CPU": 1}, at_least=1), Need("encoder", 2, {"CPU": 1, "GPU": 0.5})]
    capacity.require("encode", needs)      # returns when the minimum fits; waits, or raises ClusterError

What neither the nodes nor the autoscaler can provide is refused within seconds; nodes that the autoscaler
may add are requested and waited for, at most HASHNET_WAIT_S seconds (default 900). Where each task runs is
Ray's decision: every need is checked alone, and all minimums together against the cluster's totals.

Start the head without CPUs and GPUs, as ray_cluster.yaml does, and no task lands there. Request a CPU for
every task and actor: Ray places those that request nothing on any node, the head included.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.runtime import connection, ray_internals
from hashnet.errors import ClusterError, ConfigError
from hashnet.io import counted, duration, storage

logger = logging.getLogger(__name__)

WAIT = "HASHNET_WAIT_S"
NODE_TYPES = "HASHNET_NODE_TYPES"  # what the autoscaler may add; the Kubernetes files set it
NODE_TYPES_EXAMPLE = '[{"name": "gpu", "resources": {"CPU": 16, "GPU": 1}, "max": 8}]'
BOOTSTRAP = "~/ray_bootstrap_config.yaml"  # `ray up` leaves it on the head
POOL = "hashnet.io/pool"  # node label of this project: cpu or gpu
GRACE_S = 3.0  # a node may be about to join: a refusal waits this long
LINE_EVERY_S = 15.0
ANSWER_S = 60.0  # a busy node takes seconds to start a worker


@dataclass(frozen=True)
class Node:
    """A node and the resources it offers; or ``count`` equal nodes that the autoscaler may add."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    is_head: bool = False
    count: int = 1

    @property
    def shape(self) -> tuple[float, float]:
        return float(self.resources.get("CPU", 0)), float(self.resources.get("GPU", 0))


@dataclass(frozen=True)
class Need:
    """``count`` workers with ``resources`` each, of which ``at_least`` (default: all) must fit.

    ``one_per_node``: no two share a node, as with Ray's STRICT_SPREAD. ``fix``: what to change to need less.
    """

    name: str
    count: int
    resources: Mapping[str, float]
    at_least: int | None = None
    one_per_node: bool = False
    fix: str = "request less"

    @property
    def minimum(self) -> int:
        return self.count if self.at_least is None else min(self.at_least, self.count)

    def fitting(self, nodes: Iterable[Node]) -> int:
        """How many fit on these nodes when the nodes hold nothing else."""
        total = 0
        for node in nodes:
            ratios = [(node.resources.get(name, 0) + 1e-9) / n for name, n in self.resources.items() if n > 0]
            fit = math.floor(min(ratios, default=0))
            total += node.count * (min(fit, 1) if self.one_per_node else fit)
        return total

    def describe(self, count: int) -> str:
        spread = ", each on its own node" if self.one_per_node and count > 1 else ""
        return f"{count} × {self.name} {describe(self.resources)}{spread}"


def describe(resources: Mapping[str, float]) -> str:
    """Resources in a few words, CPUs and GPUs first.

    >>> describe({"GPU": 0.5, "memory": 8e9, "CPU": 2.0})
    '{CPU 2, GPU 0.5, memory 8 GB}'
    """
    names = sorted(
        (name for name in resources if resources[name]), key=lambda n: (n not in ("CPU", "GPU"), n)
    )
    return "{" + ", ".join(f"{name} {_amount(name, resources[name])}" for name in names) + "}"


def _amount(name: str, n: float) -> str:
    return f"{n / 1e9:.3g} GB" if name.endswith("memory") else f"{n:g}"


def workers_that_fit(resources: Mapping[str, float], include_addable: bool = False) -> int:
    """How many workers of this size the cluster holds at once when it holds nothing else."""
    connection.connect()
    now = nodes()
    return Need("worker", 1, resources).fitting([*now, *(addable(now) if include_addable else [])])


def require(stage: str, needs: Sequence[Need]) -> None:
    """Returns once the minimum of every need fits on the cluster's nodes; ClusterError when it never will.

    Resources that are in use are reported and not waited for: Ray queues the work until they are free.
    """
    wait_s = _longest_wait()
    connection.connect()
    joins = bool(os.environ.get("RAY_ADDRESS"))  # no node ever joins a Ray that was started here
    deadline = time.monotonic() + GRACE_S
    while True:
        now = nodes()
        possible = [*now, *addable(now)]
        if not (joins and too_large(needs, possible) and time.monotonic() < deadline):
            break
        time.sleep(0.5)
    runs = ", ".join(need.describe(need.count) for need in needs)
    logger.info("plan: %s runs %s; the cluster has %s", stage, runs, _inventory(needs, now))
    if refused := too_large(needs, possible):
        sentences = [
            f"{stage} needs {need.describe(need.minimum)}, but {need.fitting(possible)} can fit: {need.fix}"
            for need in refused
        ]
        raise ClusterError(f"{'; '.join(sentences)}, or add nodes. The cluster has {_inventory(needs, now)}")
    if too_large(needs, now):
        _wait(needs, wait_s)
    elif joins and (busy := _in_use(needs)):
        logger.info("busy: %s; this starts when there is room", busy)


def require_shared(folder: str) -> None:
    """ConfigError for a local folder that another node, with a disk of its own, does not see.

    Workers there would write where this process never looks. Checked on the nodes that are up and answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not storage.is_local(folder):
        return
    connection.connect()
    own = ray.util.get_node_ip_address()
    others = {
        record["NodeID"]: record.get("NodeName") or record["NodeManagerAddress"]
        for record in ray.nodes()
        if record["Alive"] and record["NodeManagerAddress"] != own and record["Resources"].get("CPU")
    }
    if not others:
        return
    probe = storage.join(folder, f".shared-{secrets.token_hex(8)}")
    storage.make_folder(folder)
    storage.write_bytes(probe, b"")
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(storage.exists)
        looks = {}
        for node, name in others.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            looks[look.options(scheduling_strategy=there).remote(probe)] = name
        unseen = []
        for answer in ray.wait(list(looks), num_returns=len(looks), timeout=ANSWER_S)[0]:
            with suppress(ray.exceptions.RayError):  # that node is about to leave
                unseen += [] if ray.get(answer) else [looks[answer]]
    finally:
        storage.delete(probe)
    if unseen:
        names = ", ".join(sorted(unseen)[:3]) + (" and others" if len(unseen) > 3 else "")
        raise ConfigError(
            [
                f"{folder} is on this node's own disk: {names} cannot see it; give a folder that all nodes "
                "share, or a URI such as s3://bucket/runs/demo"
            ]
        )


def too_large(needs: Sequence[Need], nodes: Sequence[Node]) -> list[Need]:
    """The needs whose minimum does not fit on these nodes; where each fits alone, all of them as one need."""
    alone = [need for need in needs if need.fitting(nodes) < need.minimum]
    if alone or not needs:
        return alone
    names = " + ".join(need.name for need in needs if need.minimum)
    fixes = ", ".join(dict.fromkeys(need.fix for need in needs if need.minimum))
    together = Need(f"{names} together", 1, _minimum(needs), fix=fixes)
    whole = {name: sum(n.count * n.resources.get(name, 0) for n in nodes) for name in together.resources}
    return [] if together.fitting([Node("all", whole)]) else [together]


def _minimum(needs: Sequence[Need]) -> dict[str, float]:
    """The resources that all minimums take together."""
    total: dict[str, float] = {}
    for need in needs:
        for name, n in need.resources.items():
            total[name] = total.get(name, 0) + n * need.minimum
    return total


def _inventory(needs: Sequence[Need], now: Sequence[Node]) -> str:
    """How many nodes take work, what they offer in all, and the largest of them."""
    working = sorted((node for node in now if any(node.shape)), key=lambda node: node.shape[::-1])
    if not working:
        return "no node that takes work"
    names = dict.fromkeys(["CPU", "GPU", *(name for need in needs for name in need.resources)])
    whole = {name: sum(node.resources.get(name, 0) for node in working) for name in names}
    largest = {name: working[-1].resources.get(name, 0) for name in names}
    head = "" if len(working) == len(now) else " (the head takes no work)"
    return (
        f"{counted(len(working), 'node')} with {describe(whole)}{head}, the largest {working[-1].name} "
        f"{describe(largest)}"
    )


def _longest_wait() -> float:
    text = os.environ.get(WAIT, "900")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s < math.inf:
        raise ConfigError(f"{WAIT} must be a number of seconds, got {text!r}")
    return wait_s


def _wait(needs: Sequence[Need], wait_s: float) -> None:
    """Requests nodes from the autoscaler by placement groups, which end with this job whatever happens."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    groups = [
        placement_group(
            [dict(need.resources)] * need.minimum, strategy="STRICT_SPREAD" if need.one_per_node else "PACK"
        )
        for need in needs
        if need.minimum
    ]
    started, last_line = time.monotonic(), -math.inf
    try:
        while missing := too_large(needs, now := nodes()):
            waited = time.monotonic() - started
            what = ", ".join(need.describe(need.minimum - need.fitting(now)) for need in missing)
            if waited > wait_s:
                raise ClusterError(
                    f"the autoscaler did not add nodes for {what} within {duration(wait_s)}; `ray status` "
                    f"says why, and {WAIT} (seconds) sets how long to wait. The cluster has "
                    f"{_inventory(needs, now)}"
                )
            if time.monotonic() - last_line > LINE_EVERY_S:
                last_line = time.monotonic()
                logger.info("waiting for the autoscaler (%s so far): %s", duration(waited), what)
            time.sleep(1.0)
    finally:
        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)


def _in_use(needs: Sequence[Need]) -> str:
    """What the minimum needs and is not free now; an earlier stage of this job may still hold it."""
    import ray

    free, whole = ray.available_resources(), connection.resources()
    short = [name for name, n in _minimum(needs).items() if round(free.get(name, 0), 4) < round(n, 4)]
    return ", ".join(
        f"{_amount(name, whole.get(name, 0) - free.get(name, 0))} of {_amount(name, whole.get(name, 0))} "
        f"{name} in use"
        for name in short
    )


def task(function: Callable[..., Any], *, cpus: float = 1, gpu: bool = False, max_retries: int = 3) -> Any:
    """``function`` as a Ray task; one that takes a GPU has a process of its own for each call.

    A process keeps the GPU that it started with: if reused, it would share that GPU with its next owner.
    """
    import ray

    on_gpu = {"num_gpus": 1, "max_calls": 1} if gpu else {}
    return ray.remote(num_cpus=cpus, max_retries=max_retries, **on_gpu)(function)


def on_cpu_nodes() -> dict[str, Any]:
    """Task options that prefer nodes of the CPU pool, and fall back to others while it is full or gone.

    Pass them to ``.options(**…)`` or to Ray Data's ``map_batches(**…)``. Empty where no node has the label
    ``hashnet.io/pool=cpu``.
    """
    connection.connect()
    if not any(node.labels.get(POOL) == "cpu" for node in nodes()):
        return {}
    return {"label_selector": {POOL: "cpu"}, "fallback_strategy": [{"label_selector": {}}]}


def nodes() -> list[Node]:
    """The nodes that are up, the head first, then by name."""
    import ray

    found, names = [], connection.node_names()
    for record in ray.nodes():
        if name := names.get(record["NodeID"]):
            resources = record["Resources"]
            is_head = "node:__internal_head__" in resources
            found.append(Node(name, resources, record.get("Labels") or {}, is_head))
    return sorted(found, key=lambda node: (not node.is_head, node.name))


def addable(now: Sequence[Node]) -> list[Node]:
    """What the autoscaler may add to the nodes there are ``now``; empty without an autoscaler.

    Known from HASHNET_NODE_TYPES, else from the file that `ray up` leaves on the head, else from Ray.
    """
    workers = [node.shape for node in now if not node.is_head]
    found = []
    for name, resources, most in _node_types():
        # A type that states no memory does not limit it: Ray measures it when the node is up.
        kind = Node(name, {"memory": math.inf, **resources})
        spare = most - workers.count(kind.shape)
        if any(kind.shape) and spare > 0:
            found.append(Node(name, kind.resources, count=spare))
    return found


def _node_types() -> list[tuple[str, dict[str, float], int]]:
    """(name, resources, most nodes) of each kind of worker node that the autoscaler knows."""
    text, bootstrap = os.environ.get(NODE_TYPES), Path(BOOTSTRAP).expanduser()
    if text:
        try:
            return [(str(t["name"]), dict(t["resources"]), int(t["max"])) for t in json.loads(text)]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{NODE_TYPES} must be JSON like {NODE_TYPES_EXAMPLE}, got {text!r} ({error})"
            ) from error
    if os.environ.get("RAY_ADDRESS") and bootstrap.exists():
        config = yaml.safe_load(bootstrap.read_text())
        most = int(config.get("max_workers", 0))
        return [
            (name, dict(kind.get("resources") or {}), min(int(kind.get("max_workers", most)), most))
            for name, kind in (config.get("available_node_types") or {}).items()
            if name != config.get("head_node_type")
        ]
    return ray_internals.node_types()
