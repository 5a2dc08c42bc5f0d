"""Every use of Ray's private parts, in one place: a new version of Ray is checked here first."""

from __future__ import annotations

import sys


def log_folder() -> str | None:
    """The folder of Ray's own logs on this node; None as long as this process has no Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray._private.worker import _global_node  # the log folder has no public name

    return _global_node.get_logs_dir_path() if _global_node else None
