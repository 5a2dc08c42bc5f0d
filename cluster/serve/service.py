"""The server as Ray Serve's configuration files name it: for `serve deploy` and Kubernetes' RayService.

    applications:
      - name: hashnet
        import_path: cluster.serve.service:application
        args: {run: /mnt/hashnet/runs/demo}          # the keys of jobs/serve.py

Host and port belong to Serve there (``http_options``); the tokens come from every node's environment.
"""

from __future__ import annotations

from typing import Any

from cluster.serve.application import build, hashed_tokens
from hashnet.errors import ConfigError
from hashnet.io import config as configs
from hashnet.server import ServeConfig, look_over


def application(settings: dict[str, Any]) -> Any:
    """The Serve application; refused without HASHNET_TOKEN, since other machines can reach it."""
    mistakes = [
        f"{name} is Serve's to set there, in http_options; leave it out of args"
        for name in ("host", "port", "tls_cert", "tls_key")
        if name in settings
    ]
    if mistakes:
        raise ConfigError(mistakes)
    config = configs.from_dict(ServeConfig, {"host": "0.0.0.0", **settings})
    return build(config, look_over(config), hashed_tokens(config.host))
