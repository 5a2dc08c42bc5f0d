"""Records which nodes join and leave while a job runs.

``connection.connect`` starts it when it joins a cluster; ``job.run_job`` adds its summary to the result.
Ray repeats elsewhere what ran on a node that left, whether it failed, was reclaimed or was removed as idle:
the log line and the count explain why a run took longer.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from cluster.runtime import capacity
from hashnet.io import duration

logger = logging.getLogger(__name__)
EVERY_S = 2.0


@dataclass(frozen=True)
class NodeChanges:
    """The most nodes at once while a job ran, and who left (``lost``) or joined, in order."""

    nodes: int
    events: list[dict[str, str]]  # event: lost | joined, node, after

    def to_dict(self) -> dict[str, Any]:
        lost = sum(event["event"] == "lost" for event in self.events)
        counts = {"nodes": self.nodes, "lost": lost, "joined": len(self.events) - lost}
        return counts | ({"events": self.events[:20]} if self.events else {})


class NodeMonitor(threading.Thread):
    """Compares the nodes that are up with those of a moment ago, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="node-monitor", daemon=True)
        self._stopping = threading.Event()
        self._since = time.monotonic()
        self._now = {node.id: node.name for node in capacity.nodes()}
        self._most = len(self._now)
        self.events: list[dict[str, str]] = []

    def run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._try_update()

    def _try_update(self) -> None:
        try:
            self.update()
        except Exception as error:  # a cluster that is going away must not add a stack trace
            logger.debug("nodes could not be listed: %s", error)

    def update(self) -> None:
        """Records what changed since the last update."""
        found = {node.id: node.name for node in capacity.nodes()}
        if not found:
            return
        after = duration(time.monotonic() - self._since)
        for gone in self._now.keys() - found.keys():
            self.events.append({"event": "lost", "node": self._now[gone], "after": after})
            logger.warning(
                "node %s left after %s; Ray repeats elsewhere what ran there, if anything did",
                self._now[gone],
                after,
            )
        for new in found.keys() - self._now.keys():
            self.events.append({"event": "joined", "node": found[new], "after": after})
            logger.info("node %s joined after %s", found[new], after)
        self._now, self._most = found, max(self._most, len(found))

    def stop(self) -> NodeChanges:
        """What changed since the start; the monitor ends."""
        self._stopping.set()
        if self.is_alive():
            self.join()
        self._try_update()
        return NodeChanges(self._most, self.events)
