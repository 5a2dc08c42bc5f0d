"""Average precision of a ranked list, in the two denominators hashing papers use.

    AP@k = (sum over ranks r <= k of precision@r * rel_r) / denominator

``retrieved``: the relevant items inside the top k (the authors' code, most hashing code).
``relevant``: min(k, relevant items in the database) (information retrieval, TREC).
A query without a hit has AP 0 in both; whether it stays in the mean is the caller's choice.
"""

from __future__ import annotations

import numpy as np


def average_precision(
    relevance: np.ndarray, n_relevant: np.ndarray, k: int, denominator: str = "retrieved"
) -> np.ndarray:
    """AP@k of each query, float64 (q,).

    ``relevance`` (q, m) holds 0 or 1 by rank, best first; ``n_relevant`` (q,) the relevant items of
    the whole database. Precision sums are taken rank by rank, so no order of work changes a bit.

    >>> hit_miss_hit = np.array([[1, 0, 1], [0, 0, 0]])
    >>> average_precision(hit_miss_hit, np.array([4, 2]), 3).round(4)
    array([0.8333, 0.    ])
    >>> average_precision(hit_miss_hit, np.array([4, 2]), 3, "relevant").round(4)
    array([0.5556, 0.    ])
    """
    relevance = np.asarray(relevance)[:, :k]
    hits = np.cumsum(relevance, axis=1, dtype=np.int64)  # (q, m)
    ranks = np.arange(1, relevance.shape[1] + 1)
    total = np.add.accumulate(np.where(relevance, hits / ranks, 0.0), axis=1)[:, -1]
    if denominator == "retrieved":
        below = hits[:, -1]
    elif denominator == "relevant":
        below = np.minimum(k, n_relevant)
    else:
        raise ValueError(f"denominator must be 'retrieved' or 'relevant', got {denominator!r}")
    return total / np.maximum(below, 1)
