"""All pairs of near-duplicate codes: hashnet.near_duplicates against FAISS's range_search.

    python tests/bench/dedup.py [--rows N] [--only join,lance,large]

`join`: 64-bit codes in clusters, radius 0, 2 and 4. FAISS's flat index and its multihash index search a
few thousand of the same codes, and their time is extrapolated to all of them; the pairs of those rows are
compared. `lance`: the clusters of 100,000 codes beside Lance's clustering by Hamming distance, which compares
every pair, where pylance is installed. `large`: ten million codes, time and peak memory, in a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pyarrow as pa

import hashnet
from hashnet.dedup.pairs import connected_components

ROWS, CLUSTERS, NOISE = 1_281_167, 1_000, 0.1
LARGE, LARGE_CLUSTERS = 10_000_000, 100_000
QUERIES, ROUNDS, LANCE_ROWS = 1_000, 3, 100_000

clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--large", type=int, default=LARGE)
    parser.add_argument("--only", default="join,lance,large")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        large(given.large)
        return
    if "join" in given.only:
        compare(given.rows)
    if "lance" in given.only:
        beside_lance(min(given.rows, LANCE_ROWS))
    if "large" in given.only:  # a process of its own, whose peak memory is the case's
        command = [sys.executable, __file__, "--inside", "--large", str(given.large)]
        subprocess.run(command, check=True)


def clustered(n: int, clusters: int) -> np.ndarray:
    """64-bit codes around random centres, each bit flipped with probability NOISE."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 256, (clusters, 8), dtype=np.uint8)
    codes = centres[rng.integers(0, clusters, n)]
    for first in range(0, n, 65_536):
        some = codes[first : first + 65_536]
        some ^= np.packbits(rng.random((len(some), 64), dtype=np.float32) < NOISE, axis=1)
    return codes


def compare(n: int) -> None:
    """One row per radius; our time and the peers' are measured in turn, the best of three rounds each."""
    import faiss

    codes = clustered(n, CLUSTERS)
    flat, multihash = faiss.IndexBinaryFlat(64), faiss.IndexBinaryMultiHash(64, 4, 16)
    flat.add(codes)
    multihash.add(codes)
    queries = codes[np.sort(np.random.default_rng(1).choice(n, QUERIES, replace=False))]
    hashnet.near_duplicates(codes[:1000], 2)  # compiled
    for radius in (0, 2, 4):
        multihash.nflip = radius // 4  # exact: radius < 4 * (nflip + 1)
        ours, theirs, hashed = [], [], []
        for _ in range(ROUNDS):
            started = clock()
            pairs = hashnet.near_duplicates(codes, radius)
            ours.append(clock() - started)
            started = clock()
            limits = flat.range_search(queries, radius + 1)[0]
            theirs.append((clock() - started) * n / QUERIES)
            started = clock()
            assert (multihash.range_search(queries, radius + 1)[0] == limits).all()
            hashed.append((clock() - started) * n / QUERIES)
        expected = (int(limits[-1]) - QUERIES) / QUERIES * n / 2
        assert 0.5 < (len(pairs) + 1) / (expected + 1) < 2 or expected < 10_000, (len(pairs), expected)
        print(
            json.dumps(
                {
                    "case": f"all pairs within radius {radius}",
                    "rows": n,
                    "n_bits": 64,
                    "pairs": len(pairs),
                    "seconds": round(min(ours), 3),
                    "faiss_flat_s": round(min(theirs), 1),
                    "faiss_multihash_s": round(min(hashed), 1),
                    "ratio": round(min(theirs) / min(ours), 1),
                    "over_multihash": round(min(hashed) / min(ours), 1),
                }
            ),
            flush=True,
        )


def beside_lance(n: int) -> None:
    """Clusters of n codes: the same ones as Lance's, and processor time of both."""
    import tests.bench.peers  # noqa: F401  (where pylance is installed)

    try:
        import lance
        from lance.vector import hamming_clustering_for_sample
    except ImportError:
        print(
            json.dumps({"case": "clusters beside Lance", "skipped": "pylance is not installed"}), flush=True
        )
        return
    codes = clustered(n, CLUSTERS)
    hashnet.near_duplicates(codes[:1000], 2)
    with tempfile.TemporaryDirectory() as folder:
        column = pa.FixedSizeListArray.from_arrays(pa.array(codes.ravel()), 8)
        dataset = lance.write_dataset(pa.table({"hash": column}), f"{folder}/codes.lance")
        for radius in (0, 2, 4):
            started = time.process_time()
            pairs = hashnet.near_duplicates(codes, radius)
            ids, clusters = connected_components(pairs.a, pairs.b)
            ours = time.process_time() - started
            started = time.process_time()
            found = hamming_clustering_for_sample(dataset, "hash", None, radius).read_all()
            theirs = time.process_time() - started
            sizes = np.sort(np.unique(clusters, return_counts=True)[1])
            others = np.sort(np.array([len(d) + 1 for d in found["duplicates"].to_pylist()], dtype=np.int64))
            row = {"case": f"clusters beside Lance, radius {radius}", "rows": n, "clusters": len(sizes)}
            row |= {
                "cpu_s": round(ours, 3),
                "lance_cpu_s": round(theirs, 3),
                "ratio": round(theirs / ours, 1),
            }
            print(json.dumps(row | {"same_sizes": np.array_equal(sizes, others)}), flush=True)
            assert len(ids) == sizes.sum()


def large(n: int) -> None:
    """Radius 2 and the peak memory of this process."""
    codes = clustered(n, LARGE_CLUSTERS)
    hashnet.near_duplicates(codes[:1000], 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = clock()
    pairs = hashnet.near_duplicates(codes, 2)
    row = {
        "case": "many codes, radius 2",
        "rows": n,
        "n_bits": 64,
        "pairs": len(pairs),
        "seconds": round(clock() - started, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "before_mb": round(before),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
