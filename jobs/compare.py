"""Compare methods at several code lengths on one data set: the paper's three tables and its figures.

    ray job submit --working-dir . -- \\
        python jobs/compare.py --config jobs/configs/digits.yaml run=$PWD/runs/table bits=16,32,48,64
    python jobs/compare.py manifest=manifest.parquet run=runs/table methods=deep,itq seeds=0,1,2 tune=true

Every cell (method, code length, seed) is one Ray task and is kept: the same command after a crash, or with
more methods, lengths or seeds, runs only what is missing. The result is RUN/report.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.compare import CompareConfig, compare
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(CompareConfig, compare)
