"""Serving a run over HTTP: ``serve_run`` blocks until interrupted, ``Server`` is the same as a block.

config       settings, bounds, tokens        guard     tokens, bounds, headers, log of every request
opening      a run's parts, checked          app       routes; page, reading, schemas, describe are its parts
run          start and stop on Ray Serve     backend   what routes ask for; ray_backend sends it, as asks, to
application  which processes, how many       replicas  the processes, which hold
service      by Serve's config files                   index_holder, encoder_holder, writer
proxy        when no process answers         meter     counters of all HTTP processes
"""

from cluster.serving.config import ServeConfig
from cluster.serving.run import Server, serve_run

__all__ = ["ServeConfig", "Server", "serve_run"]
