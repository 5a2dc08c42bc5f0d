"""What bit-sliced distances say: how many items lie at each distance, and which within a radius.

``distances`` (n_sum, WORDS) are those of a block's items to one query (``hashnet.kernels.bitslice``).
``masks`` (n_sum + 2, WORDS) is scratch: each row is a set of items, one bit per item. The sets form a path
of a binary tree over the bits of the distance, from the highest down:

    row n_sum + 1        all items of the block
    rows 8 … n_sum       the items of the row above with the chosen value of one more bit: bit 7 in row 8
    rows 0 … 7           the items of row 8 by their bits 4 to 6: the leaves

A leaf has 16 distances, of which the block's parity leaves 8: bits 1 to 3. Both arrays are uint64 and flat.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hashnet.kernels.bitslice import ALL_ONES, PLANE, WORDS, spread, u64
from hashnet.kernels.jit import compiled, popcount

ONE = np.uint64(1)
SPARSE = 128  # a leaf with fewer than one in this many of the items before is counted item by item


class Block(NamedTuple):
    """What a block's items have in common with a query."""

    odd: int  # 1 where all distances are odd, 0 where all are even
    n_items: int  # the first of its ITEMS places
    before: int  # places of the blocks before it


@njit(inline="always")
def lowest(mask):  # type: ignore[no-untyped-def]
    """The place (0 to 63) of the lowest one bit."""
    return popcount((mask & (~mask + ONE)) - ONE)


@compiled
def _split(masks, level, distances, flip):  # type: ignore[no-untyped-def]
    """Row 8 + level = the items of the row above with bit 7 + level set (flip = 0) or clear; whether any."""
    child, parent, plane = u64(8 + level) * PLANE, u64(9 + level) * PLANE, u64(7 + level) * PLANE
    some = u64(0)
    for word in range(WORDS):
        w = u64(word)
        v = masks[parent + w] & (distances[plane + w] ^ flip)
        masks[child + w] = v
        some |= v
    return some != 0


@compiled
def _split_in_eight(masks, distances):  # type: ignore[no-untyped-def]
    """Rows 0 to 7 = the items of row 8 by their bits 4 to 6; bit r of the result: row r has any."""
    a0, a1, a2, a3, a4, a5, a6, a7 = u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0)
    for word in range(WORDS):
        w = u64(word)
        v, low, mid = masks[w + u64(8) * PLANE], distances[w + u64(4) * PLANE], distances[w + u64(5) * PLANE]
        upper = v & distances[w + u64(6) * PLANE]
        lower = v ^ upper
        v3 = lower & mid
        v1 = lower ^ v3
        v7 = upper & mid
        v5 = upper ^ v7
        r1, r3, r5, r7 = v1 & low, v3 & low, v5 & low, v7 & low
        r0, r2, r4, r6 = v1 ^ r1, v3 ^ r3, v5 ^ r5, v7 ^ r7
        masks[w], masks[w + PLANE], masks[w + u64(2) * PLANE], masks[w + u64(3) * PLANE] = r0, r1, r2, r3
        (
            masks[w + u64(4) * PLANE],
            masks[w + u64(5) * PLANE],
            masks[w + u64(6) * PLANE],
            masks[w + u64(7) * PLANE],
        ) = r4, r5, r6, r7
        a0 |= r0
        a1 |= r1
        a2 |= r2
        a3 |= r3
        a4 |= r4
        a5 |= r5
        a6 |= r6
        a7 |= r7
    some = (a0 != 0) | (a1 != 0) << 1 | (a2 != 0) << 2 | (a3 != 0) << 3
    return some | (a4 != 0) << 4 | (a5 != 0) << 5 | (a6 != 0) << 6 | (a7 != 0) << 7


