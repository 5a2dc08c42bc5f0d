"""Average precision of a ranked list, in the two denominators hashing papers use.

    AP@k = (sum over ranks r <= k of precision@r * rel_r) / denominator

``retrieved``: the relevant items inside the top k (the authors' code, most hashing code).
``relevant``: min(k, relevant items in the database) (information retrieval, TREC).
A query without a hit has AP 0 in both; whether it stays in the mean is the caller's choice.
"""

from __future__ import annotations

import numpy as np

from hashnet.kernels import compiled


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
    sums = np.zeros(len(relevance), dtype=np.float64)
    hits = np.zeros(len(relevance), dtype=np.int64)
    for i in range(len(relevance)):
        for r in range(relevance.shape[1]):
            if relevance[i, r]:
                hits[i] += 1
                sums[i] += hits[i] / (r + 1)
    return sums, hits
