"""The order of items at equal distance: a seeded hash of the row id.

It depends neither on shards nor on storage order, so a database stored sorted by class is not
ranked better than a shuffled one. The hash is a bijection of 52 bits, so two row ids never tie.
A candidate is one uint64, and ascending keys are the ranking:

    distance (11 bits) | hash of the row id (52 bits) | relevant (1 bit)
"""

from __future__ import annotations

import numpy as np

from hashnet.kernels import HASH_BITS

_MASK = np.uint64(2**HASH_BITS - 1)
_ODD_1, _ODD_2 = np.uint64(0x9E6C63D0876A9), np.uint64(0xD1B54A32D192D)  # odd: multiplying is a bijection


def tie_hash(row_ids: np.ndarray, seed: int = 0) -> np.ndarray:
    """uint64 (n,) below 2**52, different for different row ids below 2**52.

    >>> len(set(tie_hash(np.arange(1000)).tolist()))
    1000
    """
    with np.errstate(over="ignore"):
        x = np.asarray(row_ids).astype(np.int64).view(np.uint64)
        x = (x ^ (x >> np.uint64(HASH_BITS))) & _MASK
        for turn in range(2):
            x = (x + np.uint64((seed * 2 + turn + 1) * 0x9E3779B97F4A7 % 2**HASH_BITS)) & _MASK
            x = ((x ^ (x >> np.uint64(27))) * _ODD_1) & _MASK
            x = ((x ^ (x >> np.uint64(24))) * _ODD_2) & _MASK
            x = x ^ (x >> np.uint64(26))
    return x


def relevance_of(keys: np.ndarray) -> np.ndarray:
    """uint8 relevance (0 or 1) of candidate keys."""
    return (keys & np.uint64(1)).astype(np.uint8)
