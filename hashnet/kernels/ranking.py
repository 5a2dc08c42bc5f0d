"""One pass of query codes over a shard: counts per distance, and the k best of every query.

Items of even codes come first, then those of odd ones (by their number of ones), each in the order of their
tie hash. Items at one distance are all even or all odd, and an earlier one ranks first, so the k best can
be kept while counting: an item matters only if fewer than k items before it are at least as near. Because
that order is random, the counts so far also tell how far the k-th item will lie in the end; should that
guess prove too small for a query, the query is scanned again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hashnet.kernels.bitslice import ITEMS, ONES, WORDS, aligned, block_distances, sum_planes, u64
from hashnet.kernels.histogram import ONE, Block, add_histogram, distance_at, lowest, within
from hashnet.kernels.jit import compiled, popcount

FEW = 32  # relevant items are counted one by one where fewer than one item in FEW is relevant
HASH_BITS = 52  # a candidate key: distance (11 bits) | tie hash (52 bits) | relevant (1 bit)
LONG_HASH_BITS = 50  # of codes whose distances need more than 11 bits: the two lowest bits are left out
_HASH_AT = np.uint64(1)
_DISTANCE_AT = np.uint64(LONG_HASH_BITS + 1)  # in an entry, see ``_keep``: a place needs fewer bits


def hash_bits(n_bits: int) -> int:
    """How many bits of the tie hash a candidate key has, for codes of this length."""
    return HASH_BITS if n_bits < 1 << (63 - HASH_BITS) else LONG_HASH_BITS


class PlaneItems(NamedTuple):
    """n items as blocks of bit planes: those with even codes first, then those with odd ones.

    Place p is item p % ITEMS of block p // ITEMS; the last block of either parity may have unused places.
    """

    planes: np.ndarray  # uint64, see ``hashnet.kernels.bitslice``
    hashes: np.ndarray  # uint64 (places,): tie hashes, 0 where a place is unused
    n: int
    n_even: int


class ClassItems(NamedTuple):
    """The places of the items of each class: a bit mask for a frequent class, a list for a rare one.

    Place p is bit p % 64 of word p // 64. Class c has mask ``masks[mask_of[c]]``, or, where mask_of[c] is
    -1, the places ``lists[list_start[c] : list_start[c + 1]]``.
    """

    mask_of: np.ndarray  # int32 (n_classes,)
    masks: np.ndarray  # uint64 (frequent classes, places / 64)
    list_start: np.ndarray  # int64 (n_classes + 1,)
    lists: np.ndarray  # int32


class Queries(NamedTuple):
    """q queries; query i has the classes ``classes[class_start[i] : class_start[i + 1]]``."""

    plan: np.ndarray  # of ``plan_queries``, (q, …)
    class_start: np.ndarray  # int64 (q + 1,)
    classes: np.ndarray  # int32


class Scratch(NamedTuple):
    """Memory of one thread for a group of queries."""

    distances: np.ndarray  # uint64 (n_sum, WORDS), flat: of one query to one block
    sums: np.ndarray  # the same
    masks: np.ndarray  # uint64 (n_sum + 2, WORDS), flat
    carries: np.ndarray  # uint64 (4, WORDS), flat
    relevant: np.ndarray  # uint64 (group, places / 64): each query's relevant items
    kept: np.ndarray  # uint64 (group, k + 2 ITEMS): items that may be among the k best, see ``_keep``


def new_scratch(n_bits: int, group: int, n_places: int, k: int) -> Scratch:
    """Scratch for groups of up to ``group`` queries."""
    n_sum = sum_planes(n_bits)
    return Scratch(
        aligned(n_sum * WORDS),
        aligned(n_sum * WORDS),
        aligned((n_sum + 2) * WORDS),
        aligned(4 * WORDS),
        np.zeros((group, n_places // 64), dtype=np.uint64),
        np.zeros((group, k + 2 * ITEMS), dtype=np.uint64),
    )


@compiled
def count_and_rank(queries, first, last, items, classes, scratch, counts, keys):  # type: ignore[no-untyped-def]
    """Fills the counts and keys of queries ``first`` to ``last - 1``, a group that shares cached blocks.

    counts int64 (2, q, n_bits + 16), zeros on entry: all and relevant items by distance. keys uint64 (q, k),
    k <= n: the candidate keys of the k best, ascending.
    """
    k, n, n_bits, n_sum = keys.shape[1], items.n, counts.shape[2] - 16, len(scratch.distances) // WORDS
    distance_at_bit = u64(1 + (HASH_BITS if n_bits < 1 << (63 - HASH_BITS) else LONG_HASH_BITS))
    zeros, stride = n_bits * WORDS, (n_bits + 1 + n_sum) * WORDS  # the plane of zeros; words of a block
    distances, group = scratch.distances, last - first
    n_kept = np.zeros(group, dtype=np.int64)
    guess = np.full(group, n_bits, dtype=np.int64)  # the farthest distance the k best may have
    few = np.zeros(group, dtype=np.bool_)  # whether a query has few relevant items
    for j in range(group):
        few[j] = _mark_relevant(scratch.relevant[j], queries, first + j, classes) * FEW < n
    no_marks = scratch.relevant[0, :0]
    seen, counts_before = 0, np.zeros(n_bits + 1, dtype=np.int64)
    for number in range(len(items.planes) // stride):
        parity, count = _items_of(number, items)
        seen += count
        # of the k best, this many should lie among the items seen so far, give or take four deviations
        share = k * (seen / n)
        expected = k if seen == n else min(k, np.int64(share + 4 * np.sqrt(share) + 8))
        for j in range(group):
            i = first + j
            all_items, relevant_items = counts[0, i], counts[1, i]
            marks = scratch.relevant[j, number * WORDS : (number + 1) * WORDS]
            block = Block((queries.plan[i, ONES] + parity) & 1, count, number * ITEMS)
            reach_before = _reach(all_items, k, n_bits)
            counts_before[:] = all_items[: n_bits + 1]
            block_distances(
                items.planes,
                u64(number * stride),
                zeros,
                queries.plan,
                i,
                scratch.sums,
                scratch.carries,
                distances,
            )
            if few[j]:
                add_histogram(distances, scratch.masks, block, no_marks, all_items, relevant_items)
                _count_marked(distances, marks, relevant_items)
            else:
                add_histogram(distances, scratch.masks, block, marks, all_items, relevant_items)
            # only what is nearer than the k-th item before this block can matter, and of that only what lies
            # within the distance at which the expected share of the k best is reached
            reach = _reach(all_items, expected, n_bits)
            guess[j] = min(
                guess[j], reach + ((reach + 1 - block.odd) & 1)
            )  # reach + 1 if it cannot occur here
            if n_kept[j] + ITEMS > scratch.kept.shape[1]:
                n_kept[j] = _drop_beyond(scratch.kept[j], n_kept[j], reach_before)
            radius = min(reach, reach_before - 1)
            if _has_more(all_items, counts_before, radius):
                n_kept[j] = _keep(scratch, marks, block, radius, ITEMS, scratch.kept[j], n_kept[j])
    for j in range(group):
        i = first + j
        reach = min(_reach(counts[0, i], k, n_bits), n_bits)
        if guess[j] < reach:  # some of the k best were passed over
            n_kept[j] = _scan_again(queries, i, items, scratch, j, reach, counts[0, i], k)
        _sort_keys(scratch.kept[j], n_kept[j], counts[0, i], items.hashes, distance_at_bit, keys[i])


@compiled
def _items_of(number, items):  # type: ignore[no-untyped-def]
    """Whether the codes of a block are odd (1) or even (0), and how many items it has."""
    even_blocks = -(-items.n_even // ITEMS)
    if number < even_blocks:
        return 0, min(ITEMS, items.n_even - number * ITEMS)
    return 1, min(ITEMS, items.n - items.n_even - (number - even_blocks) * ITEMS)


@compiled
def _has_more(all_items, before, radius):  # type: ignore[no-untyped-def]
    """Whether there are more items within the radius than the counts from before say."""
    for d in range(min(radius + 1, len(before))):  # noqa: SIM110 (numba knows no any)
        if all_items[d] != before[d]:
            return True
    return False


@compiled
def _scan_again(queries, i, items, scratch, j, reach, all_items, k):  # type: ignore[no-untyped-def]
    """Keeps the k best of query i, now that the k-th is known to lie at ``reach``; how many it kept."""
    distances, kept = scratch.distances, scratch.kept[j]
    n_bits = len(all_items) - 16
    zeros, stride = n_bits * WORDS, (n_bits + 1 + len(distances) // WORDS) * WORDS
    room, length = k, 0  # room: how many at the distance ``reach`` itself are still needed
    for d in range(reach):
        room -= all_items[d]
    for number in range(len(items.planes) // stride):
        block_distances(
            items.planes,
            u64(number * stride),
            zeros,
            queries.plan,
            i,
            scratch.sums,
            scratch.carries,
            distances,
        )
        marks = scratch.relevant[j, number * WORDS : (number + 1) * WORDS]
        block = Block(0, _items_of(number, items)[1], number * ITEMS)  # parity does not matter here
        had = length
        length = _keep(scratch, marks, block, reach, room, kept, had)
        for e in range(had, length):
            room -= np.int64(kept[e] >> _DISTANCE_AT) == reach
    return length


@compiled
def _mark_relevant(marks, queries, i, classes):  # type: ignore[no-untyped-def]
    """Sets in ``marks`` (places / 64,) the bits of the items that share a class with query i; how many."""
    marks[:] = 0
    for a in range(queries.class_start[i], queries.class_start[i + 1]):
        c = queries.classes[a]
        if classes.mask_of[c] >= 0:
            row = classes.mask_of[c]
            for w in range(len(marks)):
                marks[w] |= classes.masks[row, w]
        else:
            for b in range(classes.list_start[c], classes.list_start[c + 1]):
                marks[classes.lists[b] >> 6] |= ONE << u64(classes.lists[b] & 63)
    total = u64(0)
    for w in range(len(marks)):
        total += popcount(marks[w])
    return np.int64(total)


@compiled
def _count_marked(distances, marks, relevant_items):  # type: ignore[no-untyped-def]
    """Adds the distances of the marked items of a block, one by one."""
    for word in range(WORDS):
        mask = marks[word]
        while mask:
            relevant_items[distance_at(distances, u64(word), lowest(mask))] += 1
            mask &= mask - ONE


@compiled
def _reach(all_items, k, farthest):  # type: ignore[no-untyped-def]
    """The smallest distance within which k items lie; farthest + 1 when there are fewer."""
    total = 0
    for d in range(farthest + 1):
        total += all_items[d]
        if total >= k:
            return d
    return farthest + 1


@compiled
def _keep(scratch, marks, block, radius, room, kept, length):  # type: ignore[no-untyped-def]
    """Appends the block's items within the radius, at most ``room`` at the radius itself; the new length.

    An entry has the fields of a candidate key, with the item's place where the hash goes.
    """
    if radius < 0:
        return length
    distances, inside = scratch.distances, scratch.masks
    within(distances, radius, inside)
    for word in range(WORDS):
        mask = inside[u64(word)]
        while mask:
            bit = lowest(mask)
            mask &= mask - ONE
            place = u64(word * 64) + bit
            distance = distance_at(distances, u64(word), bit)
            if place >= u64(block.n_items) or (distance == radius and room <= 0):
                continue
            place += u64(block.before)
            room -= distance == radius
            relevant = (marks[word] >> bit) & ONE
            kept[length] = (u64(distance) << _DISTANCE_AT) | (place << _HASH_AT) | relevant
            length += 1
    return length


@compiled
def _drop_beyond(kept, length, radius):  # type: ignore[no-untyped-def]
    """Removes the entries beyond the radius; how many stay (fewer than k + ITEMS)."""
    stay = 0
    for e in range(length):
        if np.int64(kept[e] >> _DISTANCE_AT) <= radius:
            kept[stay] = kept[e]
            stay += 1
    return stay


@compiled
def _sort_keys(kept, length, all_items, hashes, distance_at_bit, keys):  # type: ignore[no-untyped-def]
    """Counting sort of the entries, which come in the order of their hash, into the ascending keys (k,)."""
    slot = np.zeros(len(all_items) + 1, dtype=np.int64)  # where the next key of each distance goes
    for d in range(len(all_items)):
        slot[d + 1] = slot[d] + all_items[d]
    for e in range(length):
        distance = kept[e] >> _DISTANCE_AT
        at = slot[distance]
        if at < len(keys):
            place = (kept[e] ^ (distance << _DISTANCE_AT)) >> _HASH_AT
            keys[at] = (distance << distance_at_bit) | (hashes[place] << _HASH_AT) | (kept[e] & ONE)
            slot[distance] = at + 1
