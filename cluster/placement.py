"""What goes where, said before work starts; and whether it can ever run.

    needs = [
        Need("decode", 4, {"CPU": 1}, at_least=1),
        Need("encoder", 2, {"CPU": 1, "GPU": 0.5}, fix="lower num_actors"),
    ]
    placement.ensure("encode", needs)      # prints the plan; returns it, waits, or raises ClusterError

A stage calls ``ensure`` once, after ``session.connect`` and before it starts anything. What the
cluster can never satisfy fails within seconds, with what the cluster has. What an autoscaler can
still add is waited for, with a line that says so. ``capacity`` counts how many workers of a size
fit, for a pool sized by the cluster.

The head: give it no CPU and no GPU (`ray start --head --num-cpus=0 --num-gpus=0`, as ray_cluster.yaml does)
and no need with resources lands there. Ask for a CPU in every task and actor: Ray puts those that ask
for nothing anywhere, the head included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster import nodes, session
from cluster.nodes import describe
from cluster.planning import Need, Plan, plan
from hashnet.errors import ClusterError
from hashnet.progress import duration

logger = logging.getLogger(__name__)

GRACE_S = 3.0  # a node that is just joining is waited for this long before a request fails
LINE_EVERY_S = 15.0


def capacity(resources: Mapping[str, float], include_addable: bool = False) -> int:
    """How many workers of that size the cluster's nodes hold at once when they hold nothing else."""
    session.connect()
    now = nodes.alive()
    more = nodes.addable(now) if include_addable else []
    amounts = [(node.resources, 1) for node in now] + [(kind.resources, kind.spare) for kind in more]
    return sum(times * _fitting(offered, resources) for offered, times in amounts)


def _fitting(offered: Mapping[str, float], resources: Mapping[str, float]) -> int:
    counts = [int((offered.get(r, 0) + 1e-9) / n) for r, n in resources.items() if n > 0]
    return min(counts, default=0)


def ensure(stage: str, needs: Sequence[Need], wait_s: float = 900.0) -> Plan:
    """Prints the plan and returns it once every minimum fits; ClusterError when it never will.

    Nodes the autoscaler may add are asked for and waited for, at most ``wait_s`` seconds.
    """
    session.connect()
    now = nodes.alive()
    result = plan(stage, needs, now, nodes.addable(now))
    deadline = time.monotonic() + GRACE_S
    while not result.possible and time.monotonic() < deadline:
        time.sleep(0.5)
        now = nodes.alive()
        result = plan(stage, needs, now, nodes.addable(now))
    logger.info("%s", result)
    if not result.possible:
        raise ClusterError(_refusal(result))
    return result if result.ready else _wait(result, wait_s)


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
    return f"The cluster has {', '.join(str(node) for node in result.nodes) or 'no node'}"


def _wait(result: Plan, wait_s: float) -> Plan:
    """Asks the autoscaler by a placement group, which goes away with this job whatever happens."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [dict(need.resources) for need in result.needs for _ in range(need.minimum)]
    spread = any(need.strategy == "strict_spread" for need in result.needs)
    asked = placement_group(bundles, strategy="SPREAD" if spread else "PACK")
    started = last_line = time.monotonic()
    logger.info("waiting for the autoscaler: %s", _missing(result))
    try:
        while not result.ready:
            waited = time.monotonic() - started
            if waited > wait_s:
                raise ClusterError(
                    f"the autoscaler did not bring the nodes for {_missing(result)} within "
                    f"{duration(wait_s)}; `ray status` says why. {_inventory(result)}"
                )
            time.sleep(1.0)
            now = nodes.alive()
            result = plan(result.stage, result.needs, now, nodes.addable(now))
            if time.monotonic() - last_line > LINE_EVERY_S:
                last_line = time.monotonic()
                logger.info("still waiting for the autoscaler (%s): %s", duration(waited), _missing(result))
    finally:
        if ray.is_initialized():
            remove_placement_group(asked)
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
    session.connect()
    if not any(node.labels.get(nodes.POOL) == "cpu" for node in nodes.alive()):
        return {}
    return {"label_selector": {nodes.POOL: "cpu"}, "fallback_strategy": [{"label_selector": {}}]}
