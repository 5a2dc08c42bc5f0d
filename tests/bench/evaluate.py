"""Evaluation against what people use today and against the bare loop, as ratios from one run; and full scale.

    python tests/bench/evaluate.py [--rows 1281167] [--queries 5000] [--only usual,bare,matrix,single,multi]

Prints one JSON row per case. Codes are drawn in 1,000 clusters, as a trained model's are. Cases and peers
take turns and keep the best of their runs; ratios are of processor seconds, which a busy machine disturbs
least. Peers:

usual   similarity by a matrix product of ±1, numpy argsort per query, AP by a cumulative sum: what public
        evaluation code does, query by query so that it fits into memory, on the same threads
bare    xor + popcount over the same codes on the same threads, which keeps nothing but a sum
matrix  the same public code where it builds the whole queries x database matrix: when memory ends
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import hashnet
from hashnet.codes import as_words, unpack_codes
from hashnet.kernels.jit import compiled, default_threads, popcount
from hashnet.metrics.evaluation import check_labels
from hashnet.metrics.shard import Shard

ROWS, QUERIES, CLUSTERS, NOISE = 1_281_167, 5_000, 1_000, 0.1
MEMORY = 24 << 30
CASES = ("usual", "bare", "matrix", "single", "multi")

clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # a case that measures its own memory
    given = parser.parse_args()
    if given.inside:
        full_scale(given.inside, given.rows, given.queries)
        return
    for case in given.only.split(","):
        if case in ("single", "multi"):  # a process of its own, whose peak memory is the case's
            command = [sys.executable, __file__, "--inside", case]
            size = ["--rows", str(given.rows), "--queries", str(given.queries)]
            subprocess.run([*command, *size], check=True, env=os.environ | {"MALLOC_ARENA_MAX": "2"})
        else:
            {"usual": usual, "bare": bare, "matrix": matrix}[case](given.rows, given.queries)


def row(case: str, **values: Any) -> None:
    rounded = {n: round(v, 4) if isinstance(v, float) else v for n, v in values.items()}
    print(json.dumps({"bench": "evaluate", "case": case} | rounded), flush=True)


def draw(rows: int, n_bits: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes (rows, n_bits // 8) around cluster centres, and the cluster of each."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).integers(0, 256, (CLUSTERS, n_bits // 8), dtype=np.uint8)
    labels = rng.integers(0, CLUSTERS, rows)
    codes = centres[labels]
    for start in range(0, rows, 65_536):  # the noise of one block at a time
        block = codes[start : start + 65_536]
        block ^= np.packbits(rng.random((len(block), n_bits)) < NOISE, axis=1)
    return codes, labels


def draw_multi_hot(clusters: np.ndarray) -> np.ndarray:
    """Multi-hot labels (n, 80), 2.9 per row, frequencies as skewed as COCO's; alike within a cluster."""
    rng = np.random.default_rng(7)
    share = np.clip(0.45 / np.arange(1, 81) ** 0.8, 0.004, None)
    of_cluster = rng.random((CLUSTERS, 80)) < share
    of_cluster[~of_cluster.any(axis=1), 0] = True
    labels = of_cluster[clusters].view(np.uint8)
    for start in range(0, len(labels), 65_536):
        block = labels[start : start + 65_536]
        block |= rng.random(block.shape, dtype=np.float32) < 0.005
    return labels


