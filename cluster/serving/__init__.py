"""Serving a run over HTTP: ``serve_run`` blocks until interrupted, ``Server`` is the same as a block.

config.py    settings and bounds            guard.py    tokens, bounds, headers, log of every request
opening.py   a run's parts, checked         app.py      routes; reading.py, schemas.py what they take
run.py       start and stop on Ray Serve    backend.py  what routes ask for
replicas.py  the processes                  index_holder.py, encoder_holder.py  what is inside them
"""

from cluster.serving.config import ServeConfig
from cluster.serving.run import Server, serve_run

__all__ = ["ServeConfig", "Server", "serve_run"]
