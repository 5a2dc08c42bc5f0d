"""Encode the database rows of a run's manifest with its model: RUN/codes, one Parquet file per shard.

    ray job submit --working-dir . -- python jobs/encode_db.py run=$PWD/runs/demo
    python jobs/encode_db.py run=runs/demo dry_run=true

Run the same command again after a crash and it encodes what is missing; after success, nothing. Pictures
that cannot be read go to RUN/codes/_quarantine with the reason; only_failed=true tries them again.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.encode import EncodeConfig, encode_database
from cluster.runtime import run_job

if __name__ == "__main__":
    run_job(EncodeConfig, encode_database)
