"""How many different codes there are, counted block by block in bounded memory.

Each code is hashed to 64 bits and the ``K`` smallest different hashes are kept. Up to ``K`` codes the
count is exact; beyond, the K-th smallest hash gives their density: an estimate within 0.3 %.

>>> import numpy as np
>>> counter = DistinctCounter()
>>> counter.add(np.array([[1], [2], [1]], dtype=np.uint8))
>>> counter.count, counter.exact
(2, True)
"""

from __future__ import annotations

import numpy as np

from hashnet.codes import as_words

K = 1 << 20  # 8 MB of hashes; the relative error of the estimate is about 1 / sqrt(K)


class DistinctCounter:
    """Add codes with ``add``; read ``count`` and ``exact`` at any time."""

    def __init__(self, k: int = K) -> None:
        self.k = k
        self._hashes = np.zeros(0, dtype=np.uint64)  # sorted, each once
        self._new: list[np.ndarray] = []
        self._exact = True

    def add(self, codes: np.ndarray) -> None:
        """Counts packed codes, uint8 (n, n_bits // 8)."""
        hashes = _hash(as_words(codes))
        self._new.append(hashes if self._exact else hashes[hashes <= self._hashes[-1]])
        if sum(map(len, self._new)) >= self.k // 4:  # sorting now and then, not for every block
            self._merge()

    def _merge(self) -> None:
        merged = np.unique(np.concatenate([self._hashes, *self._new]))
        self._new.clear()
        self._exact = self._exact and len(merged) <= self.k
        self._hashes = merged[: self.k]

    @property
    def exact(self) -> bool:
        """Whether ``count`` is a count and not an estimate."""
        self._merge()
        return self._exact

    @property
    def count(self) -> int:
        if self.exact:
            return len(self._hashes)
        return round((self.k - 1) / (float(self._hashes[-1]) / 2**64))


def _hash(words: np.ndarray) -> np.ndarray:
    """uint64 (n,) of words (n, w): splitmix64 over the words. One to one for codes up to 64 bits."""
    state = np.zeros(len(words), dtype=np.uint64)
    for column in words.T:
        state = (state ^ column) + np.uint64(0x9E37_79B9_7F4A_7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        state = state ^ (state >> np.uint64(31))
    return state
