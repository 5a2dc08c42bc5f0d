"""Confidence over queries: resample the queries with replacement, seeded.

It answers "would another sample of queries say the same?", for one method and, paired query by
query, for the difference of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hashnet.errors import CodeError

SAMPLES = 1000
LEVEL = 0.95
_AT_ONCE = 1 << 21  # drawn values held at once: 16 MiB


class Difference(NamedTuple):
    """The mean of a - b over queries, and its interval."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def interval(values: Any, seed: int = 0) -> tuple[float, float]:
    """Low and high end of the percentile interval of the mean of per-query values."""
    values = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    at_once = max(1, min(SAMPLES, _AT_ONCE // len(values)))
    means = [
        values[rng.integers(0, len(values), (min(at_once, SAMPLES - done), len(values)))].mean(axis=1)
        for done in range(0, SAMPLES, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_difference(ap_a: Any, ap_b: Any, seed: int = 0) -> Difference:
    """By how much method a is better than b on the same queries, with its bootstrap interval.

    An interval that leaves out 0 says the difference is not a matter of which queries were drawn.

    >>> paired_difference([0.5, 0.7, 0.9], [0.4, 0.6, 0.8])
    Difference(mean=0.1, low=0.1, high=0.1)
    """
    a, b = np.asarray(ap_a, dtype=np.float64), np.asarray(ap_b, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise CodeError(
            f"paired values need the same queries in the same order, got shapes {a.shape} and {b.shape}"
        )
    low, high = interval(a - b, seed)
    return Difference(*(round(x, 12) for x in (float((a - b).mean()), low, high)))
