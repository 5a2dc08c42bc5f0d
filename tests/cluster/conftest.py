"""Real Ray clusters of several nodes, on loopback, for the tests of this folder."""

from __future__ import annotations

import re
import subprocess
import textwrap
import threading
from typing import Any

import pytest

from tests.support.local_cluster import LocalCluster, job_result


@pytest.fixture(scope="session")
def driver(python, repo):
    """What a process is started with that runs a script as a driver connected to a cluster."""

    def arguments(cluster: LocalCluster, code: str, env: dict[str, str]) -> dict[str, Any]:
        return {
            "args": [python, "-c", textwrap.dedent(code)],
            "cwd": repo,
            "env": cluster.env | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(repo)} | env,
            "text": True,
        }

    return arguments


@pytest.fixture(scope="session")
def drive(driver):
    """Runs a script as a driver connected to a cluster: ``drive(cluster, code, **env)``."""

    def run(cluster: LocalCluster, code: str, timeout: float = 90, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(**driver(cluster, code, env), capture_output=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def start_driver(driver):
    """Starts such a script and follows what it says: ``start_driver(cluster, code, **env)``."""

    def start(cluster: LocalCluster, code: str, **env: str) -> Running:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return Running(subprocess.Popen(**driver(cluster, code, env), **pipes))

    return start


@pytest.fixture(scope="session")
def listeners():
    """(port, address) of every listening TCP socket that the given process tree holds."""
    import psutil

    def find(pids: list[int]) -> list[tuple[int, str]]:
        found = []
        for pid in pids:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for process in family:
                try:
                    sockets = process.net_connections(kind="tcp")
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                found += [(s.laddr.port, s.laddr.ip) for s in sockets if s.status == psutil.CONN_LISTEN]
        return found

    return find


class Running:
    """A submitted job whose log is read as it comes."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.lines = process, []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, words: str, timeout: float = 300) -> None:
        """Returns when a line with these words has come."""
        with self._changed:
            seen = self._changed.wait_for(
                lambda: any(words in line for line in self.lines) or not self._reader.is_alive(), timeout
            )
        assert seen, f"{words!r} did not come within {timeout} s:\n{''.join(self.lines)}"
        assert any(words in line for line in self.lines), "".join(self.lines)

    def job_id(self) -> str:
        self.wait_for("submitted successfully")
        return re.search(r"Job '(raysubmit_\w+)' submitted", "".join(self.lines)).group(1)

    def end(self, timeout: float = 900) -> tuple[int, str]:
        """Exit code and the whole log, when it has ended."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code, "".join(self.lines)

    def result(self, timeout: float = 900) -> dict:
        """What a job that succeeded printed last."""
        code, log = self.end(timeout)
        assert code == 0, log
        return job_result(log)


@pytest.fixture(scope="session")
def submit():
    """Submits a job and follows its log: ``submit(cluster, "train.py", "run=…")``."""

    def start(cluster: LocalCluster, job: str, *settings: str) -> Running:
        return Running(cluster.start_job(["python", f"jobs/{job}", *settings]))

    return start
