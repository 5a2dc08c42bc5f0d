"""All pairs of codes within a Hamming radius, exactly: a join on parts of the code, planned from a sample.

Pigeonhole: cut the bits into r + p blocks. Two codes within distance r differ in at most r blocks, so they
are equal on at least p of them. For every choice of p blocks, the codes are sorted by a hash of those bits,
and only codes that meet in a bucket are compared. A pair is kept by the first choice it is equal on, so
that no pair comes twice. p = 0 is the plain scan of everything, which a large radius needs.

Bits are dealt to the blocks by their entropy, so that dead bits do not end up in one block, and p is the
cheapest by the bucket sizes of a sample: skewed codes get longer keys, not endless buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb

import numpy as np

from hashnet.codes import as_words
from hashnet.errors import DataError
from hashnet.kernels import compiled, default_threads, popcount, run_all

SAMPLE = 8192  # rows that a plan looks at
ESTIMATE = 16_384  # rows whose distances say how many pairs there will be
MAX_CHOICES = 80  # of blocks: each sorts all rows once
ROW_NS, COMPARISON_NS = 60.0, 0.6  # one row in one choice (hash, sort, gather); one comparison of a word
TILE = 2048  # codes of a long bucket that stay in the cache while others are compared with them
CHUNK = 1 << 28  # comparisons of one call of the kernel, at most about
SMALL = 1 << 20  # comparisons below which another thread does not pay
NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))
PLACE_BITS = np.uint64(32)  # of a sort key: the hash above, the row below


@dataclass(frozen=True)
class Edges:
    """Pairs of rows, ``left`` and ``right`` int64 (m,), with their ``distances`` int32 (m,); in no order."""

    left: np.ndarray
    right: np.ndarray
    distances: np.ndarray


def join(
    codes: np.ndarray, radius: int, split: int = 0, max_edges: int = 1 << 31, threads: int | None = None
) -> Edges:
    """The pairs of rows of ``codes`` uint8 (n, n_bits // 8) within the radius.

    With ``split`` only pairs of one row below it and one row from it on are found: a join of two sets.
    More than ``max_edges`` pairs are a DataError.
    """
    words, radius = as_words(codes), min(radius, codes.shape[1] * 8)
    found: list[tuple[np.ndarray, ...]] = [NOTHING]
    if len(words) < 2:
        return Edges(*NOTHING)
    masks = plan_join(words, codes.shape[1] * 8, radius, split)
    room = max_edges
    for choice in range(len(masks)):
        for part in _join_choice(words, radius, split, masks, choice, room, threads):
            found.append(part)
            room -= len(part[0])
            if room < 0:
                raise DataError(
                    f"there are more than {max_edges:,} pairs within radius {radius}; use a smaller radius"
                )
    return Edges(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def plan_join(words: np.ndarray, n_bits: int, radius: int, split: int = 0) -> np.ndarray:
    """The choices of blocks, as masks uint64 (choices, words), that are the cheapest way to join words uint64
    (n, words), by the bucket sizes of a sample."""
    n, n_words = words.shape
    rng = np.random.default_rng(0)
    sample = words[np.sort(rng.choice(n, min(n, SAMPLE), replace=False))]
    pairs = split * (n - split) if split else n * (n - 1) / 2
    best, least = None, np.inf  # masks, and the seconds that they are expected to take
    for equal in range(0, n_bits - radius + 1):  # p of the pigeonhole
        n_choices = comb(radius + equal, equal)
        if n_choices > MAX_CHOICES:
            break
        masks = _masks(sample, n_bits, radius + equal, equal)
        share = float(np.mean([_share_of_pairs(sample, mask) for mask in masks]))
        sorting = ROW_NS * n * n_choices * 1e-9 if equal else 0.0
        seconds = sorting + COMPARISON_NS * n_words * pairs * share * n_choices * 1e-9
        if seconds < least:
            best, least = masks, seconds
        if sorting > least:  # more choices cost more than they can save
            break
    assert best is not None
    return best


def estimate_pairs(codes: np.ndarray, radius: int, split: int = 0) -> np.ndarray:
    """About how many pairs lie within each radius 0 … radius, float64, from the distances in a sample."""
    words, n = as_words(codes), len(codes)
    rng = np.random.default_rng(1)
    if split:
        one = words[rng.choice(split, min(split, ESTIMATE // 2), replace=False)]
        other = words[split + rng.choice(n - split, min(n - split, ESTIMATE // 2), replace=False)]
        near = _near_histogram(np.concatenate([one, other]).T.copy(), len(one), radius)
        scale = split / len(one) * (n - split) / len(other)
    else:
        some = words[rng.choice(n, min(n, ESTIMATE), replace=False)]
        near = _near_histogram(some.T.copy(), 0, radius)
        scale = n * (n - 1) / max(len(some) * (len(some) - 1), 1)
    return np.cumsum(near) * scale


def _masks(sample: np.ndarray, n_bits: int, n_blocks: int, equal: int) -> np.ndarray:
    """uint64 (choices, words): the bits of each choice of ``equal`` blocks out of ``n_blocks``."""
    n_words = sample.shape[1]
    bits = np.unpackbits(sample.view(np.uint8), axis=1)[:, :n_bits]  # without the padding of the last word
    by_entropy = np.argsort(np.abs(bits.mean(axis=0) - 0.5), kind="stable")  # the most balanced bit first
    blocks = np.zeros((max(n_blocks, 1), n_words * 64), dtype=np.uint8)
    blocks[np.arange(n_bits) % max(n_blocks, 1), by_entropy] = 1
    chosen = list(combinations(range(n_blocks), equal))
    masks = np.array([blocks[list(some)].sum(axis=0, dtype=np.uint8) for some in chosen], dtype=np.uint8)
    return np.packbits(masks, axis=1).view(np.uint64)


def _share_of_pairs(sample: np.ndarray, mask: np.ndarray) -> float:
    """The share of the sample's pairs that are equal under the mask."""
    n = len(sample)
    if n < 2 or not mask.any():
        return 1.0
    _, counts = np.unique(_hash(sample, mask), return_counts=True)
    return float((counts * (counts - 1)).sum() / (n * (n - 1)))


def _join_choice(
    words: np.ndarray,
    radius: int,
    split: int,
    masks: np.ndarray,
    choice: int,
    room: int,
    threads: int | None,
) -> Iterator[tuple[np.ndarray, ...]]:
    """(left, right, distances) of the pairs that one choice of blocks finds, in parts."""
    n = len(words)
    keys = (_hash(words, masks[choice]) >> PLACE_BITS << PLACE_BITS) | np.arange(n, dtype=np.uint64)
    keys.sort()  # by bucket, in a bucket by row
    rows = (keys & np.uint64((1 << 32) - 1)).astype(np.int64)
    ordered = np.ascontiguousarray(words[rows].T)  # (words, n)
    starts = np.flatnonzero(np.diff(keys >> PLACE_BITS, prepend=~(keys[:1] >> PLACE_BITS)))
    ends = np.append(starts[1:], n)
    if split:
        below = np.concatenate([[0], np.cumsum(rows < split)])
        middles = starts + below[ends] - below[starts]  # the first right row of each bucket
        first, last, second = starts, middles, middles
    else:
        first, last, second = starts, ends, starts
    busy = (last > first) & (ends > second) & (ends - first > 1)
    first, last, second, ends = first[busy], last[busy], second[busy], ends[busy]
    threads = threads or default_threads()
    calls: list[Callable[[], tuple[np.ndarray, ...]]] = [
        partial(_compare, ordered, rows, spans, not split, radius, masks, choice, room)
        for spans in _chunks(np.stack([first, last, second, ends], axis=1), threads)
    ]
    for start in range(0, len(calls), threads):
        yield from run_all(calls[start : start + threads])


def _chunks(spans: np.ndarray, threads: int) -> Iterator[np.ndarray]:
    """Spans int64 (m, 4) of (first, last, second, end) in chunks of equal work, a few for each thread.

    A bucket with more comparisons than a chunk may have is cut between its left rows.
    """
    first, last, second, ends = spans.T
    work = (last - first) * (ends - second)
    chunk = int(np.clip(work.sum() // (4 * threads), SMALL, CHUNK))
    large = work > chunk
    small, done = spans[~large], np.cumsum(work[~large])
    if len(small):
        cuts = np.searchsorted(done, np.arange(chunk, done[-1], chunk))
        yield from np.split(small, np.unique(cuts))
    for a, b, c, d in spans[large].tolist():
        step = max(1, chunk // (d - c))
        for low in range(a, b, step):
            yield np.array([[low, min(low + step, b), c, d]])


@compiled
def _hash(words, mask):  # type: ignore[no-untyped-def]
    """uint64 (n,): a hash of each row's bits under the mask; equal bits give equal hashes."""
    out = np.empty(len(words), dtype=np.uint64)
    for i in range(len(words)):
        h = np.uint64(0)
        for w in range(len(mask)):
            h = (h ^ (words[i, w] & mask[w])) * np.uint64(0x9E3779B97F4A7C15)
            h ^= h >> np.uint64(29)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        out[i] = h ^ (h >> np.uint64(32))
    return out


@compiled
def _compare(codes, rows, spans, ordered, radius, masks, choice, room):  # type: ignore[no-untyped-def]
    """(left, right, distances) of the near pairs of some buckets; stops beyond ``room`` pairs.

    ``codes`` uint64 (words, n) in bucket order, ``rows`` (n,) their row numbers. A span (a, b, c, d) compares
    the positions a … b - 1 with c … d - 1, where ``ordered`` only with those behind the position itself.
    """
    size = 1024
    left, right = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    distances = np.empty(size, dtype=np.int32)
    count = 0
    for s in range(len(spans)):
        a, b, c, d = spans[s, 0], spans[s, 1], spans[s, 2], spans[s, 3]
        for tile in range(c, d, TILE):
            stop = min(tile + TILE, d)
            for i in range(a, b):
                j0 = max(tile, i + 1) if ordered else tile
                if j0 >= stop:
                    continue
                if not _any_near(codes, i, j0, stop, radius):
                    continue
                for j in range(j0, stop):
                    distance = _distance(codes, i, j)
                    if distance > radius or _first_equal(codes, i, j, masks) != choice:
                        continue
                    if count == size:
                        size *= 2
                        left, right = _grown(left, size), _grown(right, size)
                        distances = _grown(distances, size)
                    left[count], right[count] = min(rows[i], rows[j]), max(rows[i], rows[j])
                    distances[count] = distance
                    count += 1
                if count > room:
                    return left[:count].copy(), right[:count].copy(), distances[:count].copy()
    return left[:count].copy(), right[:count].copy(), distances[:count].copy()


@compiled
def _distance(codes, i, j):  # type: ignore[no-untyped-def]
    distance = 0
    for w in range(len(codes)):
        distance += popcount(codes[w, i] ^ codes[w, j])
    return distance


@compiled
def _any_near(codes, i, first, last, radius):  # type: ignore[no-untyped-def]
    """Whether any of the positions first … last - 1 may be within the radius of position i.

    A count without a branch is a loop that LLVM vectorises. Of codes of more than two words the first two
    are compared: a distance on part of the bits is never larger than the whole.
    """
    near = 0
    x = codes[0, i]
    if len(codes) == 1:
        for j in range(first, last):
            near += popcount(codes[0, j] ^ x) <= radius
    else:
        y = codes[1, i]
        for j in range(first, last):
            near += popcount(codes[0, j] ^ x) + popcount(codes[1, j] ^ y) <= radius
    return near > 0


@compiled
def _first_equal(codes, i, j, masks):  # type: ignore[no-untyped-def]
    """The first choice of blocks on which positions i and j are equal."""
    for choice in range(len(masks)):
        equal = True
        for w in range(len(codes)):
            if (codes[w, i] ^ codes[w, j]) & masks[choice, w]:
                equal = False
                break
        if equal:
            return choice
    return -1


@compiled
def _grown(values, size):  # type: ignore[no-untyped-def]
    larger = np.empty(size, dtype=values.dtype)
    larger[: len(values)] = values
    return larger


@compiled
def _near_histogram(codes, split, radius):  # type: ignore[no-untyped-def]
    """int64 (radius + 1,): pairs of codes uint64 (words, n) at each distance, as ``join`` pairs them."""
    near = np.zeros(radius + 1, dtype=np.int64)
    n = codes.shape[1]
    for i in range(split if split else n):
        for tile in range(split if split else i + 1, n, TILE):
            stop = min(tile + TILE, n)
            if _any_near(codes, i, tile, stop, radius):
                for j in range(tile, stop):
                    distance = _distance(codes, i, j)
                    if distance <= radius:
                        near[distance] += 1
    return near
