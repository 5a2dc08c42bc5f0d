"""How sure is a difference between two methods? Paired bootstrap over queries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Difference(NamedTuple):
    """Mean of a - b over queries, and the 95 % interval of that mean."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def paired_difference(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Difference:
    """The difference of two methods from their average precisions (q,) of the same queries.

    Queries are drawn with replacement, both methods' values together: what makes a query hard for both
    does not widen the interval.

    >>> paired_difference(np.array([0.5, 0.7, 0.9]), np.array([0.4, 0.6, 0.8])).clear
    True
    """
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    rng = np.random.default_rng(seed)
    n = len(difference)
    # how often each query is drawn decides a resample's mean: counts, not (RESAMPLES, n) indices
    means = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) @ difference / n
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(difference.mean()), float(low), float(high))
