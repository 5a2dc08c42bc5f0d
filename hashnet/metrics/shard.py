"""A piece of the database prepared for counting, and the partial results that pieces add up to.

    Shard.build(codes, labels, row_ids).count(queries, …) → QueryCounts     for every piece
    ScoreShard.build(codes, labels, row_ids).rank(logits, …) → Ranking      the asymmetric ranking
    QueryCounts.merge(pieces, k) → QueryCounts                              of the whole database

A candidate is one uint64, and ascending keys are the ranking:

    distance (11 bits) | hash of the row id (52 bits) | relevant (1 bit)       up to 2,040 bits
    distance (13 bits) | hash of the row id (50 bits) | relevant (1 bit)       longer codes

Items at equal distance are ordered by a seeded hash of their row id, which depends neither on shards nor
on storage order: a database stored sorted by class is not ranked better than a shuffled one, and the
merged result is the same, bit for bit, however the database was cut. Items of equal score follow the same
rule: a ScoreShard keeps its items in the order of their hashes, so that the earlier of two is the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hashnet.codes import as_words, check_codes
from hashnet.errors import CodeError
from hashnet.io import as_array
from hashnet.kernels import (
    HASH_BITS,
    ITEMS,
    ClassItems,
    PlaneItems,
    Queries,
    bit_planes,
    compiled,
    count_and_rank,
    default_threads,
    hash_bits,
    new_scratch,
    plan_queries,
    top_scores,
)
from hashnet.labels import LabelSets

QUERIES = 64  # queries that share a block of the database while it is in the cache
SCRATCH = 1 << 24  # words a thread may hold for candidates and marks: 128 MiB
RARE = 64  # a class on fewer than one item in 64 is kept as a list of places, any other as a bit mask
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


NOTHING = np.uint64(2**64 - 1)  # the key of an unused place: after every other


@dataclass(frozen=True)
class Ranking:
    """The m <= k best of q queries: ``scores`` float32 (q, m), descending, and ``keys`` uint64 (q, m).

    A key is the tie hash of the item and, in its lowest bit, whether it is relevant.
    """

    scores: np.ndarray
    keys: np.ndarray

    @classmethod
    def merge(cls, pieces: Sequence[Ranking], k: int) -> Ranking:
        """The k best of all pieces, by (score descending, tie hash)."""
        scores = np.concatenate([piece.scores for piece in pieces], axis=1)
        keys = np.concatenate([piece.keys for piece in pieces], axis=1)
        order = np.lexsort((keys, -scores), axis=1)[:, :k]
        return cls(np.take_along_axis(scores, order, axis=1), np.take_along_axis(keys, order, axis=1))

    def relevance(self) -> np.ndarray:
        """uint8 (q, m): 1 where the item at a rank is relevant."""
        return ((self.keys & np.uint64(1) == 1) & (self.keys != NOTHING)).astype(np.uint8)

    def rows(self, first: int, last: int) -> Ranking:
        return Ranking(self.scores[first:last], self.keys[first:last])


@dataclass(frozen=True)
class QueryCounts:
    """What one piece of the database says about q queries.

    ``counts`` int64 (2, q, n_bits + 1): all and relevant items at each distance. ``keys`` uint64
    (q, m): the m <= k best candidates, ascending. ``ranking`` is the asymmetric one, where logits were given.
    """

    counts: np.ndarray
    keys: np.ndarray
    ranking: Ranking | None = None

    @classmethod
    def merge(cls, pieces: Sequence[QueryCounts], k: int) -> QueryCounts:
        """The counts of several pieces together, with the k best of all their candidates."""
        counts = sum((piece.counts for piece in pieces[1:]), start=pieces[0].counts)
        if len(pieces) == 1:
            return cls(counts, pieces[0].keys[:, :k], pieces[0].ranking)
        keys = np.concatenate([piece.keys for piece in pieces], axis=1)
        if keys.shape[1] > k:
            keys = np.partition(keys, k - 1, axis=1)[:, :k]
        rankings = [piece.ranking for piece in pieces if piece.ranking is not None]
        return cls(counts, np.sort(keys, axis=1), Ranking.merge(rankings, k) if rankings else None)

    def rows(self, first: int, last: int) -> QueryCounts:
        """Those of queries ``first`` to ``last - 1``."""
        ranking = None if self.ranking is None else self.ranking.rows(first, last)
        return QueryCounts(self.counts[:, first:last], self.keys[first:last], ranking)


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
        hash_at[places] = hashes >> np.uint64(HASH_BITS - hash_bits(codes.shape[1] * 8))
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


def class_items(labels: LabelSets, places: np.ndarray, n_words: int) -> ClassItems:
    """ClassItems of rows that lie at ``places`` int64 (n,), in masks of ``n_words`` words."""
    sizes = np.bincount(labels.classes, minlength=labels.n_classes)[: labels.n_classes]
    frequent = sizes * RARE >= max(len(labels), 1)
    mask_of = np.where(frequent, np.cumsum(frequent) - 1, -1).astype(np.int32)
    list_start = np.zeros(labels.n_classes + 1, dtype=np.int64)
    np.cumsum(np.where(frequent, 0, sizes), out=list_start[1:])
    masks = np.zeros((int(frequent.sum()), n_words), dtype=np.uint64)
    lists = np.zeros(list_start[-1], dtype=np.int32)
    _fill(labels.start, labels.classes, places, mask_of, masks, list_start[:-1].copy(), lists)
    return ClassItems(mask_of, masks, list_start, lists)


@compiled
def _fill(start, classes, places, mask_of, masks, free, lists):  # type: ignore[no-untyped-def]
    """Writes each row's place into the mask or the list of each of its classes."""
    for row in range(len(start) - 1):
        place = places[row]
        for a in range(start[row], start[row + 1]):
            c = classes[a]
            if mask_of[c] >= 0:
                masks[mask_of[c], place >> 6] |= np.uint64(1) << np.uint64(place & 63)
            else:
                lists[free[c]] = place
                free[c] += 1


