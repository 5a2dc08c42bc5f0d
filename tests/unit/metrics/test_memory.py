"""Full scale fits: the memory of one process does not grow with queries x database."""

from __future__ import annotations

import json
import subprocess

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "classes"), [("single", 1000), ("multi", 80)])
def test_all_metrics_at_full_scale_stay_below_2_gb(python, repo, kind, classes):
    """2,000 queries x 1,281,167 items: one byte a pair would be 2.6 GB."""
    command = [python, "tests/bench/evaluate.py", "--inside", kind, "--queries", "2000"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert (row["rows"], row["queries"], row["n_bits"], row["classes"]) == (1_281_167, 2000, 64, classes)
    assert row["map"] > 2 * row["chance"] > 0
    assert row["peak_mb"] < 2000
