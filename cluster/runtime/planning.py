"""A plan of what goes where: workers of given sizes onto nodes of given sizes. Pure; Ray is not asked.

>>> node = Node("gpu-1", {"CPU": 8, "GPU": 1})
>>> print(plan("encode", [Need("encoder", 2, {"CPU": 1, "GPU": 0.5})], [node]))
plan: encode on 1 node
  encoder  2 × {CPU 1, GPU 0.5}  →  gpu-1 ×2
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from cluster.runtime.nodes import COUNTED, Node, NodeType, describe
from hashnet.errors import ClusterError

STRATEGIES = ("pack", "spread", "strict_spread")


@dataclass(frozen=True)
class Need:
    """``count`` workers that need ``resources`` each; ``at_least`` (default: all) must be placed.

    ``strategy``: pack (few nodes), spread (many nodes), strict_spread (a node each, as Ray's
    STRICT_SPREAD). ``fix`` is what a user changes to ask for less.
    """

    name: str
    count: int
    resources: Mapping[str, float]
    at_least: int | None = None
    strategy: str = "pack"
    fix: str = ""

    @property
    def minimum(self) -> int:
        return self.count if self.at_least is None else min(self.at_least, self.count)


@dataclass
class Plan:
    """Where each need goes: ``placed[need][node]`` counts, ``coming`` the same on nodes to be added."""

    stage: str
    needs: Sequence[Need]
    nodes: Sequence[Node]
    placed: dict[str, dict[str, int]] = field(default_factory=dict)
    coming: dict[str, dict[str, int]] = field(default_factory=dict)

    def here(self, need: Need) -> int:
        """How many fit on the nodes there are."""
        return sum(self.placed.get(need.name, {}).values())

    def later(self, need: Need) -> int:
        """How many more fit on nodes an autoscaler may add."""
        return sum(self.coming.get(need.name, {}).values())

    @property
    def ready(self) -> bool:
        """Whether every minimum fits on the nodes there are."""
        return all(self.here(need) >= need.minimum for need in self.needs)

    @property
    def possible(self) -> bool:
        """Whether every minimum fits once the autoscaler has added what it may."""
        return all(self.here(need) + self.later(need) >= need.minimum for need in self.needs)

    def __str__(self) -> str:
        lines = [f"plan: {self.stage} on {_plural(len(self.nodes), 'node')}{self._head()}"]
        width = max((len(need.name) for need in self.needs), default=0)
        for need in self.needs:
            where = [f"{name} ×{n}" for name, n in self.placed.get(need.name, {}).items()]
            where += [f"new {name} ×{n}" for name, n in self.coming.get(need.name, {}).items()]
            missing = need.count - self.here(need) - self.later(need)
            if missing:
                enough = self.here(need) + self.later(need) >= need.minimum
                fewest = f" ({need.minimum} is enough)" if need.minimum else ""
                where.append(f"{missing} when there is room{fewest}" if enough else f"{missing} missing")
            what = f"{need.count} × {describe(need.resources)}"
            lines.append(f"  {need.name.ljust(width)}  {what}  →  {_shorten(where)}")
        return "\n".join(lines)

    def _head(self) -> str:
        takes_none = any(n.is_head and not any(n.resources.get(r) for r in COUNTED) for n in self.nodes)
        return " (the head takes no work)" if takes_none else ""


def plan(stage: str, needs: Sequence[Need], now: Sequence[Node], more: Sequence[NodeType] = ()) -> Plan:
    """A plan over given nodes, without asking Ray: minimums first, then the rest while it fits.

    Workers without a GPU go to nodes without one while those have room, like Ray's own scheduler
    does.
    """
    for need in needs:
        if need.strategy not in STRATEGIES:
            raise ClusterError(f"strategy must be one of {', '.join(STRATEGIES)}, got {need.strategy!r}")
    result = Plan(stage, needs, now)
    rooms = [_Room(node.name, dict(node.resources)) for node in now]
    spare = {kind.name: kind for kind in more}
    left = {kind.name: kind.spare for kind in more}
    scarce_first = sorted(
        needs, key=lambda need: (-need.resources.get("GPU", 0), -sum(need.resources.values()))
    )
    rounds = [(need, need.minimum) for need in scarce_first]
    rounds += [(need, need.count - need.minimum) for need in scarce_first]
    for need, wanted in rounds:
        # The best room is on top; one that is full for this need never comes back.
        open_rooms = [(_cost(need, room), place) for place, room in enumerate(rooms)]
        heapify(open_rooms)
        while wanted:
            if open_rooms:
                _, place = heappop(open_rooms)
            else:
                kind = _grow(need, [spare[name] for name, n in left.items() if n])
                if kind is None:
                    break
                left[kind.name] -= 1
                place = len(rooms)
                rooms.append(_new_room(kind))
            room = rooms[place]
            if not room.fits(need):
                continue
            room.take(need)
            wanted -= 1
            table = (result.coming if room.is_new else result.placed).setdefault(need.name, {})
            table[room.name] = table.get(room.name, 0) + 1
            heappush(open_rooms, (_cost(need, room), place))
    return result


@dataclass
class _Room:
    """What is left on one node while a plan is made."""

    name: str
    free: dict[str, float]
    is_new: bool = False
    holds: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_gpu = self.free.get("GPU", 0) > 0

    def fits(self, need: Need) -> bool:
        if need.strategy == "strict_spread" and self.holds.get(need.name):
            return False
        # Ray counts in ten-thousandths; so do we, or three thirds would not make one.
        return all(round(self.free.get(r, 0), 4) >= round(n, 4) for r, n in need.resources.items())

    def take(self, need: Need) -> None:
        for name, amount in need.resources.items():
            self.free[name] = round(self.free.get(name, 0) - amount, 4)
        self.holds[need.name] = self.holds.get(need.name, 0) + 1


def _cost(need: Need, room: _Room) -> tuple:
    """The smaller, the better the room."""
    sign = -1 if need.strategy == "pack" else 1
    wastes_gpu = room.has_gpu and not need.resources.get("GPU")
    return room.is_new, wastes_gpu, sign * room.holds.get(need.name, 0)


def _grow(need: Need, kinds: list[NodeType]) -> NodeType | None:
    """The leanest kind of node a worker fits on."""
    fitting = [kind for kind in kinds if _new_room(kind).fits(need)]
    return min(fitting, key=lambda k: (k.resources.get("GPU", 0), k.resources.get("CPU", 0)), default=None)


def _new_room(kind: NodeType) -> _Room:
    """A node to be added. Memory that its type does not state is no limit: Ray finds it on the node."""
    return _Room(kind.name, {"memory": math.inf, **kind.resources}, is_new=True)


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _shorten(where: list[str]) -> str:
    """At most eight places; a cluster of a hundred nodes must not print a page."""
    return ", ".join(where[:8]) + (f" and {len(where) - 8} more nodes" if len(where) > 8 else "") or "nowhere"
