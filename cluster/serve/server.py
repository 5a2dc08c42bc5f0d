"""Server: starts a run's server on Ray Serve and stops it again."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.runtime import capacity, connection, ray_internals
from cluster.serve.deployment import LOGGING, build, needs
from hashnet.errors import ClusterError
from hashnet.io import events
from hashnet.server import (
    READ_TOKEN,
    WRITE_TOKEN,
    Access,
    ServeConfig,
    ServedRun,
    is_loopback,
    listen,
    welcome,
)

log = logging.getLogger(__name__)

NAME = "hashnet"  # of the Serve application
QUIET = {"RAY_SERVE_LOG_TO_STDERR": "0", "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100"}


def serve_run(config: ServeConfig) -> dict[str, Any]:
    """Serves until interrupted; returns run, url and seconds served."""
    with Server(config) as server:
        print(server.welcome(), file=sys.stderr, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopping …", file=sys.stderr, flush=True)
    return {"run": config.run, "url": config.url, "served_s": round(time.monotonic() - server.started, 1)}


class Server:
    """A running server. Leaving the ``with`` block stops it, and Serve too if it was started here."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.access = Access.from_environment(config.host)
        self.served = ServedRun.open(config)
        self.started = time.monotonic()
        self._owns_serve = False

    def __enter__(self) -> Server:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        with _without_tokens():
            connection.connect()
        capacity.require("serve", needs(self.config, self.served))
        capacity.require_shared(self.config.run)
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        running = ray_internals.serve_client() is not None
        if running and NAME in serve.status().applications:
            raise ClusterError(
                f"a server named {NAME} runs on this cluster already; stop that first (Ctrl-C where it was "
                "started, or: serve shutdown), or serve without RAY_ADDRESS on another port: port=8001"
            )
        if is_loopback(self.config.host):
            listen(self.config.address, self.config.port).close()  # refuses a port that is in use
        try:
            if not running:
                self._owns_serve = True
                serve.start(proxy_location="Disabled", logging_config=LOGGING)
            serve.run(
                build(self.config, self.served, self.access), name=NAME, route_prefix=None, blocking=False
            )
        except BaseException as error:
            reason = _start_error(serve) if isinstance(error, RuntimeError) else ""
            self.stop()
            if reason:
                raise ClusterError(f"the server did not start: {reason}") from error
            raise
        self.started = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the application after the requests in flight have been answered."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        if ray_internals.serve_client() is not None:
            serve.delete(NAME)
        if self._owns_serve and "RAY_ADDRESS" in os.environ:  # a Ray of this process ends with it
            serve.shutdown()

    def welcome(self) -> str:
        """What a person should know when the server is up."""
        return welcome(self.config, self.served, self.access, f"{events.log_folder()}/hashnet-*.jsonl")


@contextmanager
def _without_tokens() -> Iterator[None]:
    """Hides the tokens from a Ray that starts inside: it would pass them on to every worker."""
    kept = {name: os.environ.pop(name) for name in (READ_TOKEN, WRITE_TOKEN) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _start_error(serve: Any) -> str:
    """The last error line of a replica that could not start."""
    found = serve.status().applications.get(NAME)
    for title, deployment in found.deployments.items() if found else ():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        errors = [
            line for line in lines if line.partition(":")[0].endswith(("Error", "Mismatch", "Exception"))
        ]
        if errors:
            return f"{title}: {errors[-1].removeprefix('hashnet.errors.')}"
    return "Ray's serve logs say why"
