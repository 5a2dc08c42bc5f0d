"""A piece of the database made ready for counting, and the partial results pieces add up to.

    Shard.build(codes, labels, row_ids).count(queries, …) → QueryCounts     for every piece
    QueryCounts.merge(pieces, k) → QueryCounts                                of the whole database

Counts are integers and keys are ordered by (distance, hash of the row id), so the merged result
is the same, bit for bit, however the database was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hashnet.codes import as_words, check_codes
from hashnet.kernels import (
    ITEMS,
    WORDS,
    aligned,
    block_planes,
    compiled,
    default_threads,
    plan_queries,
    popcount,
    scan,
    scratch_planes,
    sum_planes,
)
from hashnet.metrics.relevance import ClassItems, LabelSets, class_items
from hashnet.metrics.ties import tie_hash

QUERIES = 64  # queries that share a block of the database while it is in the cache
SCRATCH = 1 << 24  # words a thread may hold for candidates and marks: 128 MiB


@dataclass(frozen=True)
class QueryCounts:
    """What one piece of the database says about q queries.

    ``counts`` int64 (2, q, n_bits + 1): all and relevant items at each distance. ``keys`` uint64
    (q, m): the m <= k best candidates, ascending (``hashnet.metrics.ties`` says what a key holds).
    """

    counts: np.ndarray
    keys: np.ndarray

    @classmethod
    def merge(cls, pieces: Sequence[QueryCounts], k: int) -> QueryCounts:
        """The counts of several pieces together, with the k best of all their candidates."""
        counts = sum((piece.counts for piece in pieces[1:]), start=pieces[0].counts)
        if len(pieces) == 1:
            return cls(counts, pieces[0].keys[:, :k])
        keys = np.concatenate([piece.keys for piece in pieces], axis=1)
        if keys.shape[1] > k:
            keys = np.partition(keys, k - 1, axis=1)[:, :k]
        return cls(counts, np.sort(keys, axis=1))


@dataclass(frozen=True)
class Shard:
    """Database items as bit planes: those of even codes in the order of their tie hash, then of odd ones."""

    n: int
    n_even: int
    n_bits: int
    planes: np.ndarray  # uint64, blocks of (planes, WORDS)
    hashes: np.ndarray  # uint64, one a place; a block's places that hold no item have 0
    items: ClassItems

    @classmethod
    def build(
        cls, codes: np.ndarray, labels: LabelSets, row_ids: np.ndarray | None = None, seed: int = 0
    ) -> Shard:
        """The shard of packed codes (n, n_bits // 8); row ids default to 0 … n - 1."""
        codes = check_codes(codes)
        hashes = tie_hash(np.arange(len(codes)) if row_ids is None else row_ids, seed)
        odd = np.bitwise_count(as_words(codes)).sum(axis=1) & 1
        n_even = len(codes) - int(odd.sum())
        order = np.lexsort((hashes, odd))  # by parity, then by hash
        even_places = -(-n_even // ITEMS) * ITEMS
        n_places = even_places + -(-(len(codes) - n_even) // ITEMS) * ITEMS
        at = np.arange(len(codes))
        at[n_even:] += even_places - n_even  # a block is even or odd
        places = np.empty(len(codes), dtype=np.int64)
        places[order] = at
        row_at = np.full(n_places, -1)
        row_at[at] = order
        planes = bit_planes(codes, row_at)
        hash_at = np.zeros(n_places, dtype=np.uint64)
        hash_at[places] = hashes
        items = class_items(labels, places, n_places // 64)
        return cls(len(codes), n_even, codes.shape[1] * 8, planes, hash_at, items)

    def count(
        self, query_codes: np.ndarray, query_labels: LabelSets, k: int, threads: int | None = None
    ) -> QueryCounts:
        """The QueryCounts of packed query codes (q, n_bits // 8) with their labels."""
        k = min(k, self.n)
        bits = np.unpackbits(check_codes(query_codes, self.n_bits), axis=1)
        plan = plan_queries(bits)
        items = self.items
        counts = np.zeros((2, len(bits), self.n_bits + 16), dtype=np.int64)
        keys = np.zeros((len(bits), k), dtype=np.uint64)

        together = max(1, min(QUERIES, SCRATCH // (k + 2 * ITEMS + self.n // 64)))
        starts = range(0, len(bits), together)

        def work(mine: Sequence[int]) -> None:
            planes = aligned(scratch_planes(self.n_bits) * WORDS)
            marks = np.zeros((together, len(self.hashes) // 64), dtype=np.uint64)
            kept = np.zeros((together, k + 2 * ITEMS), dtype=np.uint64)
            for first in mine:
                scan(
                    first,
                    min(first + together, len(bits)),
                    plan,
                    query_labels.start,
                    query_labels.classes,
                    self.planes,
                    self.n,
                    self.n_even,
                    items.dense_of,
                    items.dense,
                    items.list_start,
                    items.lists,
                    self.hashes,
                    k,
                    planes,
                    marks,
                    kept,
                    counts,
                    keys,
                )

        threads = min(threads or default_threads(), len(starts))
        if threads <= 1:
            work(starts)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, (starts[place::threads] for place in range(threads))))
        return QueryCounts(counts[:, :, : self.n_bits + 1].copy(), keys)


def bit_planes(codes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """codes[order] as the blocks of planes that ``hashnet.kernels.bitslice`` tells of, uint64, flat.

    ``order`` fills whole blocks, with -1 where there is no item. Plane b is bit b in the
    order of numpy's unpackbits; bit i of word w is item 64 w + i.
    """
    n_bits = codes.shape[1] * 8
    planes = aligned(len(order) // ITEMS * block_planes(n_bits) * WORDS)
    _fill(as_words(codes), order, n_bits, sum_planes(n_bits), planes)
    return planes


@compiled
def _fill(words, order, n_bits, n_sum, planes):  # type: ignore[no-untyped-def]
    n, stride = len(order), (n_bits + 1 + n_sum) * WORDS
    square = np.zeros(64, dtype=np.uint64)
    ones = np.zeros(64, dtype=np.uint64)
    for group in range(n // 64):  # 64 items fill one word of every plane
        base = group // WORDS * stride + group % WORDS
        ones[:] = 0
        for part in range(words.shape[1]):
            for i in range(64):
                row = order[group * 64 + i]
                square[i] = words[row, part] if row >= 0 else np.uint64(0)
                ones[i] += popcount(square[i])
            _transpose_square(square)
            # the word is little-endian, and codes are packed with the most significant bit first
            for b in range(min(64, n_bits - part * 64)):
                planes[base + (part * 64 + (b ^ 7)) * WORDS] = square[b]
        _transpose_square(ones)
        for b in range(n_sum):
            planes[base + (n_bits + 1 + b) * WORDS] = ones[b]


@compiled
def _transpose_square(a):  # type: ignore[no-untyped-def]
    """Transposes a 64 x 64 bit matrix in place: bit j of word i becomes bit i of word j."""
    step, mask = 32, np.uint64(0x00000000FFFFFFFF)
    while step:
        for i in range(64):
            if not i & step:
                t = ((a[i] >> np.uint64(step)) ^ a[i + step]) & mask
                a[i] ^= t << np.uint64(step)
                a[i + step] ^= t
        step >>= 1
        mask ^= mask << np.uint64(step) if step else np.uint64(0)
