"""Keeps an eye on the nodes while a job runs, and says afterwards which came and went.

``session.connect`` starts it when it joins a cluster; ``job.run_job`` puts its summary into the
result. A node that goes, be it lost, taken back or idle and no longer paid for, costs what ran on it, which
Ray does again elsewhere: the line and the count are for the person who wonders why a run took longer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from cluster.runtime import nodes
from hashnet.io import duration

logger = logging.getLogger(__name__)
EVERY_S = 2.0


class Watch(threading.Thread):
    """Compares the nodes that are up with those of a moment ago, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="node-watch", daemon=True)
        self._ending = threading.Event()
        self._since = time.monotonic()
        self._now = {node.id: node.name for node in nodes.alive()}
        self._most = len(self._now)
        self.events: list[dict[str, Any]] = []

    def run(self) -> None:
        while not self._ending.wait(EVERY_S):
            self._try_to_look()

    def _try_to_look(self) -> None:
        try:
            self.look()
        except Exception as error:  # a cluster that is going away must not add a stack trace
            logger.debug("nodes could not be listed: %s", error)

    def look(self) -> None:
        """Notes what changed since the last look."""
        found = {node.id: node.name for node in nodes.alive()}
        if not found:
            return
        after = duration(time.monotonic() - self._since)
        for gone in self._now.keys() - found.keys():
            self.events.append({"event": "lost", "node": self._now[gone], "after": after})
            logger.warning(
                "node %s left after %s; what ran there, if anything, is done again elsewhere",
                self._now[gone],
                after,
            )
        for new in found.keys() - self._now.keys():
            self.events.append({"event": "joined", "node": found[new], "after": after})
            logger.info("node %s joined after %s", found[new], after)
        self._now, self._most = found, max(self._most, len(found))

    def stop(self) -> dict[str, Any]:
        """Ends the watch after a last look: most nodes at once, how many left (``lost``) and joined, when."""
        self._ending.set()
        if self.is_alive():
            self.join()
        self._try_to_look()
        lost = sum(event["event"] == "lost" for event in self.events)
        summary: dict[str, Any] = {"nodes": self._most, "lost": lost, "joined": len(self.events) - lost}
        return summary | ({"events": self.events[:20]} if self.events else {})
