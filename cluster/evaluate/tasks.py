"""The Ray tasks of an evaluation: ranges of queries against groups of code shards.

    count(range, group) … → merge, eight at a time → finish: the measures of the range

The candidate keys of one range fill at most RANGE_BYTES in each object, whatever k is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.runtime import Need, capacity, connection
from hashnet.errors import LineageMismatch
from hashnet.io import binary_matrix
from hashnet.metrics import LabelSets, QueryCounts, QueryMeasures, build_shard, query_block_size
from hashnet.store import CodeStore

RANGE_BYTES = 64 << 20  # candidate keys of one range of queries against one group of shards
FAN_IN = 8  # partial results merged by one task
Span = tuple[int, int]  # queries [first, stop)


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated: queries against a code store, and how; ``device`` counts the distances."""

    store: CodeStore
    codes: np.ndarray  # uint8 (q, n_bits // 8), of the queries
    labels: LabelSets  # of the queries
    k: int
    seed: int
    device: str


def query_ranges(n_queries: int, k: int) -> list[Span]:
    """Whole blocks of queries whose candidate keys fill about RANGE_BYTES; they depend on k alone."""
    block = query_block_size(k)
    step = max(1, RANGE_BYTES // (8 * k * block)) * block
    return [(first, min(first + step, n_queries)) for first in range(0, n_queries, step)]


def shard_groups(store: CodeStore, rows: int) -> list[tuple[int, ...]]:
    """Groups of neighbouring shards with about ``rows`` rows together."""
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    total = 0
    for place, shard in enumerate(store.shards):
        if group and total + shard.rows > rows:
            groups.append(tuple(group))
            group, total = [], 0
        group.append(place)
        total += shard.rows
    return [*groups, tuple(group)] if group else groups


def run_ranges(
    evaluation: Evaluation, ranges: list[Span], groups: list[tuple[int, ...]]
) -> Iterator[tuple[Span, list[QueryMeasures]]]:
    """(range, its blocks of measures) as they are done, with a few ranges in flight at a time."""
    import ray

    store, k, seed, device = evaluation.store, evaluation.k, evaluation.seed, evaluation.device
    gpu = device == "cuda" or (device == "auto" and connection.resources().get("GPU", 0) >= 1)
    size = {"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0}
    counters = min(len(ranges) * len(groups), capacity.workers_that_fit(size)) or 1
    capacity.require("evaluate", [Need("counter", counters, size, at_least=1, fix="use device=cpu")])
    count = ray.remote(_count).options(num_cpus=1, num_gpus=1 if gpu else 0, max_retries=3)
    merge_some = ray.remote(_merge).options(num_cpus=1, max_retries=3)
    finish = ray.remote(_finish).options(num_cpus=1, max_retries=3)

    def start(span: Span) -> Any:
        queries = ray.put((evaluation.codes[span[0] : span[1]], evaluation.labels.rows(*span)))
        parts = [count.remote(store.uri, store.sha256, group, seed, device, queries, k) for group in groups]
        while len(parts) > FAN_IN:
            parts = [merge_some.remote(k, *parts[i : i + FAN_IN]) for i in range(0, len(parts), FAN_IN)]
        return finish.remote(k, *parts)

    at_once = max(2, int(2 * connection.resources().get("CPU", 1)) // len(groups))
    waiting = list(ranges)
    running: dict[Any, Span] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            span = waiting.pop(0)
            running[start(span)] = span
        for done in ray.wait(list(running), num_returns=1)[0]:
            yield running.pop(done), QueryMeasures.load_blocks(ray.get(done))


def _count(
    uri: str, sha256: str, group: tuple[int, ...], seed: int, device: str, queries: Any, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Task: counts and candidate keys of a range of queries against a group of shards."""
    codes, labels = queries
    found = _load_group(uri, sha256, group, seed, device).count(codes, labels, k, threads=1)
    return found.counts, found.keys


@lru_cache(maxsize=2)  # tasks of successive ranges on one worker share what was read
def _load_group(uri: str, sha256: str, group: tuple[int, ...], seed: int, device: str) -> Any:
    store = CodeStore.open(uri)
    if store.sha256 != sha256:
        raise LineageMismatch(f"{uri} changed while it was being evaluated; run the same command again")
    table = pa.concat_tables(store.tables(["row_id", "code", "labels"], group))
    labels = LabelSets.from_arrow(table["labels"], store.n_classes or 0)
    codes = binary_matrix(table["code"], store.n_bits // 8)
    return build_shard(codes, labels, table["row_id"].to_numpy(), seed, device)


def _merge(k: int, *parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Task: partial results of the same queries, merged into one."""
    merged = QueryCounts.merge([QueryCounts(*part) for part in parts], k)
    return merged.counts, merged.keys


def _finish(k: int, *parts: tuple[np.ndarray, np.ndarray]) -> bytes:
    """Task: the measures of a range of queries, in blocks of fixed size."""
    counts, keys = _merge(k, *parts)
    step = query_block_size(k)
    blocks = [
        QueryMeasures.from_counts(QueryCounts(counts[:, first : first + step], keys[first : first + step]), k)
        for first in range(0, len(keys), step)
    ]
    return QueryMeasures.dump_blocks(blocks)
