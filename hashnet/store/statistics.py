"""What the codes of a store look like: how many different ones, how often each bit is set, and whether
they are any good.

Distinct codes are counted block by block in bounded memory: each code is hashed to 64 bits and the ``K``
smallest different hashes are kept. Up to ``K`` codes the count is exact; beyond, the K-th smallest hash
gives their density: an estimate within 0.3 %.

>>> import numpy as np
>>> counter = DistinctCounter()
>>> counter.add(np.array([[1], [2], [1]], dtype=np.uint8))
>>> counter.count, counter.exact
(2, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hashnet.codes import as_words, bit_balance, dead_bits

K = 1 << 20  # 8 MB of hashes; the relative error of the estimate is about 1 / sqrt(K)
ENOUGH_ROWS = 1_000  # below, a bit may be constant by chance
FEW_CODES = 0.01  # fewer different codes than this share of the rows: the codes have collapsed


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


def code_statistics(blocks: Iterable[np.ndarray], n_bits: int) -> dict[str, Any]:
    """The number of different codes, and the fraction of ones per bit, of blocks uint8 (n, n_bits // 8)."""
    counter, ones, rows = DistinctCounter(), np.zeros(n_bits), 0
    for codes in blocks:
        counter.add(codes)
        ones += bit_balance(codes) * len(codes)
        rows += len(codes)
    return {
        "distinct_codes": counter.count,
        "distinct_is_exact": counter.exact,
        "bit_balance": [round(float(share), 6) for share in ones / max(rows, 1)],
    }


def health_problems(rows: int, statistics: Mapping[str, Any]) -> list[str]:
    """Dead bits and collapsed codes: the two ways in which codes are useless though nothing failed."""
    problems = []
    shares = statistics.get("bit_balance") or []
    if rows >= ENOUGH_ROWS and len(dead := np.flatnonzero(dead_bits(shares))):
        problems.append(
            f"{len(dead)} of {len(shares)} bits are the same in nearly all rows, the first is bit {dead[0]}"
        )
    distinct = statistics.get("distinct_codes")
    if distinct is not None and rows >= ENOUGH_ROWS and distinct < FEW_CODES * min(rows, 10_000):
        problems.append(f"only {distinct:,} different codes for {rows:,} rows: training has collapsed")
    return problems
