"""A small run and the HTTP application over it, in this process, without Ray."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.server.encoder_holder import EncoderHolder
from hashnet.server.middleware import Guard
from hashnet.server.settings import Limits, Tokens
from tests.support.serving_app import BASE, make_app
from tests.support.small_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def encoder(run: str) -> EncoderHolder:
    return EncoderHolder(f"{run}/model", "cpu-eager", 4, 1_000_000, 2)


@pytest.fixture(scope="module")
def app(run: str, encoder: EncoderHolder) -> Callable[..., Guard]:
    def make(
        limits: Limits | None = None,
        tokens: Tokens | None = None,
        engine: str = "auto",
        folder: str = run,
        local_only: bool = True,
    ) -> Guard:
        return make_app(folder, encoder, limits or Limits(), tokens or Tokens(), engine, local_only)

    return make


@pytest.fixture(scope="module")
def http(app: Callable[..., Guard]) -> Iterator[TestClient]:
    with TestClient(app(), base_url=BASE) as client:
        yield client


@pytest.fixture(scope="module")
def index(run: str) -> BinaryIndex:
    return BinaryIndex.load(f"{run}/index")


@pytest.fixture
def own_run(run: str, tmp_path: Path) -> str:
    """A copy of the run whose index may be changed."""
    shutil.copytree(run, tmp_path / "run")
    return str(tmp_path / "run")