def best(calls: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Processor seconds, per thread, of the fastest run of each call; they take turns.

    All of them keep every thread busy, and processor time does not count what others on the machine take.
    """
    times = {name: float("inf") for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.process_time()
            call()
            times[name] = min(times[name], (time.process_time() - begun) / default_threads())
    return times


def usual(rows: int, queries: int) -> None:
    """Our time for many queries against the usual code's for a few, both per query."""
    codes, labels = draw(rows)
    query_codes, query_labels = draw(512, seed=1)
    signs = unpack_codes(codes).astype(np.float32)
    query_signs = unpack_codes(query_codes).astype(np.float32)
    k, few = 1000, 6

    def theirs() -> list[float]:
        with ThreadPoolExecutor(default_threads()) as pool:
            return list(pool.map(one, range(few)))

    def one(i: int) -> float:
        distances = 0.5 * (64 - query_signs[i] @ signs.T)
        order = np.argsort(distances)
        hits = (labels[order] == query_labels[i])[:k]
        places = np.flatnonzero(hits) + 1
        return float(np.mean(np.arange(1, len(places) + 1) / places)) if len(places) else 0.0

    def ours() -> hashnet.EvalReport:
        return hashnet.evaluate(query_codes, query_labels, codes, labels, k=k)

    report, aps = ours(), theirs()
    assert np.allclose(report.ap[:few], aps, atol=0.12), (
        "ties are ordered differently, but not that differently"
    )
    times = best({"ours": ours, "theirs": theirs}, rounds=3)
    a_query = {"ours": times["ours"] / len(query_codes), "theirs": times["theirs"] / few}
    row(
        "every metric against matrix product + argsort",
        rows=rows,
        n_bits=64,
        k=k,
        threads=default_threads(),
        ours_ms_a_query=a_query["ours"] * 1e3,
        usual_ms_a_query=a_query["theirs"] * 1e3,
        usual_extrapolated_s=a_query["theirs"] * queries,
        ratio=a_query["theirs"] / a_query["ours"],
    )


@compiled
def _bare(words, queries, first, last):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(first, last):
        code, met = queries[i], np.uint64(0)
        for j in range(len(words)):
            met += popcount(code ^ words[j])
        total += met
    return total


def bare(rows: int, queries: int) -> None:
    """Counts alone, and counts with the ranking, against a loop that keeps nothing."""
    codes, clusters = draw(rows)
    query_codes, query_clusters = draw(512, seed=1)
    words, query_words = as_words(codes).ravel(), as_words(query_codes).ravel()
    threads = default_threads()

    def loop() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: _bare(words, query_words, i, i + 16), range(0, 512, 16)))

    for name, labels, query_labels in (
        ("single-label, 1,000 classes", clusters, query_clusters),
        ("multi-label, 80 classes", draw_multi_hot(clusters), draw_multi_hot(query_clusters)),
    ):
        wanted, sets = check_labels(query_labels, labels)
        shard = Shard.build(codes, sets)

        def counts(shard: Shard = shard, wanted: Any = wanted) -> None:
            shard.count(query_codes, wanted, 1, threads)

        def ranked(shard: Shard = shard, wanted: Any = wanted) -> None:
            shard.count(query_codes, wanted, 1000, threads)

        loop(), counts(), ranked()
        times = best({"bare": loop, "counts": counts, "ranked": ranked})
        pairs = len(query_codes) * rows
        for what in ("counts", "ranked"):
            row(
                f"{'counts' if what == 'counts' else 'counts and top 1,000'} against the bare loop, {name}",
                rows=rows,
                n_bits=64,
                threads=threads,
                ours_gpairs_s=pairs / times[what] / 1e9,
                bare_gpairs_s=pairs / times["bare"] / 1e9,
                ratio=times["bare"] / times[what],
            )


def matrix(rows: int, queries: int) -> None:
    """Where code that keeps the whole matrix ends: float32 distances, int64 argsort, 12 bytes a pair."""
    a_pair = np.dtype(np.float32).itemsize + np.dtype(np.int64).itemsize
    row(
        "whole distance matrix with its argsort: when 24 GiB are full",
        queries=queries,
        bytes_a_pair=a_pair,
        largest_database=MEMORY // (a_pair * queries),
        gib_at_full_scale=a_pair * queries * rows / (1 << 30),
    )


def full_scale(kind: str, rows: int, queries: int) -> None:
    """All metrics at the size of ImageNet, in this process; its peak memory with the data it drew."""
    codes, labels = draw(rows)
    query_codes, query_labels = draw(queries, seed=1)
    if kind == "multi":
        labels, query_labels = draw_multi_hot(labels), draw_multi_hot(query_labels)
    k = 1000 if kind == "single" else 5000
    hashnet.evaluate(query_codes[:2], query_labels[:2], codes[:20_000], labels[:20_000], k=100)  # compiled
    begun = clock()
    report = hashnet.evaluate(query_codes, query_labels, codes, labels, k=k)
    seconds = clock() - begun
    row(
        f"every metric, full scale, {kind}-label",
        rows=rows,
        queries=queries,
        n_bits=64,
        k=k,
        classes=report.n_classes,
        threads=default_threads(),
        seconds=seconds,
        gpairs_s=rows * queries / seconds / 1e9,
        peak_mb=peak_mb(),
        map=report.map,
        map_tie_aware=report.map_tie_aware,
        chance=report.chance,
    )


def peak_mb() -> float:
    """The most memory this process ever held; getrusage would count its parent's, too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
