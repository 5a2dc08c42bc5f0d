"""One quiet connection to Ray: the cluster in RAY_ADDRESS, or a Ray started here on loopback."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashnet.errors import ClusterError

if TYPE_CHECKING:
    from cluster.runtime.node_monitor import Watch

CHECKOUT = str(Path(__file__).resolve().parents[2])

QUIET = {  # set before ray is imported; a user's own setting wins
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's own note about CUDA_VISIBLE_DEVICES
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",  # ours say rate and time left
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints each progress line twice
    "RAY_DEDUP_LOGS": "1",
    # Ray Train asks a dashboard that a local Ray does not start, once a second, and warns about itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "Failed to query Ray Train Controller|'PreemptionWatcher' and ID",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # Not quiet but patient: a proxy that a busy machine starts in more than 5 s would be killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

# Without this Ray turns 127.0.0.1 into the machine's outward address and listens on every interface.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# A Ray that starts here has no dashboard. Ray Train asks for one all the same, and where it finds a second
# Ray on the machine, a server in another shell say, it prints a stack trace; here nobody answers.
NO_DASHBOARD = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"}

ANSWER_S = 10.0  # a cluster that is there answers within this

_watching: Watch | None = None


def connect(num_cpus: int | None = None, object_store_memory: int | None = None) -> None:
    """Connects once. A submitted job finds its cluster in RAY_ADDRESS; without it Ray starts here.

    ``num_cpus`` and ``object_store_memory`` (bytes) shape a Ray that starts here.
    """
    address = os.environ.get("RAY_ADDRESS")
    for name, value in (QUIET if address else QUIET | LOOPBACK | NO_DASHBOARD).items():
        os.environ.setdefault(name, value)
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        return
    # Token authentication comes on by itself, which is right and needs no warning each time.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    options = {"logging_level": logging.WARNING, "log_to_driver": True}
    on_terminate = signal.getsignal(signal.SIGTERM)
    if address:
        try:
            _refuse_silence(address)
            ray.init(address=address, **options)
        except (ValueError, ConnectionError) as error:
            raise ClusterError(
                f"RAY_ADDRESS={address} leads to no Ray cluster ({str(error).splitlines()[0]}); give "
                "HEAD:6379, ray://HEAD:10001 or auto, or unset it to start a Ray here. http://HEAD:8265 is "
                "for `ray job submit`, in RAY_API_SERVER_ADDRESS"
            ) from error
        _watch()
    else:
        # Workers of a Ray that starts here inherit this environment, and find hashnet and cluster by it.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if CHECKOUT not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join([CHECKOUT, *filter(None, paths)])
        name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR  # read again: ray may have been imported before this
        ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(name, False)
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=num_cpus,
            object_store_memory=object_store_memory,
            _node_ip_address="127.0.0.1",
            **options,
        )
    if on_terminate != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)  # ray.init put its own in place of a job's
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.WARNING)


def _refuse_silence(address: str) -> None:
    """ConnectionError where nothing at the address speaks gRPC: ray.init would wait for it without end."""
    import grpc
    from ray._private import grpc_utils, services  # they know what 127.0.0.1, auto and TLS mean to Ray

    scheme, _, where = address.rpartition("://")
    found = where if scheme else services.canonicalize_bootstrap_address(address)
    if scheme not in ("", "ray") or found is None:  # others are Ray's to explain; `local` starts one
        return
    with grpc_utils.init_grpc_channel(found) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"no Ray answers at {found}") from None


def _watch() -> None:
    """Starts noting which nodes come and go; a cluster's may, this machine's one does not."""
    global _watching
    from cluster.runtime.node_monitor import Watch

    _watching = Watch()
    _watching.start()


def what_happened() -> dict[str, Any] | None:
    """Nodes that were lost and joined since ``connect`` joined a cluster; None on a Ray of our own."""
    return _watching.stop() if _watching is not None else None


def resources() -> dict[str, float]:
    """What the cluster has in all: CPU, GPU, memory, and custom resources."""
    import ray

    return ray.cluster_resources()
