"""N workers with B / N rows each compute the gradient of one worker with B rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import gradient_worker  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Gradients of 4 and of 2 workers, of every case."""
    folder = tmp_path_factory.mktemp("workers")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "gradient_worker.py"), str(folder), str(rank), "4,2"], env=environment
        )
        for rank in range(4)
    ]
    assert [process.wait(timeout=200) for process in started] == [0] * 4
    return folder


@pytest.mark.parametrize("case", gradient_worker.CASES)
def test_gradients_do_not_depend_on_the_number_of_workers(trained, case):
    alone = gradient_worker.outcome(gradient_worker.train(case))
    for size in (2, 4):
        together = torch.load(trained / f"{case}-{size}.pt", weights_only=True)
        assert together.keys() == alone.keys()
        for name, expected in alone.items():
            scale = expected.abs().max()
            assert (together[name] - expected).abs().max() <= 1e-10 * scale, (size, name)
