"""Server: starts a run's server on Ray Serve and stops it again."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cluster.runtime import capacity, connection, ray_internals
from cluster.serve import proxy
from cluster.serve.deployment import build, needs
from hashnet.errors import ClusterError, ConfigError
from hashnet.server import READ_TOKEN, WRITE_TOKEN, Access, ServeConfig, ServedRun, is_loopback

log = logging.getLogger(__name__)

NAME = "hashnet"  # of the Serve application
QUIET = {"RAY_SERVE_LOG_TO_STDERR": "0", "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100"}


def serve_run(config: ServeConfig, when_up: Callable[[str], object] | None = None) -> dict[str, Any]:
    """Serves until interrupted; returns run, url and seconds served. ``when_up`` gets the page's address."""
    with Server(config) as server:
        print(server.welcome(), file=sys.stderr, flush=True)
        if when_up is not None:
            when_up(f"{config.url}/")
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
        for name, value in (QUIET | {proxy.CALLBACK: proxy.PATH}).items():
            os.environ.setdefault(name, value)
        with _without_tokens():
            connection.connect()
        capacity.require("serve", needs(self.config, self.served))
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        running = self._serve_is_running()
        if running and (others := serve.status().applications):
            raise ClusterError(
                f"Ray Serve serves {', '.join(others)} in this cluster already; stop that first (Ctrl-C "
                "where it was started, or: serve shutdown), or serve without RAY_ADDRESS on another port: "
                "port=8001"
            )
        try:
            if not running:
                self._start_serve(serve)
            serve.run(
                build(self.config, self.served, self.access),
                name=NAME,
                route_prefix="/",
                blocking=False,
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
        served, url = self.served, self.config.url
        accepts = {"image": "pictures, ", "features": "features, "}.get(served.modality or "", "")
        token = ' -H "authorization: Bearer $HASHNET_TOKEN"' if self.access.read else ""
        lines = [
            f"serving {served.size:,} codes of {served.n_bits} bits ({served.kind}): "
            f"search by {accepts}codes and ids",
            f"  {url}/",
            "try",
            f"  curl{token} {url}/v1/info",
        ]
        if served.modality == "image":
            lines.append(f"  hashnet query PICTURE --url {url} -k 10")
        lines += [
            f"  hashnet query --id {self._some_id()} --url {url}",
            f"writing is {'on' if self.access.write else 'off (set HASHNET_WRITE_TOKEN to turn it on)'}",
            "Ctrl-C stops it",
        ]
        return "\n".join(lines)

    def _some_id(self) -> int:
        items = replace(self.served, manifest=None).open_items()
        found = items.sample(1) if items is not None else []
        return found[0] if found else 0

    def _serve_is_running(self) -> bool:
        """Whether Serve's HTTP server is running; refuses one that listens on another address."""
        config, client = self.config, ray_internals.serve_client()
        if client is None:
            if is_loopback(config.host):
                _refuse_taken_port(config.address, config.port)
            return False
        found = client.http_config
        if (found.host, found.port) != (config.address, config.port):
            raise ClusterError(
                f"Ray Serve listens on {found.host}:{found.port} in this cluster already; serve there "
                f"(host={found.host} port={found.port}), or stop it first: serve shutdown"
            )
        return True

    def _start_serve(self, serve: Any) -> None:
        from ray.serve.config import HTTPOptions, ProxyLocation

        config = self.config
        self._owns_serve = True
        options = HTTPOptions(
            host=config.address,
            port=config.port,
            request_timeout_s=config.timeout_s + 10,  # the application's own limit comes first
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        location = ProxyLocation.HeadOnly if is_loopback(config.host) else ProxyLocation.EveryNode
        serve.start(proxy_location=location, http_options=options, logging_config=_serve_logging())


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


def _serve_logging() -> Any:
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(enable_access_log=False, log_level="WARNING")  # the middleware logs requests


def _refuse_taken_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} is in use on {host} ({error.strerror}); choose another: port=8001"
            ) from error
