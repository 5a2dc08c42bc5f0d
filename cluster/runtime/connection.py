"""The connection to Ray, without its noise: the cluster in RAY_ADDRESS, or a Ray started here on loopback.

What Ray and its workers write goes to the log file of the job, where there is one (``log_to``).

In a cluster nodes come and go: a NodeMonitor records it from ``connect`` on, and ``job.run_job`` adds its
summary to the result. Ray repeats elsewhere what ran on a node that left, whether it failed, was reclaimed or
was removed as idle: the log line and the count explain why a run took longer.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cluster.runtime import ray_internals
from hashnet.errors import ClusterError
from hashnet.io import duration

logger = logging.getLogger(__name__)

CHECKOUT = str(Path(__file__).resolve().parents[2])

QUIET = {  # set before ray is imported; a user's own setting wins
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
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

# A worker without a GPU sees none. Ray would let it see, and open, every GPU of its node.
HIDE_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}

# Without this Ray turns 127.0.0.1 into the machine's outward address and listens on every interface.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# A Ray that starts here has no dashboard. Ray Train looks for one all the same, and prints a stack trace if
# it finds that of a second Ray on the machine, say of a server in another shell. Nothing listens here.
NO_DASHBOARD = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"}

ANSWER_S = 10.0  # a cluster that is up answers within this
MONITOR_EVERY_S = 2.0
SILENCE_S = 5.0  # of a head: longer means that it is gone, or about to return
AGAIN = "run the same command again to continue"

_monitor: NodeMonitor | None = None
_log: IO[str] | None = None  # of this process, where it is that of a job
_explained: int | None = None  # the end of a pipe: a byte there says that the failure was explained


def connect(num_cpus: int | None = None, object_store_memory: int | None = None) -> None:
    """Connects once to the cluster in RAY_ADDRESS, which a submitted job has; else starts Ray here.

    ``num_cpus`` and ``object_store_memory`` (bytes) are those of a Ray that starts here.
    """
    global _monitor
    address = os.environ.get("RAY_ADDRESS")
    for name, value in (QUIET if address else QUIET | HIDE_GPUS | LOOPBACK | NO_DASHBOARD).items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return
    _forget_last_ray()  # its user may have called only ray.shutdown
    ray_internals.quiet_authentication()
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    options = {"logging_level": logging.WARNING, "log_to_driver": True}
    on_terminate = signal.getsignal(signal.SIGTERM)
    if address:
        try:
            ray_internals.refuse_silent_address(address, ANSWER_S)
            # Workers of a cluster do not inherit this environment; a setting of the job's own wins.
            hide = {} if HIDE_GPUS.keys() <= os.environ.keys() else {"env_vars": HIDE_GPUS}
            ray.init(address=address, runtime_env=hide, **options)
        except (ValueError, ConnectionError) as error:
            raise ClusterError(
                f"RAY_ADDRESS={address} does not lead to a Ray cluster ({str(error).splitlines()[0]}); give "
                "HEAD:6379, ray://HEAD:10001 or auto, or unset it to start Ray here. http://HEAD:8265 is "
                "for `ray job submit`, in RAY_API_SERVER_ADDRESS"
            ) from error
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
    _monitor = NodeMonitor(in_cluster=bool(address))
    _monitor.start()
    if _log is not None:
        ray_internals.record_output(_log)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.WARNING)


def hide_gpus_of_driver() -> None:
    """In a cluster a job's own process sees no GPU: Ray may have given it to a worker."""
    if os.environ.get("RAY_ADDRESS"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def disconnect() -> None:
    """Leaves the cluster, or ends the Ray that was started here; ``connect`` may follow."""
    import ray

    _forget_last_ray()
    ray.shutdown()


def _forget_last_ray() -> None:
    """Ends what this process keeps about a Ray beyond ``ray.shutdown``: the monitor, and Serve's client."""
    global _monitor
    if _monitor is not None:
        _monitor.stop()
        _monitor = None
    ray_internals.forget_serve_client()


def node_changes() -> NodeChanges | None:
    """Nodes that left and joined since ``connect`` joined a cluster; None for a Ray that was started here."""
    return _monitor.stop() if _monitor is not None and _monitor.in_cluster else None


def resources() -> dict[str, float]:
    """The cluster's total resources: CPU, GPU, memory, and custom ones."""
    import ray

    return ray.cluster_resources()


def node_names() -> dict[str, str]:
    """The name of each node that is up, by its id."""
    import ray

    names = {}
    for record in ray.nodes():
        if record["Alive"]:
            name = record.get("NodeName") or record["NodeManagerAddress"]
            if name == record["NodeManagerAddress"] and name.startswith("127."):
                name = f"node-{record['NodeID'][:4]}"  # several nodes on one loopback address
            names[record["NodeID"]] = name
    return names


@dataclass(frozen=True)
class NodeChanges:
    """The most nodes at once while a job ran, and who left (``lost``) or joined, in order."""

    nodes: int
    events: list[dict[str, str]]  # event: lost | joined, node, after

    def to_dict(self) -> dict[str, Any]:
        lost = sum(event["event"] == "lost" for event in self.events)
        counts = {"nodes": self.nodes, "lost": lost, "joined": len(self.events) - lost}
        return counts | ({"events": self.events[:20]} if self.events else {})


class NodeMonitor(threading.Thread):
    """Compares the nodes that are up with those of a moment ago, until it is stopped.

    It also sees whether Ray's head answers: Ray itself is silent for a minute, then ends the process. The
    head of a cluster may come back within that minute; that of a Ray that was started here cannot.
    """

    def __init__(self, in_cluster: bool = True) -> None:
        super().__init__(name="node-monitor", daemon=True)
        self.in_cluster = in_cluster
        self._head = ray_internals.head_address()
        self._silent_since: float | None = None
        self._stopping = threading.Event()
        self._since = time.monotonic()
        self._now = node_names()
        self._most = len(self._now)
        self.events: list[dict[str, str]] = []

    def run(self) -> None:
        while not self._stopping.wait(MONITOR_EVERY_S):
            if self._head_answers() and self.in_cluster:
                self._try_update()

    def _head_answers(self) -> bool:
        """Whether the head takes connections; after some seconds of silence it is reported."""
        try:
            if self._head is not None:
                socket.create_connection(self._head, timeout=MONITOR_EVERY_S).close()
            self._silent_since = None
            return True
        except OSError:
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
            elif self.in_cluster and now - self._silent_since > SILENCE_S:
                self._silent_since = now + SILENCE_S  # again later
                logger.warning("the head of the cluster does not answer; Ray waits a minute for it to return")
            elif now - self._silent_since > SILENCE_S and self._is_job_of(self._head):
                logs = f"Ray's own logs: {ray_internals.log_folder()}"
                record(f"the head takes no connections at {self._head}; {logs}")
                sentence = f"Ray on this machine stopped (its head died); {AGAIN}"
                explain(f"error: {sentence}\ndetails: {log_path()}")
                os._exit(1)  # whatever waits for Ray would wait in vain
            return False

    def _is_job_of(self, head: tuple[str, int] | None) -> bool:
        """Whether this process is a job that still uses the Ray with this head."""
        return _log is not None and ray_internals.head_address() == head

    def _try_update(self) -> None:
        if not ray_internals.connected() or ray_internals.head_address() != self._head:
            return  # the nodes of another Ray say nothing about this one's
        try:
            self.update()
        except Exception as error:  # a cluster that is going away must not add a stack trace
            logger.debug("nodes could not be listed: %s", error)

    def update(self) -> None:
        """Records what changed since the last update."""
        found = node_names()
        if not found:
            return
        after = duration(time.monotonic() - self._since)
        for gone in self._now.keys() - found.keys():
            self.events.append({"event": "lost", "node": self._now[gone], "after": after})
            logger.warning(
                "node %s left after %s; Ray repeats elsewhere what ran there, if anything did",
                self._now[gone],
                after,
            )
        for new in found.keys() - self._now.keys():
            self.events.append({"event": "joined", "node": found[new], "after": after})
            logger.info("node %s joined after %s", found[new], after)
        self._now, self._most = found, max(self._most, len(found))

    def stop(self) -> NodeChanges:
        """What changed since the start; the monitor ends."""
        self._stopping.set()
        if self.is_alive():
            self.join()
        self._try_update()
        return NodeChanges(self._most, self.events)


def log_to(log: IO[str], explained: int) -> None:
    """Makes ``log`` the log file of this process; ``explain`` then writes a byte into ``explained``, too."""
    global _log, _explained
    _log, _explained = log, explained


def log_path() -> str | None:
    """Where the log file of this job is; None outside of one."""
    return _log.name if _log is not None else None


def record(text: str) -> None:
    """Writes to the log file, if there is one."""
    if _log is not None:
        _log.write(f"{time.strftime('%H:%M:%S')} {text.rstrip()}\n")


def explain(sentence: str) -> None:
    """Prints why the job fails; nothing else does."""
    print(sentence, file=sys.stderr, flush=True)
    if _explained is not None:
        os.write(_explained, b".")
