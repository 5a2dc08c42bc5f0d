"""A run served on Ray Serve, and an index sharded over Ray actors.

``serve_run`` serves until interrupted, ``Server`` is the same as a context manager, ``application`` is
what a Serve configuration file names, ``ShardedIndex`` holds a database beyond one machine.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from cluster.serve.deployment import application
    from cluster.serve.server import Server, serve_run
    from cluster.serve.sharded_index import ShardedIndex

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "deployment": ["application"],
        "server": ["Server", "serve_run"],
        "sharded_index": ["ShardedIndex"],
    },
)