@njit(inline="always")
def _book(out, d, n, na, nb, nc, nab, nac, nbc, nabc):  # type: ignore[no-untyped-def]
    """Adds to out[d], out[d + 2], … out[d + 14] the items by their bits a, b, c, from the sizes of subsets.

    By inclusion and exclusion: n items in all, na with bit a set, nab with a and b, and so on.
    """
    out[d + 14] += np.int64(nabc)
    out[d + 12] += np.int64(nbc - nabc)
    out[d + 10] += np.int64(nac - nabc)
    out[d + 8] += np.int64(nc - nac - nbc + nabc)
    out[d + 6] += np.int64(nab - nabc)
    out[d + 4] += np.int64(nb - nab - nbc + nabc)
    out[d + 2] += np.int64(na - nab - nac + nabc)
    out[d] += np.int64(n - na - nb - nc + nab + nac + nbc - nabc)


@compiled
def _count_leaf(distances, masks, row, all_items, d):  # type: ignore[no-untyped-def]
    """Adds the items of one leaf to the histogram, by their bits 1 to 3; ``d`` is the leaf's least distance.

    The sizes of subsets (all, with bit a, with a and b, …) need half the ANDs of the eight values.
    """
    n, na, nb, nc, nab, nac, nbc, nabc = u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0)
    here = u64(row) * PLANE
    for word in range(WORDS):
        w = u64(word)
        v = masks[here + w]
        a, b, c = (
            v & distances[w + PLANE],
            v & distances[w + u64(2) * PLANE],
            v & distances[w + u64(3) * PLANE],
        )
        ab = a & b
        n += popcount(v)
        na += popcount(a)
        nb += popcount(b)
        nc += popcount(c)
        nab += popcount(ab)
        nac += popcount(a & c)
        nbc += popcount(b & c)
        nabc += popcount(ab & c)
    _book(all_items, d, n, na, nb, nc, nab, nac, nbc, nabc)


@compiled
def _count_leaf_marked(distances, masks, row, marks, all_items, relevant_items, d):  # type: ignore[no-untyped-def]
    """The same, and adds the items marked in ``marks`` (WORDS,) to the histogram of relevant ones."""
    n, na, nb, nc, nab, nac, nbc, nabc = u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0)
    m, ma, mb, mc, mab, mac, mbc, mabc = u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0), u64(0)
    here = u64(row) * PLANE
    for word in range(WORDS):
        w = u64(word)
        v, r = masks[here + w], marks[w]
        a, b, c = (
            v & distances[w + PLANE],
            v & distances[w + u64(2) * PLANE],
            v & distances[w + u64(3) * PLANE],
        )
        ab, ac, bc = a & b, a & c, b & c
        abc = ab & c
        n += popcount(v)
        na += popcount(a)
        nb += popcount(b)
        nc += popcount(c)
        nab += popcount(ab)
        nac += popcount(ac)
        nbc += popcount(bc)
        nabc += popcount(abc)
        m += popcount(v & r)
        ma += popcount(a & r)
        mb += popcount(b & r)
        mc += popcount(c & r)
        mab += popcount(ab & r)
        mac += popcount(ac & r)
        mbc += popcount(bc & r)
        mabc += popcount(abc & r)
    _book(all_items, d, n, na, nb, nc, nab, nac, nbc, nabc)
    _book(relevant_items, d, m, ma, mb, mc, mab, mac, mbc, mabc)


@compiled
def _is_sparse(all_items, h, before):  # type: ignore[no-untyped-def]
    """Whether fewer than one in SPARSE of the items before this block lie at distances 16 h to 16 h + 15."""
    total = 0
    for d in range(16 * h, 16 * h + 16):
        total += all_items[d]
    return total * SPARSE < before


@compiled
def _count_one_by_one(distances, masks, row, marks, all_items, relevant_items, first):  # type: ignore[no-untyped-def]
    """The same item by item, quicker where there are few; ``first`` is the leaf's least distance."""
    here, both = u64(row) * PLANE, len(marks) > 0
    for word in range(WORDS):
        w = u64(word)
        mask = masks[here + w]
        while mask:
            bit = lowest(mask)
            mask &= mask - ONE
            low = (distances[w + PLANE] >> bit) & ONE | ((distances[w + u64(2) * PLANE] >> bit) & ONE) << ONE
            d = first + 2 * np.int64(low | ((distances[w + u64(3) * PLANE] >> bit) & ONE) << u64(2))
            all_items[d] += 1
            if both:
                relevant_items[d] += np.int64((marks[w] >> bit) & ONE)


