"""QueryMeasures: what a block of queries contributes to a report: AP, and curves by rank and by radius.

Queries are measured in blocks of a fixed size, and blocks are concatenated in their order, so that a
floating-point sum comes out the same however the blocks were spread over tasks.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hashnet.kernels import compiled
from hashnet.metrics.average_precision import average_precision, tie_aware_precision
from hashnet.metrics.shard import QueryCounts
from hashnet.metrics.tie_breaking import relevance_of

ALL_RANKS = 10_000  # beyond this many ranks a curve keeps every rank to 1,000 and then about 4,600 per decade


def rank_sums(relevance: np.ndarray, n_relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Summed over queries: hits int64 (m,) and recall float64 (m,) within the top 1 … m.

    ``relevance`` uint8 (q, m) by rank. Hits / (N q) is precision at N; a query without a relevant
    item in the database has recall 0.
    """
    return _rank_sums(relevance, n_relevant)


@compiled
def _rank_sums(relevance, n_relevant):  # type: ignore[no-untyped-def]
    """``rank_sums``, one query after another: the hits so far are added at every rank."""
    q, m = relevance.shape
    hits = np.zeros(m, dtype=np.int64)
    recall = np.zeros(m, dtype=np.float64)
    for i in range(q):
        found = 0
        one = 1.0 / max(n_relevant[i], 1)
        for r in range(m):
            found += relevance[i, r]
            hits[r] += found
            recall[r] += found * one
    return hits, recall


def curve_ranks(k: int) -> np.ndarray:
    """The ranks a curve up to k is kept at, int64: all of them unless k is large."""
    if k <= ALL_RANKS:
        return np.arange(1, k + 1)
    further = np.geomspace(1000, k, int(2000 * np.log(k / 1000)) + 2).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(1, 1001), further]))


def within_radius(all_items: np.ndarray, relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision and recall float64, and emptiness bool, (q, n_bits + 1) each: column r is radius r.

    Precision of a ball = relevant items in it / items in it, 0 for an empty ball. Recall = relevant
    items in it / relevant items in the database, 0 where the database has none.
    """
    items, hits = np.cumsum(all_items, axis=1), np.cumsum(relevant, axis=1)
    return hits / np.maximum(items, 1), hits / np.maximum(hits[:, -1:], 1), items == 0


_KEYS_AT_ONCE = 1 << 24  # candidate keys of a block: 128 MiB
_PER_QUERY = 7  # the first fields of QueryMeasures have one value per query


def query_block_size(k: int) -> int:
    """Queries measured together: 256, fewer where k is very large."""
    return max(1, min(256, _KEYS_AT_ONCE // max(k, 1)))


@dataclass(frozen=True)
class QueryMeasures:
    """One value per query (the first seven fields, (q,) each), and sums over the queries."""

    ap: np.ndarray
    ap_relevant: np.ndarray
    ap_tie_aware: np.ndarray
    ap_relevant_last: np.ndarray
    ap_relevant_first: np.ndarray
    n_hits: np.ndarray
    n_relevant: np.ndarray
    rank_hits: np.ndarray  # (ranks kept,)
    rank_recall: np.ndarray
    radius_precision: np.ndarray  # (n_bits + 1,)
    radius_recall: np.ndarray
    radius_empty: np.ndarray
    all_items: np.ndarray
    relevant_items: np.ndarray

    @classmethod
    def from_counts(cls, found: QueryCounts, k: int) -> QueryMeasures:
        """The measures of one block of queries from their counts and keys over the whole database."""
        all_items, relevant = found.counts
        n_relevant = relevant.sum(axis=1)
        relevance = relevance_of(found.keys)
        ap, ap_relevant, n_hits = average_precision(relevance, n_relevant, k)
        mean, last, first = tie_aware_precision(all_items, relevant, k)
        hits, recall = rank_sums(relevance, n_relevant)
        ranks = curve_ranks(relevance.shape[1]) - 1
        ball_precision, ball_recall, empty = within_radius(all_items, relevant)
        return cls(
            ap=ap,
            ap_relevant=ap_relevant,
            ap_tie_aware=mean,
            ap_relevant_last=last,
            ap_relevant_first=first,
            n_hits=n_hits,
            n_relevant=n_relevant,
            rank_hits=hits[ranks],
            rank_recall=recall[ranks],
            radius_precision=ball_precision.sum(axis=0),
            radius_recall=ball_recall.sum(axis=0),
            radius_empty=empty.sum(axis=0),
            all_items=all_items.sum(axis=0),
            relevant_items=relevant.sum(axis=0),
        )

    @classmethod
    def concatenate(cls, blocks: Sequence[QueryMeasures]) -> QueryMeasures:
        """The measures of all queries: values one after another, sums added in order."""
        joined = {}
        for place, field in enumerate(dataclasses.fields(cls)):
            values = [getattr(block, field.name) for block in blocks]
            joined[field.name] = (
                np.concatenate(values) if place < _PER_QUERY else sum(values[1:], start=values[0])
            )
        return cls(**joined)

    @staticmethod
    def dump_blocks(blocks: Sequence[QueryMeasures]) -> bytes:
        """Blocks of measures as one .npz file: whole arrays, no pickle."""
        arrays = {
            f"{place}.{name}": values
            for place, block in enumerate(blocks)
            for name, values in dataclasses.asdict(block).items()
        }
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()

    @classmethod
    def load_blocks(cls, data: bytes) -> list[QueryMeasures]:
        """The blocks that ``dump_blocks`` wrote, in order."""
        names = [field.name for field in dataclasses.fields(cls)]
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            count = len(arrays.files) // len(names)
            return [cls(*(arrays[f"{place}.{name}"] for name in names)) for place in range(count)]
