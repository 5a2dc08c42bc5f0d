"""Compiled kernels: the population count itself, and a checkout where nothing may be written."""

import numba
import numpy as np
import pytest

from hashnet.popcount import compiled, popcount


@compiled
def ones(words, out):
    for i in range(len(words)):
        out[i] = popcount(words[i])


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_popcount(dtype):
    words = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 100, dtype=dtype)
    words[:2] = 0, np.iinfo(dtype).max
    out = np.zeros(100, dtype=np.int64)
    ones(words, out)
    assert out.tolist() == [int(word).bit_count() for word in words]


def test_without_a_place_for_the_cache_it_still_compiles(monkeypatch):
    """A read-only checkout and no home folder: numba knows no folder to keep what it compiled."""
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    def twice(x):
        return 2 * x

    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(twice, cache=True)
    assert compiled(twice)(21) == 42
