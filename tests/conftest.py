"""Fixtures every test may use."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

REPO = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that wait for work sleep. By default they spin, and on a machine whose cores are all in use, as they
# are here, a forward pass of a small network then takes 20 times as much processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("RAY_ADDRESS", None)  # tests start what they need themselves


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: make test-all runs it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says in a line that the browser's tests did not run; a quiet run shows no reasons otherwise."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    missing = [reason for reason in skipped if "no browser found" in reason]
    if missing:
        terminalreporter.write_line(f"{len(missing)} browser tests: {missing[0].removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def log_levels_as_new() -> None:
    """A trial run in this process leaves our warnings out; the next test hears them again."""
    for name in ("hashnet", "cluster"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout."""
    return REPO


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter the tests run in, for subprocesses."""
    return sys.executable


@pytest.fixture(scope="module")
def ray_local():
    """A Ray with two free CPUs on loopback; modules share it and its warm workers."""
    import ray

    from cluster.runtime import connection

    def connect() -> None:
        connection.connect(num_cpus=2, object_store_memory=500_000_000)

    connect()
    deadline = time.monotonic() + 10  # what the module before left behind goes, or Ray does
    while ray.available_resources().get("CPU") != 2:
        if connection.resources().get("CPU") != 2 or time.monotonic() > deadline:
            connection.disconnect()
            connect()
            break
        time.sleep(0.1)
    return ray


@pytest.fixture(scope="module")
def own_ray():
    """No Ray runs in this process before the module's tests, nor after."""
    import ray

    from cluster.runtime import connection

    connection.disconnect()
    yield ray
    connection.disconnect()


@pytest.fixture(scope="module")
def new_cluster():
    """Makes clusters and takes them down at the end."""
    from tests.support.local_cluster import LocalCluster

    made: list[LocalCluster] = []

    def make(object_store_mb: int = 100) -> LocalCluster:
        made.append(LocalCluster(object_store_mb))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture(scope="module")
def bucket():
    """The URI of a bucket on a real S3-speaking server on loopback."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    keys = {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        server.start()
        host, port = server.get_host_and_port()
        # Servers of one process share their buckets: begin with none.
        httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="runs")
        yield f"s3://runs?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        server.stop()


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium for tests marked ``browser``: without one they are skipped, or fail in test-all."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("HASHNET_BROWSER") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        missing = f"no browser found (looked for {', '.join(names)}); install Chromium or set HASHNET_BROWSER"
        if os.environ.get("HASHNET_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox cannot be set up by root, as in containers.
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        chromium = playwright.chromium.launch(executable_path=path, args=[*sandbox, "--disable-gpu"])
        yield chromium
        chromium.close()
