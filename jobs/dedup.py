"""Find near-duplicates among a run's codes: write RUN/duplicates with pairs, clusters and report.html.

    python jobs/dedup.py run=runs/demo radius=2
    ray job submit --working-dir . -- python jobs/dedup.py run=$PWD/runs/demo radius=2 confirm=vectors
    python jobs/dedup.py run=runs/demo against=query

All pairs of codes that differ in at most `radius` bits, exactly, and their connected components. With
`against`, the rows that are near another set: test pictures that leaked into the training set, or new rows
that the store has already. Run the same command again after a crash, or after rows were added, and it joins
only what is missing. `hashnet dataset drop-duplicates` then writes the cleaned manifest.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.dedup import DedupConfig, find_duplicates
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(DedupConfig, find_duplicates)