@compiled
def add_histogram(distances, masks, block, marks, all_items, relevant_items):  # type: ignore[no-untyped-def]
    """Adds to ``all_items`` (n_bits + 16,) how many items of a Block lie at each distance.

    With ``marks`` (WORDS,), a mask of relevant items, adds these to ``relevant_items``; an empty one is
    left out. This walks the tree of the upper bits of the distance: a branch without items is left out
    whole, and real distances fill only a few leaves; those that were rare in the blocks before are counted
    singly.
    """
    # the root: a mask of the block's items
    top = u64(len(masks)) - PLANE
    for word in range(WORDS):
        masks[top + u64(word)] = ALL_ONES if 64 * word + 64 <= block.n_items else u64(0)
    if block.n_items < WORDS * 64:
        masks[top + u64(block.n_items >> 6)] = (ONE << u64(block.n_items & 63)) - ONE
    levels = len(distances) // WORDS - 7
    g = 0  # the branch of distances 128 g to 128 g + 127
    while g * 128 <= len(all_items) - 16:
        level = levels - 1
        if g:  # the rows above the lowest one bit of g are those of the branch before
            level = 0
            while not (g >> level) & 1:
                level += 1
        alive = True
        while alive and level >= 0:
            alive = _split(masks, level, distances, u64(0) if (g >> level) & 1 else ALL_ONES)
            level -= alive
        if not alive:  # no item has these upper bits: on to the next branch
            g += 1 << level
            continue
        some = _split_in_eight(masks, distances)
        for row in range(8):
            if not (some >> row) & 1:
                continue
            leaf = 8 * g + row
            d = 16 * leaf + block.odd
            if _is_sparse(all_items, leaf, block.before):
                _count_one_by_one(distances, masks, row, marks, all_items, relevant_items, d)
            elif len(marks):
                _count_leaf_marked(distances, masks, row, marks, all_items, relevant_items, d)
            else:
                _count_leaf(distances, masks, row, all_items, d)
        g += 1


@compiled
def within(distances, radius, masks):  # type: ignore[no-untyped-def]
    """Row 0 of ``masks`` = those of the items at distance <= radius."""
    r0, r1, r2, r3 = spread(radius, 0), spread(radius, 1), spread(radius, 2), spread(radius, 3)
    r4, r5, r6 = spread(radius, 4), spread(radius, 5), spread(radius, 6)
    for word in range(WORDS):  # from the lowest bit up: a higher bit that differs decides
        w = u64(word)
        more = distances[w] & ~r0
        d = distances[w + PLANE]
        more = (d & ~r1) | (more & ~(d ^ r1))
        d = distances[w + u64(2) * PLANE]
        more = (d & ~r2) | (more & ~(d ^ r2))
        d = distances[w + u64(3) * PLANE]
        more = (d & ~r3) | (more & ~(d ^ r3))
        d = distances[w + u64(4) * PLANE]
        more = (d & ~r4) | (more & ~(d ^ r4))
        d = distances[w + u64(5) * PLANE]
        more = (d & ~r5) | (more & ~(d ^ r5))
        d = distances[w + u64(6) * PLANE]
        more = (d & ~r6) | (more & ~(d ^ r6))
        masks[w] = ~more
    for plane in range(7, len(distances) // WORDS):
        here, r = u64(plane) * PLANE, spread(radius, plane)
        for word in range(WORDS):
            w = u64(word)
            d = distances[here + w]
            masks[w] = ~((d & ~r) | (~masks[w] & ~(d ^ r)))


@njit(inline="always")
def distance_at(distances, w, bit):  # type: ignore[no-untyped-def]
    """The distance, int64, of the item at one bit of word w."""
    distance = u64(0)
    for plane in range(len(distances) // WORDS):
        distance |= ((distances[u64(plane) * PLANE + w] >> bit) & ONE) << u64(plane)
    return np.int64(distance)
