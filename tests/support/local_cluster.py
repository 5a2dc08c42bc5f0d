"""A cluster of several real Ray nodes on this machine's loopback, with token authentication on.

    with LocalCluster() as cluster:
        cluster.add_node("head", cpus=0)                 # the first node is the head
        cluster.add_node("cpu-1", cpus=2, labels={"hashnet.io/pool": "cpu"})
        cluster.add_node("gpu-1", cpus=2, gpus=1)        # a GPU in name only: for placement
        done = cluster.submit(["python", "jobs/train.py", "run=/abs/run"])
        cluster.kill_node("cpu-1")                       # as if the machine lost power

Each node is one child process that owns the node's Ray processes. They die with it, however it
ends; nothing else on the machine is touched, which `ray stop` could not promise. `ray start` is of
no use here: it refuses a second node on 127.0.0.1, and with any other address Ray listens on every
interface. The token is made for this cluster alone and lies in its folder, which goes with the cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from cluster.runtime.connection import CHECKOUT, LOOPBACK
from hashnet.errors import ClusterError

HOST = "127.0.0.1"
START_S = 60.0


def free_ports(n: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on just now.

    They lie below those that the system gives to outgoing connections, which might take one meanwhile.
    """
    found: set[int] = set()
    while len(found) < n:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.add(port)
    return list(found)


class LocalCluster:
    """Ray nodes on loopback, started and stopped one by one. Leaving the block takes all of it down."""

    def __init__(self, object_store_mb: int = 150) -> None:
        # Ray puts Unix sockets (at most 107 bytes of path) below its own folder: a short one.
        self.folder = Path(tempfile.mkdtemp(prefix="hn-", dir="/tmp"))
        self.object_store_mb = object_store_mb
        self.nodes: dict[str, subprocess.Popen] = {}
        self.gcs_port, self.dashboard_port = free_ports(2)
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        # Nodes get the project as on a real cluster, by a job's working directory: not by PYTHONPATH.
        kept = {n: v for n, v in os.environ.items() if not n.startswith("RAY_") and n != "PYTHONPATH"}
        self.env = {
            **kept,
            **LOOPBACK,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_API_SERVER_ADDRESS": f"http://{HOST}:{self.dashboard_port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }

    @property
    def address(self) -> str:
        """Where drivers connect: the value of RAY_ADDRESS."""
        return f"{HOST}:{self.gcs_port}"

    def add_node(
        self,
        name: str,
        cpus: float = 1,
        gpus: float = 0,
        labels: Mapping[str, str] | None = None,
        cores: set[int] | None = None,
    ) -> None:
        """Starts a node and returns when it has joined; the first one is the head.

        ``cores`` binds all of the node's processes to these cores, so that one CPU means one core.
        """
        is_head = not self.nodes
        wanted = {
            "node_name": name,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "labels": dict(labels or {}),
            "object_store_memory": self.object_store_mb << 20,
            "temp_dir": str(self.folder),
            "runtime_env_dir_name": f"runtime-{name}",  # or nodes delete each other's working directories
        }
        ports = free_ports(3)
        wanted["dashboard_agent_listen_port"] = ports[0]
        if is_head:
            wanted |= {"gcs_server_port": self.gcs_port, "dashboard_port": self.dashboard_port}
        else:
            wanted["gcs_address"] = self.address
        env = self.env | {"AUTOSCALER_METRIC_PORT": str(ports[1]), "DASHBOARD_METRIC_PORT": str(ports[2])}
        log = self.folder / f"{name}.log"
        bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.local_cluster",
                    "head" if is_head else "worker",
                    json.dumps(wanted),
                ],
                cwd=CHECKOUT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                preexec_fn=bind,
                start_new_session=True,  # Ctrl-C of a demo must reach us, not the nodes
            )
        self.nodes[name] = process
        if not _line(process, START_S):
            process.kill()
            raise ClusterError(f"node {name} did not start within {START_S:g} s; see {log}")

    def kill_node(self, name: str) -> None:
        """Ends a node at once, without a chance to say goodbye; its workers die with it."""
        end(self.nodes.pop(name))

    def stop(self) -> None:
        """Ends all nodes, the head last, and removes the cluster's folder."""
        for name, process in reversed(list(self.nodes.items())):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            end(process)
            del self.nodes[name]
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_job(self, command: Sequence[str], working_dir: str = CHECKOUT) -> subprocess.Popen:
        """`ray job submit` of ``command``, running; standard output carries the job's log."""
        ray = str(Path(sys.executable).parent / "ray")
        words = [ray, "job", "submit", "--working-dir", working_dir, "--", *command]
        return subprocess.Popen(
            words,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def submit(
        self, command: Sequence[str], working_dir: str = CHECKOUT, timeout_s: float = 600
    ) -> subprocess.CompletedProcess:
        """`ray job submit` of ``command``, waited for; returncode and stdout as the CLI gave them."""
        return finished(self.start_job(command, working_dir), " ".join(command), timeout_s)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def finished(
    process: subprocess.Popen, what: str, timeout_s: float, input: str | None = None
) -> subprocess.CompletedProcess:
    """A command's return code and output when it has ended; ClusterError where it takes longer."""
    try:
        out, _ = process.communicate(input, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise ClusterError(f"{what} took more than {timeout_s:g} s:\n{out}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out)


def follow(job: subprocess.Popen, sink: TextIO | None = None) -> str:
    """Shows a job's log as it comes, without the CLI's own advice, until it ends; returns all of it."""
    lines = []
    assert job.stdout is not None
    for line in job.stdout:
        lines.append(line)
        if " -- " not in line[:60]:  # Ray's own lines: "time INFO cli.py:330 -- …"
            print(f"  {line}", end="", file=sink or sys.stdout, flush=True)
    job.wait()
    return "".join(lines)


def job_result(log: str) -> dict[str, Any]:
    """The JSON object a job printed as its last line, out of what `ray job submit` shows."""
    lines = [line for line in log.splitlines() if line.startswith("{")]
    if not lines:
        raise ClusterError(f"the job printed no result:\n{log}")
    return json.loads(lines[-1])


def _line(process: subprocess.Popen, timeout_s: float) -> bool:
    """Whether the child said it is up in time."""
    deadline = time.monotonic() + timeout_s
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    while time.monotonic() < deadline and process.poll() is None:
        if process.stdout.readline():
            return True
        time.sleep(0.05)
    return False


def end(process: subprocess.Popen) -> None:
    """Ends a process, where it has not ended by itself, and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _own_node(is_head: bool, wanted: dict[str, Any]) -> None:
    """The child: starts one node, says so, and lives until it is told to end or its parent is gone."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.utils import write_ray_address

    params = RayParams(
        node_ip_address=HOST,
        dashboard_host=HOST,
        include_dashboard=is_head,
        include_log_monitor=is_head,  # one for all nodes of a machine
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        **wanted,
    )
    node = Node(params, head=is_head, shutdown_at_exit=False, spawn_reaper=True)
    if is_head:  # where drivers of submitted jobs look; else they take any Ray of this machine
        write_ray_address(node.gcs_address, wanted["temp_dir"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    try:
        sys.stdin.read()  # ends when the parent closes it, or is gone
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    _own_node(sys.argv[1] == "head", json.loads(sys.argv[2]))
