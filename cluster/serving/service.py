"""The application for a Serve that an operator keeps running, from a Serve config file:

    applications:
      - name: hashnet
        import_path: cluster.serving.service:application
        route_prefix: /
        args: {run: s3://bucket/runs/demo, index_replicas: 2}     # the keys of jobs/serve.py

Where it listens is said there too (``http_options``) and taken to be reachable from other machines: the
environment of the Ray nodes must hold HASHNET_TOKEN.
"""

from __future__ import annotations

from typing import Any

from cluster.serving.application import build, hashed_tokens
from cluster.serving.config import ServeConfig
from cluster.serving.opening import look_over
from hashnet import config as configs


def application(args: dict[str, Any]) -> Any:
    """What Serve runs; ``args`` are checked like those of the job."""
    config = configs.from_dict(ServeConfig, {"host": "0.0.0.0"} | dict(args))
    return build(config, look_over(config), hashed_tokens(config.host))
