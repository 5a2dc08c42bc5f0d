"""What goes where, said before work starts; and whether it can ever run.

    needs = [
        Need("decode", 4, {"CPU": 1}, at_least=1),
        Need("encoder", 2, {"CPU": 1, "GPU": 0.5}, fix="lower num_actors"),
    ]
    placement.ensure("encode", needs)      # prints the plan; returns it, waits, or raises ClusterError

A stage calls ``ensure`` once, after ``connection.connect`` and before it starts anything. What the
cluster can never satisfy fails within seconds, with what the cluster has. What an autoscaler can
still add is waited for, with a line that says so, as many seconds as HASHNET_WAIT_S says (900).
``capacity`` counts how many workers of a size fit, for a pool sized by the cluster.

The head: give it no CPU and no GPU (`ray start --head --num-cpus=0 --num-gpus=0`, as ray_cluster.yaml does)
and no need with resources lands there. Ask for a CPU in every task and actor: Ray puts those that ask
for nothing anywhere, the head included.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.runtime import connection, nodes
from cluster.runtime.nodes import amount, describe
from cluster.runtime.planning import Need, Plan, plan
from hashnet.errors import ClusterError, ConfigError
from hashnet.io import duration

logger = logging.getLogger(__name__)

WAIT = "HASHNET_WAIT_S"
GRACE_S = 3.0  # a node that is just joining is waited for this long before a request fails
LINE_EVERY_S = 15.0


def capacity(resources: Mapping[str, float], include_addable: bool = False) -> int:
    """How many workers of that size the cluster's nodes hold at once when they hold nothing else."""
    connection.connect()
    now = nodes.alive()
    more = nodes.addable(now) if include_addable else []
    amounts = [(node.resources, 1) for node in now] + [(kind.resources, kind.spare) for kind in more]
    return sum(times * _fitting(offered, resources) for offered, times in amounts)


def _fitting(offered: Mapping[str, float], resources: Mapping[str, float]) -> int:
    counts = [int((offered.get(r, 0) + 1e-9) / n) for r, n in resources.items() if n > 0]
    return min(counts, default=0)


def ensure(stage: str, needs: Sequence[Need]) -> Plan:
    """Prints the plan and returns it once every minimum fits; ClusterError when it never will.

    Nodes the autoscaler may add are asked for and waited for, at most HASHNET_WAIT_S seconds. Whether what
    fits is free at the moment is said, and not waited for.
    """
    wait_s = _longest_wait()
    connection.connect()
    joining = bool(os.environ.get("RAY_ADDRESS"))  # no node joins a Ray started here
    now = nodes.alive()
    result = plan(stage, needs, now, nodes.addable(now))
    deadline = time.monotonic() + GRACE_S
    while joining and not result.possible and time.monotonic() < deadline:
        time.sleep(0.5)
        now = nodes.alive()
        result = plan(stage, needs, now, nodes.addable(now))
    logger.info("%s", result)
    if not result.possible:
        raise ClusterError(_refusal(result))
    if not result.ready:
        return _wait(result, wait_s)
    if joining and (taken := _taken(result)):
        logger.info("busy: %s; this starts when there is room", taken)
    return result


def _longest_wait() -> float:
    text = os.environ.get(WAIT, "900")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s < math.inf:
        raise ConfigError(f"{WAIT} must be a number of seconds, got {text!r}")
    return wait_s


def _taken(result: Plan) -> str:
    """What the minimum needs and the cluster does not have free; it may be this job's own last stage."""
    import ray

    least: dict[str, float] = {}
    for need in result.needs:
        for name, n in need.resources.items():
            least[name] = least.get(name, 0) + n * need.minimum
    free, whole = ray.available_resources(), connection.resources()
    short = [name for name, n in least.items() if round(free.get(name, 0), 4) < round(n, 4)]
    return ", ".join(
        f"{amount(name, whole.get(name, 0) - free.get(name, 0))} of {amount(name, whole.get(name, 0))} "
        f"{name} in use"
        for name in short
    )


def _refusal(result: Plan) -> str:
    sentences = []
    for need in result.needs:
        fit = result.here(need) + result.later(need)
        if fit < need.minimum:
            fix = f"{need.fix}, or add nodes" if need.fix else "ask for less, or add nodes"
            sentences.append(
                f"{result.stage} needs {need.minimum} × {need.name} of {describe(need.resources)}"
                f"{', each on its own node' if need.strategy == 'strict_spread' else ''}, "
                f"and {fit} can ever be placed: {fix}"
            )
    return "; ".join(sentences) + f". {_inventory(result)}"


def _inventory(result: Plan) -> str:
    named = {name for need in result.needs for name in need.resources}
    return f"The cluster has {', '.join(node.offering(named) for node in result.nodes) or 'no node'}"


def _wait(result: Plan, wait_s: float) -> Plan:
    """Asks the autoscaler by placement groups, which go away with this job whatever happens."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    asked = [
        placement_group([dict(need.resources)] * need.minimum, strategy=need.strategy.upper())
        for need in result.needs
        if need.minimum
    ]
    started = last_line = time.monotonic()
    logger.info("waiting for the autoscaler: %s", _missing(result))
    try:
        while not result.ready:
            waited = time.monotonic() - started
            if waited > wait_s:
                raise ClusterError(
                    f"the autoscaler did not bring the nodes for {_missing(result)} within "
                    f"{duration(wait_s)}; `ray status` says why, and {WAIT} (seconds) sets how long to wait. "
                    f"{_inventory(result)}"
                )
            time.sleep(1.0)
            now = nodes.alive()
            result = plan(result.stage, result.needs, now, nodes.addable(now))
            if time.monotonic() - last_line > LINE_EVERY_S:
                last_line = time.monotonic()
                logger.info("still waiting for the autoscaler (%s): %s", duration(waited), _missing(result))
    finally:
        if ray.is_initialized():
            for group in asked:
                remove_placement_group(group)
    logger.info("%s", result)
    return result


def _missing(result: Plan) -> str:
    short = [(need, need.minimum - result.here(need)) for need in result.needs]
    return ", ".join(f"{n} × {need.name} {describe(need.resources)}" for need, n in short if n > 0)


def on_cpu_nodes() -> dict[str, Any]:
    """Task options that put decoding on the CPU pool first, and elsewhere while that is full or gone.

    Give them to ``.options(**…)`` or to Ray Data's ``map_batches(**…)``. Pools are node labels
    (``hashnet.io/pool=cpu``); without such a node there is nothing to prefer.
    """
    connection.connect()
    if not any(node.labels.get(nodes.POOL) == "cpu" for node in nodes.alive()):
        return {}
    return {"label_selector": {nodes.POOL: "cpu"}, "fallback_strategy": [{"label_selector": {}}]}
