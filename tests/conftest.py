"""Fixtures every test may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "2")
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
    """A Ray with two CPUs on loopback, for the tests of one module."""
    from cluster import session

    session.connect(num_cpus=2, object_store_memory=500_000_000)
    import ray

    yield ray
    ray.shutdown()
