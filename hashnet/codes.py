"""THE bit convention: real values → signs → packed codes; the distance between codes, and their statistics.

Bit 1 stands for a value >= 0 (zero is +1, always), most significant bit first, which is numpy's
``packbits`` order. Values become codes nowhere else.

    logits z (float)  →  signs (int8, ±1)  →  codes (uint8, n_bits // 8 bytes per row)

>>> import numpy as np
>>> codes = pack_signs(np.array([[0.3, -2.0, 0.0, -1.0, -1.0, -1.0, -1.0, 1.0]]))
>>> codes
array([[161]], dtype=uint8)
>>> unpack_codes(codes)
array([[ 1, -1,  1, -1, -1, -1, -1,  1]], dtype=int8)
>>> hamming_distances(codes, np.array([[160]], dtype=np.uint8))
array([[1]])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hashnet.errors import CodeError
from hashnet.io import check_whole

MIN_BITS, MAX_BITS = 8, 4096
DEAD = 0.001  # a bit that is the same in all but this fraction of the rows carries no information
KEPT_HASHES = 1 << 20  # 8 MB; the relative error of an estimate is about 1 / sqrt(KEPT_HASHES)
ENOUGH_ROWS = 1_000  # below, a bit may be constant by chance
FEW_CODES = 0.01  # fewer different codes than this share of the rows: the codes have collapsed


def check_n_bits(n_bits: int) -> int:
    """Returns ``n_bits`` when it is a multiple of 8 from 8 to 4096, else raises CodeError."""
    n_bits = check_whole("n_bits", n_bits, 0, CodeError)
    if n_bits % 8:
        below = n_bits // 8 * 8
        raise CodeError(
            f"n_bits must be a multiple of 8, got {n_bits}; the nearest are {below} and {below + 8}"
        )
    if not MIN_BITS <= n_bits <= MAX_BITS:
        raise CodeError(f"n_bits must be between {MIN_BITS} and {MAX_BITS}, got {n_bits}")
    return n_bits


def check_codes(codes: Any, n_bits: int | None = None, name: str = "codes") -> np.ndarray:
    """Returns ``codes`` as a C-contiguous uint8 (n, n_bits // 8) array; one row may come as 1-D."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        raise CodeError(
            f"{name} must be packed uint8, got {codes.dtype}; pack signs with hashnet.codes.pack_signs"
        )
    if codes.ndim == 1:
        codes = codes[None, :]
    if codes.ndim != 2:
        raise CodeError(f"{name} must have shape (n, n_bits // 8), got {codes.shape}")
    check_n_bits(codes.shape[1] * 8)
    if n_bits is not None and codes.shape[1] * 8 != n_bits:
        raise CodeError(f"{name} have {codes.shape[1] * 8} bits where {n_bits} are needed")
    return np.ascontiguousarray(codes)


def pack_signs(signs: Any) -> np.ndarray:
    """Packed codes, uint8 (n, n_bits // 8), of real values or signs (n, n_bits): bit 1 where >= 0.

    Takes numpy arrays and torch tensors on any device. NaN has no sign and is refused.
    """
    if hasattr(signs, "detach"):  # a torch tensor, without importing torch here
        signs = signs.detach().cpu()
        signs = (signs.float() if signs.is_floating_point() and signs.itemsize < 4 else signs).numpy()
    signs = np.asarray(signs)
    if signs.ndim == 1:
        signs = signs[None, :]
    if signs.ndim != 2:
        raise CodeError(f"signs must have shape (n, n_bits), got {signs.shape}")
    check_n_bits(signs.shape[1])
    if signs.dtype.kind == "f" and np.isnan(signs).any():
        row = int(np.isnan(signs).any(axis=1).argmax())
        raise CodeError(f"row {row} holds NaN, which has no sign; look at the model or its input")
    if signs.dtype.kind not in "fi":  # unsigned or bool: every value would count as >= 0
        raise CodeError(f"signs must be signed numbers such as ±1, got {signs.dtype}")
    return np.packbits(signs >= 0, axis=1)


def unpack_codes(codes: Any) -> np.ndarray:
    """Signs ±1, int8 (n, n_bits), of packed codes (n, n_bits // 8)."""
    bits = np.unpackbits(check_codes(codes), axis=1).astype(np.int8)  # (n, n_bits) of 0, 1
    bits *= 2
    bits -= 1
    return bits


def as_words(codes: Any) -> np.ndarray:
    """The same codes as uint64 (n, ceil(n_bits / 64)), zero-padded: for xor + popcount kernels."""
    codes = check_codes(codes)
    n, n_bytes = codes.shape
    if n_bytes % 8 == 0:
        return codes.view(np.uint64)
    padded = np.zeros((n, -(-n_bytes // 8) * 8), dtype=np.uint8)
    padded[:, :n_bytes] = codes
    return padded.view(np.uint64)


def hamming_distances(a: Any, b: Any) -> np.ndarray:
    """Hamming distances, int64 (len(a), len(b)). For small inputs: it builds the whole matrix."""
    a = check_codes(a, name="a")
    b = check_codes(b, n_bits=a.shape[1] * 8, name="b")
    # (len(a), 1, words) ^ (1, len(b), words) → popcount → sum over words
    different = np.bitwise_count(as_words(a)[:, None, :] ^ as_words(b)[None, :, :])
    return different.sum(axis=2, dtype=np.int64)


def distinct(codes: Any) -> int:
    """The number of different codes."""
    codes = check_codes(codes)
    return len(np.unique(codes.view(f"V{codes.shape[1]}").ravel())) if len(codes) else 0


def bit_balance(codes: Any) -> np.ndarray:
    """The fraction of ones per bit, float64 (n_bits,): 0.5 is balanced, 0 and 1 are dead bits."""
    codes = check_codes(codes)
    ones = np.zeros(codes.shape[1] * 8, dtype=np.int64)
    for start in range(0, len(codes), 65_536):  # unpacked bits of one block at a time
        ones += np.unpackbits(codes[start : start + 65_536], axis=1).sum(axis=0, dtype=np.int64)
    return ones / max(len(codes), 1)


def dead_bits(shares: Any) -> np.ndarray:
    """bool (n_bits,): which bits are equal on nearly all rows, of the share of ones per bit.

    >>> dead_bits([0.5, 0.0, 0.002, 0.9995]).tolist()
    [False, True, False, True]
    """
    shares = np.asarray(shares)
    return (shares < DEAD) | (shares > 1 - DEAD)


class DistinctCounter:
    """The number of different codes, block by block in bounded memory; read it at any time.

    Each code is hashed to 64 bits and the ``k`` smallest different hashes are kept. Up to ``k`` codes the
    count is exact; beyond, the k-th smallest hash gives their density: an estimate within 0.3 %.

    >>> counter = DistinctCounter()
    >>> counter.add(np.array([[1], [2], [1]], dtype=np.uint8))
    >>> counter.count, counter.exact
    (2, True)
    """

    def __init__(self, k: int = KEPT_HASHES) -> None:
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
