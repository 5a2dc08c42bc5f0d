"""The example scripts of docs/examples run as printed, on small data."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def run_example(python, repo, tmp_path):
    def run(name: str, *words: str) -> str:
        done = subprocess.run(
            [python, str(repo / "docs" / "examples" / name), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repo)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_embeddings(run_example, tmp_path):
    rng = np.random.default_rng(0)
    np.save(
        tmp_path / "v.npy", rng.normal(size=(30, 16))[rng.integers(0, 30, 900)] + rng.normal(size=(900, 16))
    )
    out = run_example("embeddings.py", "v.npy")
    assert "44,800 bytes of vectors became 5,600 bytes of codes" in out
    assert "pairs of rows within one bit" in out


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [True, False])
def test_pictures(run_example, tmp_path, labelled):
    rng = np.random.default_rng(0)
    for place in range(24):
        folder = tmp_path / "p" / (("dark", "light")[place % 2] if labelled else "")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 90, (64, 64, 3)) + 160 * (place % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{place:02d}.png")
    query = "p/light/01.png" if labelled else "p/01.png"
    lines = run_example("pictures.py", "p", query).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("  0 bits")
    assert (tmp_path / "runs" / "pictures" / "model" / "model.json").exists()
