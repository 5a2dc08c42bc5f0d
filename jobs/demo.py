"""Run every stage on a small built-in data set: train, encode, index, evaluate, compare, query, report.

    make demo
    python jobs/demo.py run=$PWD/runs/demo
    python jobs/demo.py run=$PWD/runs/mine images=/data/pets       # your own pictures, one folder per class
    python jobs/demo.py run=$PWD/runs/mine images=/data/photos     # or all in one folder, without labels

The result is an ordinary run: every stage can be repeated alone, and `hashnet serve` serves it.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.demo import DemoConfig, demo
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(DemoConfig, demo)
