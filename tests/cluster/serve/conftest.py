"""A small run to be served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.small_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def own_run(run: str, tmp_path: Path) -> str:
    """A copy of the run whose index may be changed."""
    shutil.copytree(run, tmp_path / "run")
    return str(tmp_path / "run")
