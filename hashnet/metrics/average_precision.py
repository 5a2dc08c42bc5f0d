"""Average precision of ranked lists: in two denominators, over all orders of tied items, and by class.

    AP@k = (sum over ranks r <= k of precision@r * rel_r) / denominator

``retrieved``: the relevant items inside the top k (the authors' code, most hashing code).
``relevant``: min(k, relevant items in the database) (information retrieval, TREC).
A query without a hit has AP 0 in both; whether it stays in the mean is the caller's choice.
"""

from __future__ import annotations

import numpy as np

from hashnet.kernels import compiled
from hashnet.metrics.relevance import LabelSets


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
