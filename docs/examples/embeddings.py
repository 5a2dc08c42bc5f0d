"""Embeddings without labels: 8-byte codes, the share of neighbours they keep, a search, near-duplicates.

python docs/examples/embeddings.py vectors.npy      # float (n, d); without a file: the embedded digits
"""

import sys

import numpy as np

import hashnet
from hashnet.metrics import exact_neighbours, neighbour_report


def load(path: str | None) -> np.ndarray:
    if path is not None:
        return np.load(path).astype(np.float32)
    from sklearn.datasets import load_digits

    return load_digits().data.astype(np.float32)


def main() -> None:
    vectors = load(sys.argv[1] if len(sys.argv) > 1 else None)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(vectors))
    queries, database = vectors[order[:200]], vectors[order[200:]]

    model = hashnet.HashNet(n_bits=64).fit(database[:20_000])  # no labels: it learns from neighbours
    codes, query_codes = model.encode(database), model.encode(queries)
    print(f"{database.nbytes:,} bytes of vectors became {codes.nbytes:,} bytes of codes")

    truth = exact_neighbours(queries, [database], k=10)
    report = neighbour_report(query_codes, codes, truth, within=100)
    print(f"{report.recall:.1%} of the 10 nearest vectors are among the 100 nearest codes")

    index = hashnet.BinaryIndex.from_arrays(codes)
    hits = index.search(logits=model.logits(queries[:1]), k=5)  # the query keeps its logits: a finer order
    print("nearest to the first query:", hits.ids[0].tolist(), "at", hits.distances[0].tolist(), "bits")

    pairs = hashnet.near_duplicates(codes, radius=1)
    print(f"{len(pairs.a):,} pairs of rows within one bit of each other")


if __name__ == "__main__":
    main()
