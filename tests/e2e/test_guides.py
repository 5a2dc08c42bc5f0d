"""The commands of docs/no-labels.md and docs/dedup.md, as printed, on a few rows with planted duplicates."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashnet.data import Manifest
from hashnet.dedup import DuplicatesArtefact


def commands(text: str) -> list[str]:
    """The first block of indented lines, without what follows a command as a comment."""
    block = re.search(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
    assert block is not None
    return [re.sub(r"\s+#.*", "", line).strip() for line in block.group().splitlines()]


def run_printed(lines: list[str], folder: Path, python: str, repo: Path) -> dict[str, dict]:
    """Runs the commands in ``folder``; what each job printed last, by the job's name."""
    told = {}
    for line in lines:
        if "jobs/train.py" in line:
            line += " first_epochs=2"
        words = [str(Path(python).parent / "hashnet") if w == "hashnet" else w for w in line.split()]
        words = [python if word == "python" else word for word in words]
        words = [word.replace("$PWD", str(folder)).replace("jobs/", f"{repo}/jobs/") for word in words]
        done = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "PYTHONPATH": str(repo)},
        )
        assert done.returncode == 0, (line, done.stderr)
        if "jobs/" in line:
            told[Path(words[1]).stem] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.slow
def test_from_vectors_to_duplicates_without_labels(repo, python, tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 16))[rng.integers(0, 60, 1500)] + rng.normal(size=(1500, 16)) * 0.3
    vectors[1400:] = vectors[:100]  # copies
    np.save(tmp_path / "vectors.npy", vectors.astype(np.float32))
    np.save(tmp_path / "queries.npy", vectors[:2].astype(np.float32))
    lines = commands((repo / "docs" / "no-labels.md").read_text(encoding="utf-8"))
    assert len(lines) < 10
    lines = [line.replace("--n-query 500 --n-train 5000", "--n-query 100 --n-train 500") for line in lines]
    told = run_printed(lines, tmp_path, python, repo)
    assert told["evaluate"]["recall"] > 3 * 100 / told["evaluate"]["n_database"]
    found = DuplicatesArtefact(str(tmp_path / "runs/vectors/duplicates")).open()
    assert found.info.n_at[0] >= 50  # equal vectors have equal codes; some copies are queries


@pytest.fixture
def pictures(tmp_path):
    """60 pictures of two waves each, and copies of the first 5 under other names."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    y, x = np.mgrid[:96, :96] / 96
    for row in range(65):
        rng = np.random.default_rng(row if row < 60 else row - 60)
        waves = [np.sin(2 * np.pi * (a * x + b * y + c)) for a, b, c in rng.uniform(-4, 4, (6, 3))]
        pixels = np.stack([waves[2 * i] + waves[2 * i + 1] for i in range(3)], axis=-1)
        Image.fromarray((127 + 60 * pixels).astype(np.uint8)).save(folder / f"{row:02d}.png")
    return folder


@pytest.mark.slow
def test_from_pictures_to_a_cleaned_data_set(repo, python, tmp_path, pictures):
    """Only equal pictures are confirmed: 60 of 65 rows stay."""
    lines = commands((repo / "docs" / "dedup.md").read_text(encoding="utf-8"))
    told = run_printed(
        [line.replace("/data/pictures", str(pictures)) for line in lines], tmp_path, python, repo
    )
    found = DuplicatesArtefact(str(tmp_path / "runs/photos/duplicates")).open()
    removed = set(found.removed().tolist())
    assert {*range(60, 65)} <= removed
    assert told["dedup"]["n_candidates"] >= told["dedup"]["n_pairs"]
    assert len(Manifest.open(str(tmp_path / "clean.parquet"))) == 65 - len(removed)


@pytest.mark.slow
def test_from_pictures_to_a_database_without_the_queries(repo, python, tmp_path, pictures):
    guide = (repo / "docs" / "dedup.md").read_text(encoding="utf-8")
    lines = [
        line.replace("/data/pictures", str(pictures)).replace("500 --n-train 2000", "20 --n-train 40")
        for line in commands(guide.split("## Leakage")[1])
    ]
    run_printed(lines, tmp_path, python, repo)
    manifest = Manifest.open(str(tmp_path / "split.parquet"))
    ids = {split: set(manifest.row_ids(split).tolist()) for split in ("query", "database")}
    pairs = [(row, row + 60) for row in range(5)]
    leaks = {b if a in ids["query"] else a for a, b in pairs if (a in ids["query"]) != (b in ids["query"])}
    assert leaks  # copies of queries in the database
    removed = DuplicatesArtefact(str(tmp_path / "runs/split/leakage")).open().removed().tolist()
    assert leaks <= set(removed) <= ids["database"]
    clean = Manifest.open(str(tmp_path / "without-leaks.parquet"))
    assert clean.count("query") == 20
    assert clean.count("database") == 45 - len(removed)
