"""Average precision over all orders of tied items (McSherry and Najork, 2008), and its bounds.

Hamming distances tie all the time: 48 bits give 49 distances. These values need only the counts
per distance, and they use the ``relevant`` denominator, min(k, relevant items in the database):
the ``retrieved`` one is itself random where a tie group straddles k.

For a group at one distance with n items, r of them relevant, t items and R relevant ones before it:

    mean:            sum_{i=1..m} (r/n) (R + 1 + (i-1)(r-1)/(n-1)) / (t + i),   m = min(n, k - t)
    relevant first:  sum_{i=1..m} (R + i) / (t + i),                            m = min(r, k - t)
    relevant last:   sum_{i=1..m} (R + i) / (t + n - r + i),                    m = min(r, k - t - n + r)

Each summand is (a + b x) / x, so the sums are a (H(t+m) - H(t)) + b m with harmonic numbers H.
"""

from __future__ import annotations

import numpy as np


def tie_aware_precision(
    all_items: np.ndarray, relevant: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AP@k as (mean over tie orders, relevant last, relevant first), float64 (q,) each.

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
