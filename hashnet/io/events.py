"""Structured events of workers and drivers: one JSON line each, with run and shard, in Ray's log folder.

    events.event("shard committed", run="demo", stage="encode", shard="codes-00017", rows=8192, seconds=0.4)

A process writes to its own ``hashnet-PID.jsonl`` in the folder of Ray's logs on its node, where
``ray logs cluster hashnet-*`` and the dashboard find them; they do not flood the driver's terminal.
Without Ray they go to the logger ``hashnet.events`` at level DEBUG. Give names, counts and seconds;
never contents, URIs with options, or anything from the environment.
"""

from __future__ import annotations

import json
import logging
import os
import time
from functools import lru_cache
from typing import IO, Any

logger = logging.getLogger("hashnet.events")


def log_folder() -> str | None:
    """The folder for event files; None means the logger alone. ``cluster.runtime`` replaces this function."""
    return None


def event(message: str, *, run: str = "", stage: str = "", shard: str = "", **more: Any) -> None:
    """Writes one event; never raises for a log folder that is full or gone."""
    fields = {
        "time": round(time.time(), 3),
        "event": message,
        "run": run,
        "stage": stage,
        "shard": shard,
    } | more
    line = json.dumps({name: value for name, value in fields.items() if value != ""}, default=str)
    logger.debug("%s", line)
    try:
        path = _path()
        if path is not None:
            _sink(path).write(line + "\n")
    except OSError as error:
        logger.warning("event not written: %s", error)


@lru_cache(maxsize=1)
def _sink(path: str) -> IO[str]:
    """An event file, line buffered, open as long as it is the one written to."""
    return open(path, "a", buffering=1)


def _path() -> str | None:
    """The event file of this process; None while there is no folder."""
    folder = log_folder()
    return os.path.join(folder, f"hashnet-{os.getpid()}.jsonl") if folder else None
