"""Seconds to fit each baseline on 10,000 rows x 4,096 features x 64 bits; ITQ beside FAISS's own.

    python tests/bench/baselines.py [METHOD ...]

Rows look like features after a ReLU with 100 classes. One JSON row a method: fit and encode seconds.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet.baselines import REGISTRY
from hashnet.baselines.base import BaselineWarning

N_ROWS, N_FEATURES, N_BITS, N_CLASSES = 10_000, 4_096, 64, 100


def made_up_features():
    """float32 (N_ROWS, N_FEATURES) and class ids."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, N_CLASSES, size=N_ROWS)
    centres = rng.normal(size=(N_CLASSES, 64))
    lift = rng.normal(size=(64, N_FEATURES)).astype(np.float32)
    low = (centres[y] + 0.7 * rng.normal(size=(N_ROWS, 64))).astype(np.float32)
    noise = rng.standard_normal((N_ROWS, N_FEATURES), dtype=np.float32)
    return np.maximum(low @ lift / 8 + 0.5 * noise, 0), y


def faiss_itq_seconds(X):
    """FAISS's ITQ transform on the same rows: PCA to 64 dimensions and a learnt rotation."""
    import faiss

    transform = faiss.ITQTransform(N_FEATURES, N_BITS, True)
    started = time.perf_counter()
    transform.train(X)
    return time.perf_counter() - started


def main(names):
    X, y = made_up_features()
    warnings.simplefilter("ignore", BaselineWarning)
    for name in names or REGISTRY:
        method = REGISTRY[name](N_BITS)
        started = time.perf_counter()
        method.fit(X, y)
        fit_s = time.perf_counter() - started
        started = time.perf_counter()
        method.encode(X)
        row = {
            "bench": "baselines",
            "case": f"fit {name} {N_ROWS} x {N_FEATURES} x {N_BITS} bits",
            "fit_s": round(fit_s, 2),
            "encode_rows_per_s": round(N_ROWS / (time.perf_counter() - started)),
        }
        if name == "itq":
            peer = faiss_itq_seconds(X)
            row |= {
                "peer": "faiss.ITQTransform.train",
                "peer_s": round(peer, 2),
                "ratio": round(peer / fit_s, 2),
            }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
