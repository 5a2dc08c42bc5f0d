"""Exact Hamming search over packed codes: the compiled loops behind ``hashnet.kernels.exact``.

A block of BLOCK codes stays in the cache while all queries of a group scan it. Its distances are
written as bytes (uint16 beyond 248 bits), 64 of them are compared with the query's bound at once,
and only what lies below becomes a candidate. The bound is the k-th best distance so far, kept by
counting candidates per distance; an equal distance met later has a larger position and is not
needed, so the result is ordered by (distance, position) exactly. No array of all distances exists.

A batch reads codes of more than 256 bits interleaved by eights: a vector holds one word of eight rows, and
``eight_distances`` counts ones once for many words. One query, or a few, read them in place.

Codes come flat, uint8 (n * row_bytes,). Kernels run without the GIL on one core; ``exact`` divides the
work among several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hashnet.kernels.jit import (
    LANES,
    compiled,
    eight_distances,
    four_distances,
    four_in_turn,
    interleave_chunk,
    lanes_below,
    load32,
    load64,
    lowest_bit,
    popcount,
)

BLOCK = 4096  # codes of 8 bytes: 32 KB, plus 4 KB of distances
GROUP = 32  # queries that share a block while it is in the cache
LONG = 32  # bytes: longer codes are interleaved by eights for a batch, and read as they lie for one query
LONG_BLOCK = 24 << 10  # bytes of a block of long codes: it stays in the L1 cache
LONG_GROUP = 128  # more queries share a block of long codes: each row is interleaved once for all of them
FEW = 4  # queries that are not worth interleaving for
u64 = np.uint64
CANDIDATES = 1 << 22  # held at once by one thread, 38 MB: a huge k makes groups smaller


class CodeRange(NamedTuple):
    """The rows low … high - 1 of flat ``codes`` uint8 (n * row_bytes,)."""

    codes: np.ndarray
    row_bytes: int
    low: int
    high: int


@compiled
def fill_words(codes, at, end, row_bytes, count, words):  # type: ignore[no-untyped-def]
    """``count`` rows from byte ``at`` on as uint64 words (ceil(row_bytes / 8), BLOCK), zero-padded.

    Long ones are interleaved by eights: (rows / 8, ceil(row_bytes / 8) * 8). No byte from ``end`` on is read.
    """
    if row_bytes > LONG:
        _interleave(codes, at, row_bytes, count, words)
        return
    whole, tail = row_bytes // 8, row_bytes % 8
    for w in range(whole):
        for i in range(count):
            words[w, i] = load64(codes, at + i * row_bytes + 8 * w)
    if tail:
        at += 8 * whole
        mask = (np.uint64(1) << np.uint64(8 * tail)) - np.uint64(1)
        # an 8-byte load in the last rows would read past the end: those go byte by byte
        safe = min(count, max(0, (end - 8 - at) // row_bytes + 1))
        for i in range(safe):
            words[whole, i] = load64(codes, at + i * row_bytes) & mask
        for i in range(safe, count):
            words[whole, i] = _last_word(codes, at + i * row_bytes, tail)


@compiled
def _interleave(codes, at, row_bytes, count, words):  # type: ignore[no-untyped-def]
    """Word w of row i becomes ``words[i // 8, 8 * w + i % 8]``: the form ``eight_distances`` reads."""
    chunks, whole, tail = row_bytes // LANES, row_bytes // 8, row_bytes % 8
    for i in range(0, count - 7, 8):
        for chunk in range(chunks):
            place = i // 8 * words.shape[1] + LANES * chunk
            interleave_chunk(codes, at + i * row_bytes + LANES * chunk, row_bytes, words, place)
    for i in range(count):  # the words beyond whole chunks, and all words of the last rows
        eight, lane, row_at = words[i // 8], i % 8, at + i * row_bytes
        for w in range(8 * chunks if i < count // 8 * 8 else 0, whole):
            eight[8 * w + lane] = load64(codes, row_at + 8 * w)
        if tail:
            eight[8 * whole + lane] = _last_word(codes, row_at + 8 * whole, tail)


@compiled
def _last_word(codes, at, n_bytes):  # type: ignore[no-untyped-def]
    """Fewer than 8 bytes from ``at`` on as a word, padded with zeros."""
    word = u64(0)
    for b in range(n_bytes):
        word |= u64(codes[at + b]) << u64(8 * b)
    return word


@compiled
def block_distances(codes, at, row_bytes, count, words, query, out):  # type: ignore[no-untyped-def]
    """Writes the distances of ``query`` to ``count`` rows from byte ``at`` on into ``out``.

    ``words`` is the rows' transposed copy; if it is empty, they are read in place.
    """
    if words.size == 0 and row_bytes == 8:
        a = query[0]
        for i in range(count):
            out[i] = popcount(load64(codes, at + i * 8) ^ a)
    elif words.size == 0 and row_bytes == 4:
        short = np.uint32(query[0])
        for i in range(count):
            out[i] = popcount(load32(codes, at + i * 4) ^ short)
    elif words.size == 0 and row_bytes == 16:
        a, b = query[0], query[1]
        for i in range(count):
            out[i] = popcount(load64(codes, at + i * 16) ^ a) + popcount(load64(codes, at + i * 16 + 8) ^ b)
    elif row_bytes > LONG and words.size:
        for i in range(0, count, 8):  # the last eight may be fewer: ``out`` has room for what is not wanted
            eight_distances(words, i // 8 * words.shape[1], query, len(query), out, i)
    elif row_bytes > LONG:
        _long_distances(codes, at, row_bytes, count, query, out)
    elif words.size == 0:  # 32 bytes
        a, b, c, d = query[0], query[1], query[2], query[3]
        for i in range(count):
            j = at + i * 32
            out[i] = (
                popcount(load64(codes, j) ^ a)
                + popcount(load64(codes, j + 8) ^ b)
                + popcount(load64(codes, j + 16) ^ c)
                + popcount(load64(codes, j + 24) ^ d)
            )
    else:
        first, a = words[0], query[0]
        if len(query) % 2:
            for i in range(count):
                out[i] = popcount(first[i] ^ a)
        else:
            second, b = words[1], query[1]
            for i in range(count):
                out[i] = popcount(first[i] ^ a) + popcount(second[i] ^ b)
        for w in range(2 - len(query) % 2, len(query), 2):
            first, second, a, b = words[w], words[w + 1], query[w], query[w + 1]
            for i in range(count):
                out[i] += popcount(first[i] ^ a) + popcount(second[i] ^ b)


@compiled
def _long_distances(codes, at, row_bytes, count, query, out):  # type: ignore[no-untyped-def]
    """The same for rows of more than 32 bytes, four at a time; the last few and odd ends go singly."""
    chunks, four = row_bytes // LANES, out.view(np.uint64)  # four distances of 16 bits
    for i in range(count // 4):
        start = at + 4 * i * row_bytes
        if chunks == 1:
            four[i] = four_distances(codes, start, row_bytes, query, chunks)
        else:
            four[i] = four_in_turn(codes, start, row_bytes, query, chunks)
    _rest_distances(codes, at, row_bytes, count, query, out)


@compiled
def _rest_distances(codes, at, row_bytes, count, query, out):  # type: ignore[no-untyped-def]
    """Adds what fours of rows and chunks of 64 bytes leave over: the ends of rows, and the last rows."""
    chunks, rest, fours = row_bytes // LANES, row_bytes % LANES, count // 4 * 4
    for i in range(fours if rest == 0 else 0, count):
        if i >= fours:
            out[i] = _rest_distance(codes, at + i * row_bytes, row_bytes, query, 0)
        else:
            out[i] += _rest_distance(codes, at + i * row_bytes + LANES * chunks, rest, query, 8 * chunks)


@compiled
def _rest_distance(codes, at, n_bytes, query, w):  # type: ignore[no-untyped-def]
    """The distance of ``n_bytes`` from ``at`` on to the words of the query from ``w`` on."""
    distance = u64(0)
    for word in range(n_bytes // 8):
        distance += popcount(load64(codes, at + 8 * word) ^ query[w + word])
    if n_bytes % 8:
        whole = n_bytes // 8
        distance += popcount(_last_word(codes, at + 8 * whole, n_bytes % 8) ^ query[w + whole])
    return distance


@compiled
def block_rows(row_bytes):  # type: ignore[no-untyped-def]
    """Rows of a block: BLOCK, or fewer long ones, so that they stay in the cache."""
    return BLOCK if row_bytes <= LONG else max(LANES, LONG_BLOCK // row_bytes // LANES * LANES)


@compiled
def transposed_words(row_bytes, n_queries):  # type: ignore[no-untyped-def]
    """Room for a block's transposed copy; empty where reading the rows as they lie is faster."""
    n_words = (row_bytes + 7) // 8
    if row_bytes > LONG:
        return np.empty((0 if n_queries < FEW else block_rows(row_bytes) // 8, n_words * 8), np.uint64)
    as_they_lie = row_bytes in (4, 8) or (row_bytes in (16, 32) and n_queries < 8)
    return np.empty((0 if as_they_lie else n_words, BLOCK), np.uint64)


def block_scratch(n_bits: int) -> np.ndarray:
    """Scratch for the distances of one block and LANES of padding, which is n_bits + 1: beyond everything."""
    return np.empty(BLOCK + LANES, dtype=np.uint8 if n_bits < 255 else np.uint16)


@compiled
def scan_top_k(rows, queries, allowed, out, positions, distances):  # type: ignore[no-untyped-def]
    """Fills ``positions`` int64 and ``distances`` int32 (q, k) with the k nearest of a CodeRange.

    ``queries`` uint64 (q, words); ``allowed`` uint8 (n,) is 1 where a row may be found, or empty where all
    may; ``out`` a ``block_scratch``. Unused slots stay as they are.
    """
    codes, row_bytes, low, high = rows
    n_bits, n_queries, k = row_bytes * 8, len(queries), positions.shape[1]
    # candidates of each query of a group: row, distance, and per distance how many there are
    room = min(2 * k + max(k, 4 * LANES), high - low)
    group = min(LONG_GROUP if row_bytes > LONG else GROUP, n_queries, max(1, CANDIDATES // room))
    found = np.empty((group, room), np.int64)
    far = np.empty((group, room), out.dtype)
    counts = np.empty((group, n_bits + 2), np.int64)
    used = np.empty(group, np.int64)  # candidates kept
    bounds = np.empty(group, np.int64)  # only items nearer than this still matter
    within = np.empty(group, np.int64)  # candidates at most ``bound`` away
    words, block = transposed_words(row_bytes, n_queries), block_rows(row_bytes)
    filtered = len(allowed) > 0
    for first in range(0, n_queries, group):
        size = min(group, n_queries - first)
        counts[:] = 0
        used[:] = 0
        within[:] = 0
        bounds[:] = n_bits + 1
        for start in range(low, high, block):
            count = min(block, high - start)
            if words.size:
                fill_words(codes, start * row_bytes, len(codes), row_bytes, count, words)
            for j in range(size):
                # distances of query j to the block's rows, 64 at a time compared with its bound
                block_distances(codes, start * row_bytes, row_bytes, count, words, queries[first + j], out)
                out[count : count + LANES] = n_bits + 1  # never below a bound
                bound, n_used, n_within = bounds[j], used[j], within[j]
                for lane in range(0, count, LANES):
                    mask = lanes_below(out, lane, out.dtype.type(bound))
                    while mask != 0:
                        i = lane + lowest_bit(mask)
                        mask &= mask - np.uint64(1)
                        distance = np.int64(out[i])
                        row = start + i
                        # the bound may have moved since the 64 were compared
                        if distance >= bound or (filtered and allowed[row] == 0):
                            continue
                        found[j, n_used] = row
                        far[j, n_used] = out[i]
                        n_used += 1
                        counts[j, distance] += 1
                        n_within += 1
                        while n_within - counts[j, bound] >= k:  # k candidates lie closer: tighten
                            n_within -= counts[j, bound]
                            bound -= 1
                        if n_used == room:  # fewer than 2 k lie within the bound: see the tests
                            n_used = _drop_beyond(found[j], far[j], n_used, bound)
                bounds[j], used[j], within[j] = bound, n_used, n_within
        for j in range(size):
            _sort_candidates(
                found[j], far[j], used[j], counts[j], bounds[j], k, positions[first + j], distances[first + j]
            )


@compiled
def _drop_beyond(found, far, n_used, bound):  # type: ignore[no-untyped-def]
    """Removes the candidates farther than the bound, in order; how many stay."""
    kept = 0
    for c in range(n_used):
        if far[c] <= bound:
            found[kept] = found[c]
            far[kept] = far[c]
            kept += 1
    return kept


@compiled
def _sort_candidates(found, far, n_used, counts, bound, k, positions, distances):  # type: ignore[no-untyped-def]
    """Counting sort by distance; stable, and candidates lie in position order already."""
    n_before = 0
    for distance in range(len(counts)):
        here = counts[distance]
        counts[distance] = n_before  # from now on: the slot of the next one at this distance
        n_before += here
    for c in range(n_used):
        distance = far[c]
        if distance <= bound:
            slot = counts[distance]
            if slot < k:
                positions[slot] = found[c]
                distances[slot] = distance
            counts[distance] = slot + 1


@compiled
def scan_radius(rows, queries, radius, allowed, out):  # type: ignore[no-untyped-def]
    """(counts int64 (q,), positions int64, distances int32): all of a CodeRange within ``radius``.

    The hits of query 0 come first, then those of query 1 and so on, each by (distance, position).
    """
    codes, row_bytes, low, high = rows
    n_bits, n_queries = row_bytes * 8, len(queries)
    counts = np.zeros(n_queries, np.int64)
    positions, distances, n_all = np.empty(1024, np.int64), np.empty(1024, np.int32), 0
    found, keys, n_found = np.empty(1024, np.int64), np.empty(1024, np.int64), 0
    words, block = transposed_words(row_bytes, n_queries), block_rows(row_bytes)
    filtered = len(allowed) > 0
    steps = radius + 1
    bound = out.dtype.type(steps)
    for first in range(0, n_queries, GROUP):
        size = min(GROUP, n_queries - first)
        n_found = 0
        for start in range(low, high, block):
            count = min(block, high - start)
            if words.size:
                fill_words(codes, start * row_bytes, len(codes), row_bytes, count, words)
            for j in range(size):
                block_distances(codes, start * row_bytes, row_bytes, count, words, queries[first + j], out)
                out[count : count + LANES] = n_bits + 1
                for lane in range(0, count, LANES):
                    mask = lanes_below(out, lane, bound)
                    while mask != 0:
                        i = lane + lowest_bit(mask)
                        mask &= mask - np.uint64(1)
                        row = start + i
                        if filtered and allowed[row] == 0:
                            continue
                        if n_found == len(found):
                            found, keys = _doubled(found, n_found), _doubled(keys, n_found)
                        found[n_found] = row
                        keys[n_found] = j * steps + out[i]
                        n_found += 1
        slots = np.zeros(size * steps + 1, np.int64)  # counting sort by (query, distance), stable
        for c in range(n_found):
            slots[keys[c] + 1] += 1
        for key in range(size * steps):
            slots[key + 1] += slots[key]
        for j in range(size):
            counts[first + j] = slots[(j + 1) * steps] - slots[j * steps]
        while n_all + n_found > len(positions):
            positions, distances = _doubled(positions, n_all), _doubled(distances, n_all)
        for c in range(n_found):
            slot = n_all + slots[keys[c]]
            slots[keys[c]] += 1
            positions[slot] = found[c]
            distances[slot] = keys[c] % steps
        n_all += n_found
    return counts, positions[:n_all], distances[:n_all]


@compiled
def _doubled(array, used):  # type: ignore[no-untyped-def]
    """A copy with twice the room."""
    larger = np.empty(2 * len(array), array.dtype)
    larger[:used] = array[:used]
    return larger
