"""A small run and the HTTP application over it, in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.server import BatchEncoder, ServeConfig, ServedRun
from hashnet.server.http_server import RequestMiddleware
from tests.support.serving_app import BASE, make_app
from tests.support.small_run import make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="session")
def encoder(run: str) -> BatchEncoder:
    return BatchEncoder(f"{run}/model", "cpu", 1_000_000, 2)


@pytest.fixture(scope="session")
def app(run: str, encoder: BatchEncoder) -> Callable[..., RequestMiddleware]:
    """Makes the application over the run, or over that in ``folder``; further options as in make_app."""

    def make(folder: str = run, **options: Any) -> RequestMiddleware:
        return make_app(ServedRun.open(ServeConfig(run=folder)), encoder, **options)

    return make


@pytest.fixture(scope="session")
def http(app: Callable[..., RequestMiddleware]) -> Iterator[TestClient]:
    with TestClient(app(), base_url=BASE) as client:
        yield client


@pytest.fixture(scope="session")
def index(run: str) -> BinaryIndex:
    return BinaryIndex.load(f"{run}/index")


@pytest.fixture
def own_run(run: str, tmp_path: Path) -> str:
    """A copy of the run whose index may be changed."""
    shutil.copytree(run, tmp_path / "run")
    return str(tmp_path / "run")
