"""What the cluster is made of now, and what its autoscaler may still add to it.

Nodes come from Ray. What may be added is known from, in this order: HASHNET_NODE_TYPES (JSON:
``[{"name": "gpu", "resources": {"CPU": 16, "GPU": 1}, "max": 8}]``, which the Kubernetes files
set), the file that `ray up` leaves on the head, or the limits a hosting platform told Ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hashnet.errors import ConfigError

NODE_TYPES = "HASHNET_NODE_TYPES"
BOOTSTRAP = "~/ray_bootstrap_config.yaml"  # `ray up` writes it on the head
POOL = "hashnet.io/pool"  # our node label: cpu or gpu
MEMORY = ("memory", "object_store_memory")  # in bytes
COUNTED = ("CPU", "GPU")  # shown and planned with, beside resources a need names itself


@dataclass(frozen=True)
class Node:
    """One node: a short name, all it offers to work, its labels, and whether it is the head."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    is_head: bool = False
    id: str = ""

    def __str__(self) -> str:
        return self.offering(())

    def offering(self, named: Collection[str]) -> str:
        """Its name and what it offers; memory and Ray's own resources only where they are ``named``."""
        shown = {name: n for name, n in self.resources.items() if name in named or not _internal(name)}
        return f"{self.name} {'(head) ' if self.is_head else ''}{describe(shown)}"


@dataclass(frozen=True)
class NodeType:
    """A kind of node that an autoscaler can start, ``spare`` times more than there are now."""

    name: str
    resources: Mapping[str, float]
    spare: int


def describe(resources: Mapping[str, float]) -> str:
    """What a node offers or a worker needs, in few words.

    >>> describe({"GPU": 0.5, "memory": 8e9, "CPU": 2.0})
    '{CPU 2, GPU 0.5, memory 8 GB}'
    """
    shown = [name for name in COUNTED if resources.get(name)]
    shown += sorted(name for name in resources if name not in COUNTED and resources[name])
    words = [f"{name} {amount(name, resources[name])}" for name in shown]
    return "{" + ", ".join(words) + "}" if words else "no work"


def amount(name: str, n: float) -> str:
    """So much of a resource, as a person says it."""
    return f"{n / 1e9:.3g} GB" if name in MEMORY else f"{n:g}"


def _internal(name: str) -> bool:
    return name in MEMORY or name.startswith(("node:", "accelerator_type:"))


def alive() -> list[Node]:
    """The nodes that are up, the head first, then by name."""
    import ray

    found = []
    for about in ray.nodes():
        if about["Alive"]:
            is_head = "node:__internal_head__" in about["Resources"]
            name = about.get("NodeName") or about["NodeManagerAddress"]
            if name == about["NodeManagerAddress"] and name.startswith("127."):
                name = f"node-{about['NodeID'][:4]}"  # several nodes on one loopback address
            found.append(Node(name, about["Resources"], about.get("Labels") or {}, is_head, about["NodeID"]))
    return sorted(found, key=lambda node: (not node.is_head, node.name))


def addable(now: list[Node]) -> list[NodeType]:
    """Kinds of nodes an autoscaler may add to those there are ``now``; empty without one."""
    given = os.environ.get(NODE_TYPES)
    if given:
        return _spare(_from_json(given), now)
    bootstrap = Path(BOOTSTRAP).expanduser()
    if os.environ.get("RAY_ADDRESS") and bootstrap.exists():
        return _spare(_from_bootstrap(yaml.safe_load(bootstrap.read_text())), now)
    return _spare(_from_ray(), now)


def _from_json(text: str) -> list[tuple[str, dict[str, float], int]]:
    try:
        return [(str(t["name"]), dict(t["resources"]), int(t["max"])) for t in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        example = '[{"name": "gpu", "resources": {"CPU": 16, "GPU": 1}, "max": 8}]'
        raise ConfigError(f"{NODE_TYPES} must be JSON like {example}, got {text!r} ({error})") from error


def _from_bootstrap(config: dict[str, Any]) -> list[tuple[str, dict[str, float], int]]:
    """Worker types of a `ray up` configuration with their resources and most nodes."""
    head, most = config.get("head_node_type"), int(config.get("max_workers", 0))
    return [
        (name, dict(about.get("resources") or {}), min(int(about.get("max_workers", most)), most))
        for name, about in (config.get("available_node_types") or {}).items()
        if name != head
    ]


def _from_ray() -> list[tuple[str, dict[str, float], int]]:
    from ray._private.state import state  # Ray Train and Ray Data read the same; nothing public does

    config = state.get_cluster_config()
    groups = config.node_group_configs if config else []
    unbounded = 10_000  # -1 there
    return [
        (
            group.name or "workers",
            dict(group.resources),
            unbounded if group.max_count < 0 else group.max_count,
        )
        for group in groups
    ]


def _spare(types: list[tuple[str, dict[str, float], int]], now: list[Node]) -> list[NodeType]:
    """Most nodes a type minus the workers of that shape there are."""
    result = []
    for name, resources, most in types:
        shape = {key: float(resources.get(key, 0)) for key in COUNTED}
        have = sum(
            {key: float(node.resources.get(key, 0)) for key in COUNTED} == shape
            for node in now
            if not node.is_head
        )
        if any(shape.values()) and most > have:
            result.append(NodeType(name, resources, most - have))
    return result
