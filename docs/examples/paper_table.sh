#!/usr/bin/env bash
# The paper's tables on features of your own: docs/examples/paper_table.sh FEATURES.npz RUN
#   FEATURES.npz   train_features, query_features, database_features (n, d) and *_labels, multi-hot or class ids
# Every method at its own best settings, chosen at 48 bits on training rows alone; three seeds; report/report.html in RUN.
set -euo pipefail
features=$1 run=$2

hashnet dataset npy "$features" --out "$run/manifest.parquet"
python jobs/compare.py manifest="$run/manifest.parquet" run="$run" methods=all bits=16,32,48,64 seeds=0,1,2 tune=true tune_bits=48 zero_shot=0
