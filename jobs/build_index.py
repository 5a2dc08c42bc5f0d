"""Index a run's codes for search: RUN/codes → RUN/index, a FAISS file and what belongs to it.

    ray job submit --working-dir . -- python jobs/build_index.py run=$PWD/runs/demo kind=flat
    python jobs/build_index.py run=runs/demo kind=ivf recall=0.99

flat is exact and the right choice up to tens of millions of codes. The same command again changes nothing;
after new codes it makes the next version, which a server takes over while it runs.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.build_index import IndexConfig, build_index
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(IndexConfig, build_index)
