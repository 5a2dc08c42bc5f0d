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
    ClassItems,
    PlaneItems,
    Queries,
    bit_planes,
    count_and_rank,
    default_threads,
    new_scratch,
    plan_queries,
)
from hashnet.metrics.relevance import LabelSets, class_items
from hashnet.metrics.tie_breaking import tie_hash

QUERIES = 64  # queries that share a block of the database while it is in the cache
SCRATCH = 1 << 24  # words a thread may hold for candidates and marks: 128 MiB


@dataclass(frozen=True)
class QueryCounts:
    """What one piece of the database says about q queries.

    ``counts`` int64 (2, q, n_bits + 1): all and relevant items at each distance. ``keys`` uint64
    (q, m): the m <= k best candidates, ascending (``hashnet.metrics.tie_breaking`` says what a key holds).
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
    """Database items as bit planes, each parity in the order of its tie hash, and the items of each class."""

    n_bits: int
    items: PlaneItems
    classes: ClassItems

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
        hash_at = np.zeros(n_places, dtype=np.uint64)
        hash_at[places] = hashes
        items = PlaneItems(bit_planes(codes, row_at), hash_at, len(codes), n_even)
        return cls(codes.shape[1] * 8, items, class_items(labels, places, n_places // 64))

    def count(
        self, query_codes: np.ndarray, query_labels: LabelSets, k: int, threads: int | None = None
    ) -> QueryCounts:
        """The QueryCounts of packed query codes (q, n_bits // 8) with their labels."""
        k, n_places = min(k, self.items.n), len(self.items.hashes)
        bits = np.unpackbits(check_codes(query_codes, self.n_bits), axis=1)
        queries = Queries(plan_queries(bits), query_labels.start, query_labels.classes)
        counts = np.zeros((2, len(bits), self.n_bits + 16), dtype=np.int64)
        keys = np.zeros((len(bits), k), dtype=np.uint64)
        group = max(1, min(QUERIES, SCRATCH // (k + 2 * ITEMS + self.items.n // 64)))
        starts = range(0, len(bits), group)

        def work(mine: Sequence[int]) -> None:
            scratch = new_scratch(self.n_bits, group, n_places, k)
            for first in mine:
                last = min(first + group, len(bits))
                count_and_rank(queries, first, last, self.items, self.classes, scratch, counts, keys)

        threads = min(threads or default_threads(), len(starts))
        if threads <= 1:
            work(starts)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, (starts[place::threads] for place in range(threads))))
        return QueryCounts(counts[:, :, : self.n_bits + 1].copy(), keys)
