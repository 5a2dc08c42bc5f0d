"""Distinct codes in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from hashnet.store.statistics import DistinctCounter


@pytest.mark.parametrize("n_bytes", [1, 3, 8, 9, 128])
def test_exact_while_few_whatever_the_blocks(n_bytes):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, size=(500, n_bytes), dtype=np.uint8)
    counter = DistinctCounter()
    for start in range(0, 500, 37):
        counter.add(codes[start : start + 37])
    assert counter.exact
    assert counter.count == len({row.tobytes() for row in codes})


def test_an_estimate_beyond_k():
    codes = np.arange(50_000, dtype=np.uint64).view(np.uint8).reshape(-1, 8)
    counter = DistinctCounter(k=4096)
    for start in range(0, len(codes), 10_000):
        counter.add(codes[start : start + 10_000])
        counter.add(codes[start : start + 10_000])  # seen twice, counted once
    assert not counter.exact
    assert abs(counter.count - 50_000) < 0.06 * 50_000  # four standard errors of 1 / sqrt(4096)


def test_no_codes_are_none():
    counter = DistinctCounter()
    counter.add(np.zeros((0, 8), dtype=np.uint8))
    assert (counter.count, counter.exact) == (0, True)
