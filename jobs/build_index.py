"""Build the search index of a run: RUN/codes → RUN/index.

    ray job submit --working-dir . -- python jobs/build_index.py run=$PWD/runs/demo kind=flat
    python jobs/build_index.py run=runs/demo kind=ivf recall=0.99

flat is exact and the right choice up to tens of millions of codes. Run the same command again and nothing
happens; after new codes it builds the next version, which a running server picks up.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.build_index import IndexConfig, build_index
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(IndexConfig, build_index)
