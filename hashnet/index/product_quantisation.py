"""Product quantisation by FAISS: what float vectors come to at as many bytes as a binary code.

It runs in a process of its own: torch, which a comparison has loaded, and FAISS bring two OpenMP runtimes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hashnet.errors import HashnetError

BITS = 8  # per byte: 256 centroids in each part of the vector


def quantised_neighbours(
    train: np.ndarray, database: np.ndarray, queries: np.ndarray, n_bytes: int, k: int, seed: int = 0
) -> np.ndarray:
    """int64 (q, k): the rows nearest to each query among vectors quantised to ``n_bytes``, nearest first.

    Vectors whose length n_bytes does not divide are padded with zeros.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, values in (("train", train), ("database", database), ("queries", queries)):
            np.save(Path(folder) / f"{name}.npy", np.asarray(values, dtype=np.float32))
        words = [sys.executable, "-m", __name__, folder, str(n_bytes), str(k), str(seed)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HashnetError(f"product quantisation failed: {done.stderr.strip()[-500:]}")
        return np.load(Path(folder) / "found.npy")


def main(folder: str, n_bytes: int, k: int, seed: int) -> None:
    import faiss

    train, database, queries = (np.load(Path(folder) / f"{n}.npy") for n in ("train", "database", "queries"))
    width = -(-train.shape[1] // n_bytes) * n_bytes
    train, database, queries = (
        np.ascontiguousarray(np.pad(values, ((0, 0), (0, width - values.shape[1]))))
        for values in (train, database, queries)
    )
    index = faiss.IndexPQ(width, n_bytes, BITS)
    index.pq.cp.seed = seed + 1
    index.verbose = False
    index.train(train)
    index.add(database)
    np.save(Path(folder) / "found.npy", index.search(queries, min(k, len(database)))[1].astype(np.int64))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
