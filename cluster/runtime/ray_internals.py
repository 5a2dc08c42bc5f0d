"""Every use of Ray's private parts, in one place: a new version of Ray is checked here first."""

from __future__ import annotations

import logging
import sys
from typing import IO, Any


def log_folder() -> str | None:
    """The folder of Ray's own logs on this node; None as long as this process has no Ray."""
    if not connected():
        return None
    from ray._private.worker import _global_node  # the log folder has no public name

    return _global_node.get_logs_dir_path() if _global_node else None


def connected() -> bool:
    """Whether this process has a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def head_address() -> tuple[str, int] | None:
    """Host and port of the GCS, which keeps a cluster together; None without Ray or through its client."""
    import ray

    if not connected() or ray.util.client.ray.is_connected():
        return None
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host, int(port)


def read_loopback_setting_again() -> None:
    """Applies RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER as it is now: Ray reads it only when it is imported."""
    from ray._private import ray_constants

    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(name, False)


def quiet_authentication() -> None:
    """Silences the notice that token authentication turned itself on, which is as it should be."""
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


def record_output(log: IO[str]) -> None:
    """Sends Ray's log lines and the standard error of workers to ``log``; shows what workers print.

    Without it Ray shows all of them on the terminal. The autoscaler's lines are still shown.
    """
    from ray._private import worker

    shown = worker.print_worker_logs

    def print_worker_logs(lines: dict[str, Any], print_file: Any, ignore_prefix: bool = False) -> None:
        who = lines.get("pid")
        if not lines.get("lines"):
            return  # without its head, Ray hands on nothing, again and again
        if who == "autoscaler":
            shown(lines, print_file, ignore_prefix)
        elif who == "raylet" or print_file is not sys.stdout:
            name = lines.get("actor_name") or lines.get("task_name") or ""
            log.writelines(f"({name} pid={who}) {line}\n" for line in lines["lines"])
        else:
            print(*lines["lines"], sep="\n", file=sys.stderr, flush=True)

    worker.print_worker_logs = print_worker_logs
    for name in ("ray", "ray.data", "ray.train"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setStream(log)


def quiet_data_on_the_terminal() -> None:
    """Ray Data prints errors alone on the terminal; its log file keeps everything."""
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler).__name__ == "PlainRayHandler":
            handler.setLevel(logging.ERROR)


def send_arguments_with_actors() -> None:
    """Ray Data sends what an actor is made from with the request for it, not through the object store.

    There it could be lost with a node, and the actor could then not be restarted: Ray warns about it for
    every actor.
    """
    from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

    ActorPoolMapOperator._map_transformer_ref = property(lambda self: self._map_transformer)
    ActorPoolMapOperator._data_context_ref = property(lambda self: self.data_context)


def refuse_silent_address(address: str, timeout_s: float) -> None:
    """ConnectionError where nothing at the address speaks gRPC: ray.init would wait for it without end."""
    import grpc
    from ray._private import grpc_utils, services  # they know what 127.0.0.1, auto and TLS mean to Ray

    scheme, _, where = address.rpartition("://")
    found = where if scheme else services.canonicalize_bootstrap_address(address)
    if scheme not in ("", "ray") or found is None:  # others are Ray's to explain; `local` starts one
        return
    with grpc_utils.init_grpc_channel(found) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"no Ray answers at {found}") from None


def node_types() -> list[tuple[str, dict[str, float], int]]:
    """(name, resources, most nodes) of the node groups that a hosting platform told Ray it may add."""
    from ray._private.state import state  # Ray Train and Ray Data read the same; nothing public does

    config = state.get_cluster_config()
    unbounded = 10_000  # -1 there
    return [
        (
            group.name or "workers",
            dict(group.resources),
            group.max_count if group.max_count >= 0 else unbounded,
        )
        for group in (config.node_group_configs if config else [])
    ]


def inner_errors(error: BaseException) -> list[BaseException]:
    """The errors that Ray wrapped in this one: its cause, by any of the names that Ray gives it."""
    found = [error.__cause__, getattr(error, "cause", None), getattr(error, "_base_exc", None)]
    found += getattr(error, "worker_failures", {}).values()  # Ray Train's, one per rank
    return [inner for inner in found if isinstance(inner, BaseException)]


def leave_interrupts_alone(trainer: Any) -> None:
    """Ray Train would handle Ctrl-C itself, and choose the exit code."""
    trainer._register_sigint_handler = lambda controller: None


def torch_config(backend: str | None) -> Any:
    """Ray Train's settings of the workers' process group, which listens on the address that Ray uses.

    gloo listens on the address that the host's own name stands for. Debian and Ubuntu let that be
    127.0.1.1: workers on other hosts could not connect to it.
    """
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _TorchBackend

    class Backend(_TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            worker_group.execute(listen_on_node_address)
            super().on_start(worker_group, backend_config)

    class Config(TorchConfig):
        backend_cls = Backend

    return Config(backend=backend)


def listen_on_node_address() -> None:
    """Has gloo use the network interface of Ray's address in this process; a user's own setting wins."""
    import os

    import psutil  # Ray brings it
    import ray

    address = ray.util.get_node_ip_address()
    for interface, addresses in psutil.net_if_addrs().items():
        if address in (found.address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def serve_client() -> Any:
    """Ray's client of the Serve that runs in this cluster; None where there is none."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def forget_serve_client() -> None:
    """Makes Serve look for its controller again, for code that connects to another Ray in the same process.

    Serve 2.60 keeps its client while the job id is the same, and every local Ray calls its first job 01.
    """
    if (context := sys.modules.get("ray.serve.context")) is not None:
        context._disconnect()


def keep_replica_on_loopback() -> None:
    """Lets a Serve replica's own gRPC server listen on loopback where its node does.

    Serve 2.60 opens it on every interface whatever the node's address. Call it in the replica's constructor.
    """
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() == "127.0.0.1":
        listen = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, _: listen(server, "127.0.0.1:0")
