"""Measures of queries from their counts: average precision, curves by rank and by radius, QueryMeasures.

    AP@k = (sum over ranks r <= k of precision@r * rel_r) / denominator

``retrieved``: the relevant items inside the top k (the authors' code, most hashing code).
``relevant``: min(k, relevant items in the database) (information retrieval, TREC).
A query without a hit has AP 0 in both; whether it stays in the mean is the caller's choice.

Queries are measured in blocks of a fixed size, and blocks are concatenated in their order, so that a
floating-point sum comes out the same however the blocks were spread over tasks.
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hashnet.errors import FormatError
from hashnet.kernels import compiled
from hashnet.labels import LabelSets
from hashnet.metrics.shard import QueryCounts

ALL_RANKS = 10_000  # beyond this many ranks a curve keeps every rank to 1,000 and then about 4,600 per decade
_KEYS_AT_ONCE = 1 << 24  # candidate keys of a block: 128 MiB
PER_QUERY = {"per_query": True}  # of fields of QueryMeasures with one value per query


def average_precision(
    relevance: np.ndarray, n_relevant: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AP@k with the ``retrieved`` and with the ``relevant`` denominator, and the hits: (q,) each.

    ``relevance`` uint8 (q, m) holds 0 or 1 by rank, best first; ``n_relevant`` int64 (q,) counts the
    relevant items of the whole database.

    >>> hits = np.array([[1, 0, 1], [0, 0, 0]], dtype=np.uint8)
    >>> retrieved, relevant, n_hits = average_precision(hits, np.array([4, 2]), 3)
    >>> retrieved.round(4), relevant.round(4), n_hits
    (array([0.8333, 0.    ]), array([0.5556, 0.    ]), array([2, 0]))
    """
    sums, n_hits = _precision_sums(np.ascontiguousarray(relevance[:, :k]))
    retrieved = sums / np.maximum(n_hits, 1)
    return retrieved, sums / np.maximum(np.minimum(k, n_relevant), 1), n_hits


@compiled
def _precision_sums(relevance):  # type: ignore[no-untyped-def]
    """(sum of precision@r over the ranks r of the hits, number of hits) of each query, (q,) each."""
    sums = np.zeros(len(relevance), dtype=np.float64)
    hits = np.zeros(len(relevance), dtype=np.int64)
    for i in range(len(relevance)):
        for r in range(relevance.shape[1]):
            if relevance[i, r]:
                hits[i] += 1
                sums[i] += hits[i] / (r + 1)
    return sums, hits


def discounted_gain(relevance: np.ndarray, n_relevant: np.ndarray, k: int) -> np.ndarray:
    """nDCG@k float64 (q,): the sum of 1 / log2(r + 1) over the ranks r <= k of the hits, over its best value.

    Gains are binary, as relevance is; the best order has its min(k, ``n_relevant``) hits first. A query
    without a relevant item has 0.

    >>> discounted_gain(np.array([[0, 1]], dtype=np.uint8), np.array([1]), 2).round(4)  # 1/log2(3)
    array([0.6309])
    """
    discounts = 1 / np.log2(np.arange(2, k + 2))
    best = np.concatenate([[0.0], np.cumsum(discounts)])[np.minimum(k, n_relevant)]
    gains = _discounted_sums(np.ascontiguousarray(relevance[:, :k]), discounts)
    return np.divide(gains, best, out=np.zeros_like(gains), where=best > 0)


@compiled
def _discounted_sums(relevance, discounts):  # type: ignore[no-untyped-def]
    """The sum of the discounts at the ranks of the hits of each query, float64 (q,)."""
    sums = np.zeros(len(relevance), dtype=np.float64)
    for i in range(len(relevance)):
        for r in range(relevance.shape[1]):
            if relevance[i, r]:
                sums[i] += discounts[r]
    return sums


