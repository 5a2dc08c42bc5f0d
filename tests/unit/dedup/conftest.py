"""Codes with planted near-duplicates, and pairs found by loops."""

from __future__ import annotations

import numpy as np
import pytest


def slow_pairs(codes, radius, ids=None) -> list[tuple[int, int, int]]:
    """(a, b, distance) of every pair within the radius, by loops over Python integers."""
    ids = list(range(len(codes))) if ids is None else [int(i) for i in ids]
    values = sorted(zip(ids, (int.from_bytes(bytes(code), "big") for code in codes), strict=True))
    return [
        (a, b, (x ^ y).bit_count())
        for place, (a, x) in enumerate(values)
        for b, y in values[place + 1 :]
        if (x ^ y).bit_count() <= radius
    ]


def clustered_codes(n, n_bits, centres=40, noise=0.05, seed=0) -> np.ndarray:
    """Codes around random centres; some bits are dead, as in learned codes."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2, (centres, n_bits), dtype=np.uint8)
    bits[:, :: max(n_bits // 4, 2)] = 1
    flips = rng.random((n, n_bits)) < noise * (rng.random((n, 1)) < 0.7)
    return np.packbits(bits[rng.integers(0, centres, n)] ^ flips, axis=1)


@pytest.fixture(scope="session")
def slow():
    return slow_pairs


@pytest.fixture(scope="session")
def clustered():
    return clustered_codes
