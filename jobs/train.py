"""Train a model that turns pictures or feature vectors into binary codes: RUN/model.

    ray job submit --working-dir . -- \\
        python jobs/train.py --config jobs/configs/digits.yaml run=$PWD/runs/demo n_bits=48 num_workers=2
    python jobs/train.py manifest=manifest.parquet run=runs/mine backbone=lite0 weights=pretrained

Run the same command again after a crash and it continues from the last checkpoint, with any number of
workers; after success it does nothing. Another configuration needs another run folder.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.runtime import run_job
from cluster.train import train
from hashnet.training import TrainConfig

if __name__ == "__main__":
    run_job(TrainConfig, train)
