"""``hashnet serve RUN`` serves a run's index over HTTP on this machine, without Ray, until Ctrl-C."""

from __future__ import annotations

import argparse

from hashnet.errors import ConfigError
from hashnet.io import config as configs
from hashnet.server import ServeConfig, serve_standalone

EXAMPLES = """
examples:
  hashnet serve runs/demo
  hashnet serve runs/demo --workers 4 --port 8001 max_k=5000 timeout_s=60

Any address but loopback needs a token: HASHNET_TOKEN for reading. HASHNET_WRITE_TOKEN turns writing on.
`jobs/serve.py` serves on a Ray cluster.

settings (KEY=VALUE):
"""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.epilog = EXAMPLES + configs.describe(ServeConfig)
    parser.add_argument(
        "run_folder", metavar="RUN", help="run folder with index/ (codes/, model/, manifest.parquet)"
    )
    parser.set_defaults(settings=[])  # it takes them
    parser.usage = "hashnet serve RUN [--host HOST] [--port PORT] [--workers N] [KEY=VALUE …]"
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", help="port to listen on (default 8000)")
    parser.add_argument("--workers", metavar="N", help="processes that respond to requests (default 1)")


def run(arguments: argparse.Namespace) -> int:
    """Serves until interrupted."""
    words = [f"run={arguments.run_folder}", *arguments.settings]
    flags = {"host": arguments.host, "port": arguments.port, "replicas": arguments.workers}
    words += [f"{name}={value}" for name, value in flags.items() if value is not None]
    config = configs.with_absolute_paths(configs.load(ServeConfig, overrides=words))
    if config.slices is not None:
        raise ConfigError("slices= spreads an index over a Ray cluster: use jobs/serve.py")
    return serve_standalone(config)