@dataclass(frozen=True)
class ScoreShard:
    """Codes in the order of their tie hashes, with the classes of each as bits."""

    codes: np.ndarray  # uint8 (n, n_bits // 8)
    hashes: np.ndarray  # uint64 (n,), ascending
    classes: np.ndarray  # uint64 (n, classes / 64)

    @classmethod
    def build(
        cls, codes: np.ndarray, labels: LabelSets, row_ids: np.ndarray | None = None, seed: int = 0
    ) -> ScoreShard:
        """Of packed codes (n, n_bits // 8); row ids default to 0 … n - 1."""
        codes = check_codes(codes)
        hashes = tie_hash(np.arange(len(codes)) if row_ids is None else row_ids, seed)
        order = np.argsort(hashes)
        return cls(np.ascontiguousarray(codes[order]), hashes[order], class_bits(labels)[order])

    def rank(
        self, logits: np.ndarray, query_labels: LabelSets, k: int, threads: int | None = None
    ) -> Ranking:
        """The k best of queries with logits float32 (q, n_bits), by <logits, signs>."""
        k = min(k, len(self.codes))
        places, scores = top_scores(self.codes, logits, k, threads=threads)
        return self.ranking(places, scores, query_labels)

    def ranking(self, places: np.ndarray, scores: np.ndarray, query_labels: LabelSets) -> Ranking:
        """The Ranking of places (q, m) in this shard, -1 where unused, with their scores."""
        relevant = np.zeros(places.shape, dtype=np.uint64)
        _mark_relevant(places, self.classes, class_bits(query_labels), relevant)
        keys = (self.hashes[places] << np.uint64(1)) | relevant
        return Ranking(scores, np.where(places >= 0, keys, NOTHING))


def class_bits(labels: LabelSets) -> np.ndarray:
    """uint64 (n, n_classes / 64): bit c % 64 of word c // 64 says whether a row has class c."""
    bits = np.zeros((len(labels), -(-max(labels.n_classes, 1) // 64)), dtype=np.uint64)
    rows, classes = np.repeat(np.arange(len(labels)), labels.per_row), labels.classes.astype(np.int64)
    np.bitwise_or.at(bits, (rows, classes >> 6), np.uint64(1) << (classes & 63).astype(np.uint64))
    return bits


@compiled
def _mark_relevant(places, classes, wanted, relevant):  # type: ignore[no-untyped-def]
    """Sets relevant[q, i] to 1 where item ``places[q, i]`` shares a class with query q."""
    for q in range(places.shape[0]):
        for i in range(places.shape[1]):
            if places[q, i] >= 0:
                for w in range(classes.shape[1]):
                    if classes[places[q, i], w] & wanted[q, w]:
                        relevant[q, i] = np.uint64(1)
                        break


def check_query_logits(logits: object, n_queries: int, n_bits: int) -> np.ndarray:
    """The queries' logits as C-contiguous float32 (q, n_bits)."""
    array = as_array(logits, "query logits")
    if array.shape != (n_queries, n_bits) or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise CodeError(
            f"query logits must be finite numbers of shape ({n_queries}, {n_bits}), got {array.dtype} "
            f"{array.shape}"
        )
    return np.ascontiguousarray(array, dtype=np.float32)
