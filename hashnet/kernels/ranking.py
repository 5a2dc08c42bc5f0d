"""One pass of query codes over a shard: counts per distance, and the k best of every query.

Items of even codes come first, then those of odd ones (by their ones), each in the order of their tie hash.
Items at one distance are all even or all odd, and an earlier one ranks first, so the k best can be kept while
counting: an item matters only if fewer than k items before it are at least as near. Because that order is
random, the counts so far also tell how far the k-th item will lie in the end; should that guess prove too
small for a query, the query is scanned again.
"""

from __future__ import annotations

import numpy as np

from hashnet.kernels.bitslice import ITEMS, ONES, WORDS, U, distances, sum_planes
from hashnet.kernels.histogram import ONE, distance_at, histogram, lowest, within
from hashnet.kernels.jit import compiled, popcount

DENSE = 32  # relevant items are counted one by one where fewer than one in 32 is relevant
HASH_BITS = 52  # of a candidate key
_HASH_AT, _DISTANCE_AT = np.uint64(1), np.uint64(HASH_BITS + 1)  # fields of a candidate key


def scratch_planes(n_bits: int) -> int:
    """Planes of scratch that ``scan`` works in: distances and sums, masks (two more), four carries."""
    return 3 * sum_planes(n_bits) + 2 + 4


@compiled
def scan(
    first,
    last,
    plan,
    query_start,
    query_classes,
    P,
    n,
    n_even,
    dense_of,
    dense,
    list_start,
    lists,
    hashes,
    k,
    scratch,
    R,
    kept,
    counts,
    keys,
):  # type: ignore[no-untyped-def]
    """Fills the counts and keys of queries ``first`` to ``last - 1``, which share cached blocks.

    counts int64 (2, q, n_bits + 16): all and relevant items by distance. keys uint64 (q, min(k, n)). ``plan``
    comes from ``plan_queries``. P: the planes of the blocks, one after another; those of the ``n_even`` items
    with even codes come first.
    ``dense[dense_of[c]]`` is the mask of class c's items; where dense_of[c] < 0,
    ``lists[list_start[c]:list_start[c + 1]]`` are its places. What is
    left is scratch: ``scratch_planes`` planes, R for a mask of relevant items a query, kept for k + 2 ITEMS
    candidates a query.
    """
    n_bits, n_sum = counts.shape[2] - 16, 7
    while (1 << n_sum) <= n_bits:
        n_sum += 1
    zeros, stride = n_bits * WORDS, (n_bits + 1 + n_sum) * WORDS
    n_blocks = len(P) // stride
    D, S = scratch[: n_sum * WORDS], scratch[n_sum * WORDS : 2 * n_sum * WORDS]
    T, C = scratch[2 * n_sum * WORDS : (3 * n_sum + 2) * WORDS], scratch[(3 * n_sum + 2) * WORDS :]
    n_kept = np.zeros(last - first, dtype=np.int64)
    guess = np.full(last - first, n_bits, dtype=np.int64)
    few = np.zeros(last - first, dtype=np.bool_)
    for j in range(last - first):
        marked = _mark(R, j, query_start, query_classes, first + j, dense_of, dense, list_start, lists)
        few[j] = marked * DENSE < n
    seen, last_counts = 0, np.zeros(n_bits + 1, dtype=np.int64)
    for block in range(n_blocks):
        at, (parity, valid) = U(block * stride), _items(block, n, n_even)
        seen += valid
        share = k * (seen / n)
        wanted = k if seen == n else min(k, np.int64(share + 4 * np.sqrt(share) + 8))
        for j in range(last - first):
            i = first + j
            odd = (plan[i, ONES] + parity) & 1
            before = _reach(counts, i, k, n_bits)
            for d in range(n_bits + 1):
                last_counts[d] = counts[0, i, d]
            distances(P, at, zeros, plan, i, S, C, D)
            _count(D, odd, valid, T, R, j, block, few[j], counts, i)
            now = _reach(counts, i, wanted, n_bits)
            # now + 1 does not occur here if it is not odd
            guess[j] = min(guess[j], now + ((now + 1 - odd) & 1))
            if n_kept[j] + ITEMS > kept.shape[1]:
                n_kept[j] = _drop(kept, j, n_kept[j], before)
            radius = min(now, before - 1)
            if _has_more(counts, i, last_counts, radius):
                n_kept[j] = _keep(D, T, R, j, block, valid, radius, ITEMS, kept, n_kept[j])
    for j in range(last - first):
        i = first + j
        reach = min(_reach(counts, i, k, n_bits), n_bits)
        if guess[j] < reach:
            n_kept[j] = _scan_again(
                P, stride, zeros, plan, i, S, C, D, T, R, j, n, n_even, reach, k, counts, kept
            )
        _place(kept, j, n_kept[j], counts, i, hashes, keys)


