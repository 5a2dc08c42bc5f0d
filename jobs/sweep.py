"""Choose the learning rate by validation MAP on held-out training rows: RUN/best.yaml.

    python jobs/sweep.py --config jobs/configs/digits.yaml run=$PWD/runs/sweep lrs=0.001,0.00316,0.01,0.0316
    python jobs/train.py --config runs/sweep/best.yaml run=$PWD/runs/best

Takes every key of jobs/train.py, but rates come from lrs (not lr), and a trial has one worker. Queries are
never used. The same command resumes; after rates were added it trains only those.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.runtime import run_job
from cluster.sweep import SweepConfig, sweep

if __name__ == "__main__":
    run_job(SweepConfig, sweep)
