"""The example scripts of docs/examples run as printed, on small data."""

from __future__ import annotations

import os
import re
import subprocess

import numpy as np
import pytest
from PIL import Image

from hashnet.cli import entry as cli


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


@pytest.fixture
def called(repo, tmp_path):
    """Runs a script of docs/examples where its commands only print themselves, and no other is installed."""

    def run(name: str, *words: str) -> list[list[str]]:
        for command in ("hashnet", "ray", "python"):
            stub = tmp_path / "bin" / command
            stub.parent.mkdir(exist_ok=True)
            stub.write_text('#!/bin/bash\nIFS="\t"; echo "${0##*/}\t$*"\n')
            stub.chmod(0o755)
        script = ["/bin/bash", str(repo / "docs" / "examples" / name), *words]
        done = subprocess.run(script, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split("\t") for line in done.stdout.splitlines()]

    return run


RUN_MANIFEST = "s3://b/runs/first/manifest.parquet"
STAGES = ("train", "encode_db", "build_index", "evaluate")


def guide(repo) -> str:
    return (repo / "docs" / "reproduce.md").read_text()


def test_the_cluster_script_needs_hashnet_and_ray_alone(called, monkeypatch):
    """The manifest goes where the jobs look for it: no other tool copies it."""
    dataset, *jobs = called("cluster.sh", "s3://b/pictures", "lists", "s3://b/runs/first")
    assert dataset[0] == "hashnet"
    monkeypatch.setattr("hashnet.cli.dataset.run", lambda given: 0 if given.out == RUN_MANIFEST else 1)
    assert cli.main(dataset[1:]) == 0
    assert [job[7] for job in jobs] == [f"jobs/{name}.py" for name in STAGES]
    assert all("run=s3://b/runs/first" in job for job in jobs)


def test_the_table_script_tunes_as_the_guide_does(called, repo):
    *_, (command, job, *given) = called("paper_table.sh", "own.npz", "runs/own")
    printed = re.findall(r"^ +python jobs/compare.py (.*run=runs/table-features .*)$", guide(repo), re.M)
    same = {"tune=true", "tune_bits=48", "zero_shot=0", "seeds=0,1,2"}
    assert (command, job) == ("python", "jobs/compare.py")
    assert same <= set(given)
    assert same <= set(printed[0].split())
