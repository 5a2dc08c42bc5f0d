"""The connection to Ray, without its noise: the cluster in RAY_ADDRESS, or a Ray started here on loopback."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.runtime import ray_internals
from hashnet.errors import ClusterError

if TYPE_CHECKING:
    from cluster.runtime.node_monitor import NodeChanges, NodeMonitor

CHECKOUT = str(Path(__file__).resolve().parents[2])

QUIET = {  # set before ray is imported; a user's own setting wins
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's own note about CUDA_VISIBLE_DEVICES
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",  # Progress shows rate and time left
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints each progress line twice
    "RAY_DEDUP_LOGS": "1",
    # Every second Ray Train queries a dashboard that a local Ray does not start, and warns about the failure.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "Failed to query Ray Train Controller|'PreemptionWatcher' and ID",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # Not about noise: on a busy machine Serve's proxy may need more than 5 s to start, and would be killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

# Without this Ray turns 127.0.0.1 into the machine's outward address and listens on every interface.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# A Ray that starts here has no dashboard. Ray Train looks for one all the same, and prints a stack trace if
# it finds that of a second Ray on the machine, say of a server in another shell. Nothing listens here.
NO_DASHBOARD = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"}

ANSWER_S = 10.0  # a cluster that is up answers within this

_monitor: NodeMonitor | None = None


def connect(num_cpus: int | None = None, object_store_memory: int | None = None) -> None:
    """Connects once to the cluster in RAY_ADDRESS, which a submitted job has; else starts Ray here.

    ``num_cpus`` and ``object_store_memory`` (bytes) are those of a Ray that starts here.
    """
    global _monitor
    address = os.environ.get("RAY_ADDRESS")
    for name, value in (QUIET if address else QUIET | LOOPBACK | NO_DASHBOARD).items():
        os.environ.setdefault(name, value)
    import ray

    from cluster.runtime.node_monitor import NodeMonitor

    if ray.is_initialized():
        return
    ray_internals.quiet_authentication()
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    options = {"logging_level": logging.WARNING, "log_to_driver": True}
    on_terminate = signal.getsignal(signal.SIGTERM)
    if address:
        try:
            ray_internals.refuse_silent_address(address, ANSWER_S)
            ray.init(address=address, **options)
        except (ValueError, ConnectionError) as error:
            raise ClusterError(
                f"RAY_ADDRESS={address} does not lead to a Ray cluster ({str(error).splitlines()[0]}); give "
                "HEAD:6379, ray://HEAD:10001 or auto, or unset it to start Ray here. http://HEAD:8265 is "
                "for `ray job submit`, in RAY_API_SERVER_ADDRESS"
            ) from error
        _monitor = NodeMonitor()  # nodes of a cluster come and go; this machine's only one does not
        _monitor.start()
    else:
        # Workers of a Ray that starts here inherit this environment, and find hashnet and cluster by it.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if CHECKOUT not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join([CHECKOUT, *filter(None, paths)])
        ray_internals.read_loopback_setting_again()  # ray may have been imported before LOOPBACK was set
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=num_cpus,
            object_store_memory=object_store_memory,
            _node_ip_address="127.0.0.1",
            **options,
        )
    if on_terminate != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)  # ray.init replaced the job's handler
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.WARNING)


def node_changes() -> NodeChanges | None:
    """Nodes that left and joined since ``connect`` joined a cluster; None for a Ray that was started here."""
    return _monitor.stop() if _monitor is not None else None


def resources() -> dict[str, float]:
    """The cluster's total resources: CPU, GPU, memory, and custom ones."""
    import ray

    return ray.cluster_resources()