@compiled
def _items(block, n, n_even):  # type: ignore[no-untyped-def]
    """Whether the codes of a block are odd (1) or even (0), and how many items it has."""
    even_blocks = -(-n_even // ITEMS)
    if block < even_blocks:
        return 0, min(ITEMS, n_even - block * ITEMS)
    return 1, min(ITEMS, n - n_even - (block - even_blocks) * ITEMS)


@compiled
def _has_more(counts, i, before, radius):  # type: ignore[no-untyped-def]
    """Whether query i has more items within the radius than the counts from before say."""
    for d in range(min(radius + 1, len(before))):  # noqa: SIM110 (numba knows no any)
        if counts[0, i, d] != before[d]:
            return True
    return False


@compiled
def _scan_again(  # type: ignore[no-untyped-def]
    P, stride, zeros, plan, i, S, C, D, T, R, j, n, n_even, reach, k, counts, kept
):
    """Keeps the k best of query i, now that the distance of the k-th is known."""
    room, length = k, 0
    for d in range(reach):
        room -= counts[0, i, d]
    for block in range(R.shape[1] // WORDS):
        had = length
        distances(P, U(block * stride), zeros, plan, i, S, C, D)
        length = _keep(D, T, R, j, block, _items(block, n, n_even)[1], reach, room, kept, had)
        for e in range(had, length):
            room -= np.int64(kept[j, e] >> _DISTANCE_AT) == reach
    return length


@compiled
def _mark(R, j, query_start, query_classes, i, dense_of, dense, list_start, lists):  # type: ignore[no-untyped-def]
    """Sets in R[j] the bits of the items that share a class with query i; how many there are."""
    for w in range(R.shape[1]):
        R[j, w] = 0
    for a in range(query_start[i], query_start[i + 1]):
        c = query_classes[a]
        if dense_of[c] >= 0:
            row = dense_of[c]
            for w in range(dense.shape[1]):
                R[j, w] |= dense[row, w]
        else:
            for b in range(list_start[c], list_start[c + 1]):
                R[j, lists[b] >> 6] |= ONE << U(lists[b] & 63)
    total = U(0)
    for w in range(R.shape[1]):
        total += popcount(R[j, w])
    return np.int64(total)


@compiled
def _count(D, odd, valid, T, R, j, block, few, counts, i):  # type: ignore[no-untyped-def]
    """Adds the block's distances to the counts of all and of relevant items of query i."""
    base = block * WORDS
    histogram(D, odd, valid, T, R, j, U(base), not few, counts[0], counts[1], i)
    if few:
        for word in range(WORDS):
            mask = R[j, base + word]
            while mask:
                counts[1, i, distance_at(D, U(word), lowest(mask))] += 1
                mask &= mask - ONE


@compiled
def _reach(counts, i, wanted, farthest):  # type: ignore[no-untyped-def]
    """The smallest distance within which ``wanted`` items lie; farthest + 1 when there are fewer."""
    total = 0
    for d in range(farthest + 1):
        total += counts[0, i, d]
        if total >= wanted:
            return d
    return farthest + 1


@compiled
def _keep(D, T, R, j, block, valid, radius, room, kept, length):  # type: ignore[no-untyped-def]
    """Appends the block's items within the radius, at the radius itself only ``room`` of them.

    An entry has the fields of a candidate key with the item's place where the hash goes.
    """
    if radius < 0:
        return length
    within(D, radius, T)
    for word in range(WORDS):
        mask = T[U(word)]
        while mask:
            bit = lowest(mask)
            mask &= mask - ONE
            place = U(word * 64) + bit
            distance = distance_at(D, U(word), bit)
            if place >= U(valid) or (distance == radius and room <= 0):
                continue
            place += U(block * ITEMS)
            room -= distance == radius
            relevant = (R[j, block * WORDS + word] >> bit) & ONE
            kept[j, length] = (U(distance) << _DISTANCE_AT) | (place << _HASH_AT) | relevant
            length += 1
    return length


@compiled
def _drop(kept, j, length, radius):  # type: ignore[no-untyped-def]
    """Leaves out the entries beyond the radius; how many stay (fewer than k + ITEMS)."""
    stay = 0
    for e in range(length):
        if np.int64(kept[j, e] >> _DISTANCE_AT) <= radius:
            kept[j, stay] = kept[j, e]
            stay += 1
    return stay


@compiled
def _place(kept, j, length, counts, i, hashes, keys):  # type: ignore[no-untyped-def]
    """Counting sort of the entries, which come by hash, into the ascending keys of query i."""
    slot = np.zeros(counts.shape[2] + 1, dtype=np.int64)
    for d in range(counts.shape[2]):
        slot[d + 1] = slot[d] + counts[0, i, d]
    for e in range(length):
        distance = kept[j, e] >> _DISTANCE_AT
        at = slot[distance]
        if at < keys.shape[1]:
            place = (kept[j, e] ^ (distance << _DISTANCE_AT)) >> _HASH_AT
            keys[i, at] = (distance << _DISTANCE_AT) | (hashes[place] << _HASH_AT) | (kept[j, e] & ONE)
            slot[distance] = at + 1
