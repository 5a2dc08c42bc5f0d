"""Everything in one go on embedded data: train, encode, index, evaluate, compare, query; a report at the end.

    make demo
    python jobs/demo.py run=$PWD/runs/demo
    python jobs/demo.py run=$PWD/runs/mine images=/data/pets       # your own pictures, one folder per class

The run is an ordinary one: every stage can be run again alone, and jobs/serve.py serves it.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.demo import DemoConfig, demo
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(DemoConfig, demo)
