"""Evaluate a run: encode its queries, search its codes, write RUN/report/report.json and report.html.

    ray job submit --working-dir . -- python jobs/evaluate.py run=$PWD/runs/demo k=1000
    python jobs/evaluate.py run=runs/demo beside=runs/demo16,runs/demo32

MAP in its stated variants, precision and recall by rank and by Hamming radius, per class, with
confidence intervals, and figures. Run the same command again after a crash and it continues; after success
it only draws the figures.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.evaluate import EvaluateConfig, evaluate_run
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(EvaluateConfig, evaluate_run)
