#!/usr/bin/env bash
# Millions of pictures on a Ray cluster: docs/examples/cluster.sh DATA LISTS RUN
#   DATA   s3://bucket/pictures, the folder that the paths in the lists start from
#   LISTS  a folder with train.txt, query.txt and database.txt: one picture per line, "path 0 1 0 …"
#   RUN    s3://bucket/runs/first
# `ray job submit` must reach the cluster (RAY_API_SERVER_ADDRESS=http://HEAD:8265); see docs/operate.md and docs/cloud.md.
set -euo pipefail
data=$1 lists=$2 run=$3
submit() { ray job submit --working-dir . -- python "$@"; }

hashnet dataset listfile "$lists" --root "$data" --out "$run/manifest.parquet"
submit jobs/train.py run="$run" n_bits=64 backbone=lite0 weights=pretrained num_workers=8
submit jobs/encode_db.py run="$run"     # killed? run it again: it encodes only what is missing
submit jobs/build_index.py run="$run" kind=flat
submit jobs/evaluate.py run="$run" k=5000