def tie_aware_precision(
    all_items: np.ndarray, relevant: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AP@k as (mean over tie orders, relevant last, relevant first), float64 (q,) each.

    McSherry and Najork, 2008. Hamming distances tie all the time: 48 bits give 49 distances. These values
    need only the counts per distance, and they use the ``relevant`` denominator: the ``retrieved`` one is
    itself random where a tie group straddles k. For the group at one distance with n items, r of them
    relevant, and t items, R of them relevant, before it:

        mean:            sum_{i=1..m} (r/n) (R + 1 + (i-1)(r-1)/(n-1)) / (t + i),   m = min(n, k - t)
        relevant first:  sum_{i=1..m} (R + i) / (t + i),                            m = min(r, k - t)
        relevant last:   sum_{i=1..m} (R + i) / (t + n - r + i),                    m = min(r, k - t - n + r)

    Each summand is (a + b x) / x, so the sums are a (H(t+m) - H(t)) + b m with harmonic numbers H.

    ``all_items`` and ``relevant`` int (q, n_bits + 1) count the items at each distance.

    >>> both = np.array([[2, 0]]), np.array([[1, 0]])  # a hit and a miss, tied
    >>> [float(x[0]) for x in tie_aware_precision(*both, k=2)]
    [0.75, 0.5, 1.0]
    """
    n, r = all_items.astype(np.float64), relevant.astype(np.float64)
    t, R = np.cumsum(n, axis=1) - n, np.cumsum(r, axis=1) - r
    harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, k + 1))])  # H(0) … H(k)

    def steps(start: np.ndarray, m: np.ndarray) -> np.ndarray:
        """H(start + m) - H(start), 0 where there is nothing to sum."""
        start = np.minimum(start, k).astype(np.int64)
        return harmonic[np.minimum(start + m.astype(np.int64), k)] - harmonic[start]

    m = np.clip(np.minimum(n, k - t), 0, None)
    slope = np.where(n > 1, (r - 1) / np.maximum(n - 1, 1), 0.0)  # one more hit per place, on average
    share = r / np.maximum(n, 1)
    mean = share * ((R + 1 - slope * (t + 1)) * steps(t, m) + slope * m)
    m = np.clip(np.minimum(r, k - t), 0, None)
    first = m + (R - t) * steps(t, m)
    misses = t + n - r
    m = np.clip(np.minimum(r, k - misses), 0, None)
    last = m + (R - misses) * steps(misses, m)
    below = np.maximum(np.minimum(k, relevant.sum(axis=1)), 1)
    return tuple(sums.sum(axis=1) / below for sums in (mean, last, first))  # type: ignore[return-value]


def mean_by_class(values: np.ndarray, queries: LabelSets) -> tuple[np.ndarray, np.ndarray]:
    """Mean of a per-query value (AP: MAP by class) over the queries of each class, and how many those are.

    A query counts for every class it carries. float64 and int64 (n_classes,); the mean is 0 where no query
    carries the class.
    """
    owner = np.repeat(np.arange(len(queries)), queries.per_row)  # the query of each label
    n_queries = np.bincount(queries.classes, minlength=queries.n_classes)
    total = np.bincount(queries.classes, weights=values[owner], minlength=queries.n_classes)
    return total / np.maximum(n_queries, 1), n_queries


@compiled
def rank_sums(relevance, n_relevant):  # type: ignore[no-untyped-def]
    """Summed over queries: hits int64 (m,) and recall float64 (m,) within the top 1 … m.

    ``relevance`` uint8 (q, m) by rank. Hits / (N q) is precision at N; a query without a relevant
    item in the database has recall 0.
    """
    q, m = relevance.shape
    hits = np.zeros(m, dtype=np.int64)
    recall = np.zeros(m, dtype=np.float64)
    for i in range(q):
        found = 0  # hits within the top r + 1
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


def query_block_size(k: int) -> int:
    """Queries measured together: 256, fewer where k is very large."""
    return max(1, min(256, _KEYS_AT_ONCE // max(k, 1)))


@dataclass(frozen=True)
class QueryMeasures:
    """Values per query, (q,) each, and sums over the queries."""

    ap: np.ndarray = field(metadata=PER_QUERY)
    ap_relevant: np.ndarray = field(metadata=PER_QUERY)
    ap_tie_aware: np.ndarray = field(metadata=PER_QUERY)
    ap_relevant_last: np.ndarray = field(metadata=PER_QUERY)
    ap_relevant_first: np.ndarray = field(metadata=PER_QUERY)
    ndcg: np.ndarray = field(metadata=PER_QUERY)
    n_hits: np.ndarray = field(metadata=PER_QUERY)
    n_relevant: np.ndarray = field(metadata=PER_QUERY)
    ap_asymmetric: np.ndarray = field(metadata=PER_QUERY)  # NaN where the queries' logits were not given
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
        relevance = (found.keys & np.uint64(1)).astype(np.uint8)
        ap, ap_relevant, n_hits = average_precision(relevance, n_relevant, k)
        mean, last, first = tie_aware_precision(all_items, relevant, k)
        hits, recall = rank_sums(relevance, n_relevant)
        ranks = curve_ranks(relevance.shape[1]) - 1
        ball_precision, ball_recall, empty = within_radius(all_items, relevant)
        by_score = np.full(len(ap), np.nan)
        if found.ranking is not None:
            by_score, _, _ = average_precision(found.ranking.relevance(), n_relevant, k)
        return cls(
            ap=ap,
            ap_relevant=ap_relevant,
            ap_tie_aware=mean,
            ap_relevant_last=last,
            ap_relevant_first=first,
            ndcg=discounted_gain(relevance, n_relevant, k),
            n_hits=n_hits,
            n_relevant=n_relevant,
            ap_asymmetric=by_score,
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
        for each in dataclasses.fields(cls):
            values = [getattr(block, each.name) for block in blocks]
            per_query = each.metadata == PER_QUERY
            joined[each.name] = np.concatenate(values) if per_query else sum(values[1:], start=values[0])
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
        try:  # a zip file has checksums
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                count = len(arrays.files) // len(names)
                return [cls(*(arrays[f"{place}.{name}"] for name in names)) for place in range(count)]
        except (zipfile.BadZipFile, ValueError, KeyError, OSError, EOFError) as error:
            raise FormatError(
                f"the measures of a range of queries are damaged ({error}); delete the report's folder "
                "parts-* and run the same command again"
            ) from error
