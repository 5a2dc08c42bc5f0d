"""A run served on Ray Serve: ``serve_run`` blocks until interrupted, ``Server`` is the same as a block."""

from cluster.serve.run import Server, serve_run

__all__ = ["Server", "serve_run"]
