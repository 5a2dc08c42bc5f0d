"""The commands of docs/no-labels.md, as printed, on a few vectors with planted duplicates."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hashnet.dedup import DuplicatesArtefact


def commands(text: str) -> list[str]:
    """The first block of indented lines."""
    block = re.search(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
    assert block is not None
    return [line.strip() for line in block.group().splitlines()]


@pytest.mark.slow
def test_from_vectors_to_duplicates_without_labels(repo, python, tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 16))[rng.integers(0, 60, 1500)] + rng.normal(size=(1500, 16)) * 0.3
    vectors[1400:] = vectors[:100]  # copies
    np.save(tmp_path / "vectors.npy", vectors.astype(np.float32))
    np.save(tmp_path / "queries.npy", vectors[:2].astype(np.float32))
    lines = commands((repo / "docs" / "no-labels.md").read_text(encoding="utf-8"))
    assert len(lines) < 10
    told = {}
    for line in lines:
        line = line.replace("--n-query 500 --n-train 5000", "--n-query 100 --n-train 500")
        if "jobs/train.py" in line:
            line += " first_epochs=2"
        words = [str(Path(python).parent / "hashnet") if w == "hashnet" else w for w in line.split()]
        words = [python if word == "python" else word for word in words]
        words = [word.replace("$PWD", str(tmp_path)).replace("jobs/", f"{repo}/jobs/") for word in words]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "PYTHONPATH": str(repo)},
        )
        assert done.returncode == 0, (line, done.stderr)
        if "jobs/" in line:
            told[Path(words[1]).stem] = json.loads(done.stdout.splitlines()[-1])
    assert told["evaluate"]["recall"] > 3 * 100 / told["evaluate"]["n_database"]
    found = DuplicatesArtefact(str(tmp_path / "runs/vectors/duplicates")).open()
    assert found.info.n_at[0] >= 50  # equal vectors have equal codes; some copies are queries
