"""Hosts that share nothing but a network and an object store; see tests/support/hosts.py."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Running
from tests.support import hosts as share_nothing
from tests.support.hosts import Hosts

CPUS = {"head": 0, "host-1": 1, "host-2": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips these tests with one sentence where hosts cannot be made."""
    chosen = [item for item in items if item.get_closest_marker("hosts")]
    why = share_nothing.missing() if any(not item.get_closest_marker("skip") for item in chosen) else None
    for item in chosen if why else ():
        item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module")
def cluster():
    """A head and two hosts with one CPU each, and an empty bucket s3://runs."""
    with Hosts() as made:
        made.start_storage()
        for name, cpus in CPUS.items():
            made.add(name, cpus)
        yield made


@pytest.fixture
def whole(cluster):
    """The cluster with all of its hosts, whatever a test before this one did to them."""
    cluster.faults()
    for name, cpus in CPUS.items():
        if name in cluster.hosts and not cluster.processes(name, "/raylet/raylet"):
            cluster.kill(name)  # Ray gave it up
        if name not in cluster.hosts:
            cluster.add(name, cpus)
    return cluster


@pytest.fixture(scope="session")
def submit_here():
    """Submits a job and follows its log: ``submit_here(cluster, "train.py", "run=…")``."""

    def start(cluster: Hosts, job: str, *settings: str) -> Running:
        return Running(cluster.start_job(["python", f"jobs/{job}", *settings]))

    return start


OUTCOMES: list[tuple[str, ...]] = []


@pytest.fixture(scope="session")
def outcomes():
    """Rows of the table of faults: fault, stage, what happened, rows lost or duplicated, time."""
    return OUTCOMES


def pytest_terminal_summary(terminalreporter):
    """Prints what happened; the tables of faults in docs/operate.md are made from it."""
    if not OUTCOMES:
        return
    terminalreporter.write_line("\n| fault | stage | what happened | rows lost or duplicated | time |")
    terminalreporter.write_line("|---|---|---|---|---|")
    for row in OUTCOMES:
        terminalreporter.write_line(f"| {' | '.join(row)} |")
