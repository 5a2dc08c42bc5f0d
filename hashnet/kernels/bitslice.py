"""Hamming distances of 64 database items at once, by word arithmetic on bit planes.

Measured against a plain popcount kernel with the same results (5,000 queries x 1,281,167 items x 64 bits,
AVX-512): 2.4 times as fast for the counts alone, 2.0 times with the 5,000 best of each query.

**Layout.** Items are cut into blocks of ITEMS = 8,192. A block is a row of planes, each WORDS = 128 words
of 64 bits; bit i of word w of a plane belongs to item 64 w + i of the block:

    planes 0 … n_bits - 1       bit b of every item, in the order of numpy's unpackbits
    plane  n_bits               zeros: stands in where a query needs fewer planes than a group has
    the n_sum planes after it   |p|, the number of ones of every item, as a bit-sliced number

**A bit-sliced number** is a few planes that hold one number per item: plane b has the bit of weight 2**b. A
full adder (``_add``) on three words adds 64 pairs of bits at once, and LLVM turns a loop over the WORDS of
a plane into the widest vectors of the machine. Arrays of this kind in the kernels, all uint64 and flat:

    sums       (n_sum, WORDS)    of the planes added up so far
    carries    (4, WORDS)        carries of weight 8 out of four groups of planes
    distances  (n_sum, WORDS)    of the block's items to one query

**Distances.** With |p| the ones of an item and |q| those of the query,

    d = |q| + |p| - 2 |p & q|     adds up the planes where the query has a one, and
    d = |q| - |p| + 2 |p & ~q|    those where it has a zero,

so at most half of the planes are read. Whether a distance is even or odd depends on |p| and |q| alone: the
items of a block are either all even or all odd, and so are their distances, which halves the work of the
histogram.

Arrays are passed whole, with the word to start at: a numba slice costs an atomic reference count.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hashnet.codes import as_words
from hashnet.kernels.jit import compiled, popcount

WORDS = 128  # words of a plane in one block: 8,192 items; the planes of a 64-bit block are 72 KiB
ITEMS = WORDS * 64
GROUP = 8  # planes added together
GROUPS, FLIPPED, ONES, PLANES = 0, 1, 2, 3  # columns of a query plan, see plan_queries

u64 = np.uint64  # indices are unsigned, too: numba wraps negative ones around, at the cost of a comparison
ALL_ONES = np.uint64(2**64 - 1)
PLANE = np.uint64(WORDS)  # from one plane to the next


def aligned(n: int) -> np.ndarray:
    """Zeros, uint64 (n,), at an address divisible by 64: a vector then never lies across two cache lines."""
    room = np.zeros(n + 7, dtype=np.uint64)
    skip = -room.ctypes.data // 8 % 8
    return room[skip : skip + n]


def sum_planes(n_bits: int) -> int:
    """Planes of a distance: 7 hold up to 127, which spares short codes a case of their own."""
    return max(7, n_bits.bit_length())


def block_planes(n_bits: int) -> int:
    """Planes of a block: bits, zeros, ones of each item."""
    return n_bits + 1 + sum_planes(n_bits)


def plan_queries(bits: np.ndarray) -> np.ndarray:
    """What ``block_distances`` needs of query bits (q, n_bits) of 0 and 1, int64 (q, 3 + planes added).

    Columns: groups of planes, whether the planes of zeros are added, |q|, and the word at which each plane
    starts.
    """
    q, n_bits = bits.shape
    ones = bits.sum(axis=1, dtype=np.int64)
    flipped = ones > n_bits // 2
    added = (bits != 0) ^ flipped[:, None]  # (q, n_bits)
    sizes = added.sum(axis=1)
    groups = np.maximum(-(-sizes // GROUP), 1)
    plan = np.full((q, PLANES + int(groups.max(initial=1)) * GROUP), n_bits * WORDS)  # the plane of zeros
    plan[:, GROUPS], plan[:, FLIPPED], plan[:, ONES] = groups, flipped, ones
    rows, planes = np.nonzero(added)
    first = np.cumsum(sizes) - sizes
    plan[rows, PLANES + np.arange(len(rows)) - first[rows]] = planes * WORDS
    return plan


@njit(inline="always")
def _add(a, b, c):  # type: ignore[no-untyped-def]
    """Sum bit and carry bit of three bits, in 64 lanes."""
    u = a ^ b
    return u ^ c, (a & b) | (u & c)


@njit(inline="always")
def spread(number, bit):  # type: ignore[no-untyped-def]
    """All ones where the number has the bit, else zero."""
    return ALL_ONES if (number >> bit) & 1 else u64(0)


@compiled
def _add_group(planes, block_at, plan, i, group, start, sums, carries):  # type: ignore[no-untyped-def]
    """Adds a group of eight planes of query i to the sum planes 0, 1, 2, which begin as ``start``.

    The carries out of them, of weight 8, become plane ``group`` % 4 of ``carries``.
    """
    x = PLANES + GROUP * group  # the first of eight columns of the plan
    p0, p1 = block_at + u64(plan[i, x]), block_at + u64(plan[i, x + 1])
    p2, p3 = block_at + u64(plan[i, x + 2]), block_at + u64(plan[i, x + 3])
    p4, p5 = block_at + u64(plan[i, x + 4]), block_at + u64(plan[i, x + 5])
    p6, p7 = block_at + u64(plan[i, x + 6]), block_at + u64(plan[i, x + 7])
    first, out = group == 0, u64(group % 4) * PLANE
    start0, start1, start2 = spread(start, 0), spread(start, 1), spread(start, 2)
    for word in range(WORDS):  # one long body: LLVM makes it one loop over vectors
        w = u64(word)
        if first:
            sum0, sum1, sum2 = start0, start1, start2
        else:
            sum0, sum1, sum2 = sums[w], sums[w + PLANE], sums[w + u64(2) * PLANE]
        # weight 1: four adders take in the eight planes; their carries have weight 2
        sum0, a = _add(sum0, planes[p0 + w], planes[p1 + w])
        sum0, b = _add(sum0, planes[p2 + w], planes[p3 + w])
        sum1, c = _add(sum1, a, b)  # weight 2: carries of weight 4
        sum0, a = _add(sum0, planes[p4 + w], planes[p5 + w])
        sum0, b = _add(sum0, planes[p6 + w], planes[p7 + w])
        sum1, d = _add(sum1, a, b)
        sum2, c = _add(sum2, c, d)  # weight 4: one carry of weight 8
        sums[w], sums[w + PLANE], sums[w + u64(2) * PLANE] = sum0, sum1, sum2
        carries[out + w] = c


@compiled
def _add_carries(carries, start, first, sums):  # type: ignore[no-untyped-def]
    """Adds the four planes of weight 8 to the sum planes 3, 4, 5; carries[:WORDS] becomes the carry above."""
    start3, start4, start5 = spread(start, 3), spread(start, 4), spread(start, 5)
    for word in range(WORDS):
        w = u64(word)
        if first:
            sum3, sum4, sum5 = start3, start4, start5
        else:
            sum3, sum4, sum5 = sums[w + u64(3) * PLANE], sums[w + u64(4) * PLANE], sums[w + u64(5) * PLANE]
        # x + 2 (a + b) is the number of ones among the four carries
        x, a = _add(carries[w], carries[w + PLANE], carries[w + u64(2) * PLANE])
        b = x & carries[w + u64(3) * PLANE]
        x ^= carries[w + u64(3) * PLANE]
        sum4, carry = _add(sum4, a ^ b, sum3 & x)
        sum5, carry = _add(sum5, a & b, carry)
        sums[w + u64(3) * PLANE], sums[w + u64(4) * PLANE], sums[w + u64(5) * PLANE] = sum3 ^ x, sum4, sum5
        carries[w] = carry


@compiled
def block_distances(planes, block_at, zeros, plan, i, sums, carries, distances):  # type: ignore[no-untyped-def]
    """Fills ``distances`` (n_sum, WORDS) with those of the block at planes[block_at] to query i.

    ``sums`` and ``carries`` are scratch; ``zeros`` is where the block's plane of zeros starts, after which
    the planes of |p| follow.
    """
    n_groups, flipped, ones = plan[i, GROUPS], plan[i, FLIPPED], plan[i, ONES]
    n_sum = len(distances) // WORDS
    # |q| goes into the sums from the start, as half of it: they are taken twice
    start = ones // 2 if flipped else -((ones + 1) // 2)
    for quad in range(0, n_groups, 4):  # 32 planes
        for group in range(quad, min(quad + 4, n_groups)):
            _add_group(planes, block_at, plan, i, group, start, sums, carries)
        for group in range(n_groups - quad, 4):
            carries[group * WORDS : (group + 1) * WORDS] = 0
        _add_carries(carries, start, quad == 0, sums)
        for plane in range(6, n_sum - 1):  # the carry of weight 64 runs up through the other sum planes
            here, bit = u64(plane) * PLANE, spread(start, plane)
            for word in range(WORDS):
                w = u64(word)
                old = bit if quad == 0 else sums[here + w]
                sums[here + w] = old ^ carries[w]
                carries[w] &= old
    ones_at = block_at + u64(zeros) + PLANE
    _finish(planes, ones_at, sums, u64(0) if flipped else ALL_ONES, spread(ones, 0), distances, carries)


@compiled
def _finish(planes, ones_at, sums, minus, odd, distances, carries):  # type: ignore[no-untyped-def]
    """distances = |p| - 2 sums (minus = ALL_ONES) or 2 sums - |p| (minus = 0); |p| lies at planes[ones_at].

    When |q| is odd (``odd`` all ones), 1 less or more.
    """
    own = ~minus  # subtracting is adding the complement and one: of the sums, or of |p|
    for word in range(WORDS):
        w = u64(word)
        low = planes[ones_at + w]  # bit 0 of |p|; that of 2 sums is 0
        distances[w] = low ^ odd
        carry = ((low ^ own) & (odd ^ own)) | ~(odd ^ own)
        d, carry = _add(planes[ones_at + w + PLANE] ^ own, sums[w] ^ minus, carry)
        distances[w + PLANE] = d
        d, carry = _add(planes[ones_at + w + u64(2) * PLANE] ^ own, sums[w + PLANE] ^ minus, carry)
        distances[w + u64(2) * PLANE] = d
        d, carry = _add(planes[ones_at + w + u64(3) * PLANE] ^ own, sums[w + u64(2) * PLANE] ^ minus, carry)
        distances[w + u64(3) * PLANE] = d
        d, carry = _add(planes[ones_at + w + u64(4) * PLANE] ^ own, sums[w + u64(3) * PLANE] ^ minus, carry)
        distances[w + u64(4) * PLANE] = d
        d, carry = _add(planes[ones_at + w + u64(5) * PLANE] ^ own, sums[w + u64(4) * PLANE] ^ minus, carry)
        distances[w + u64(5) * PLANE] = d
        d, carry = _add(planes[ones_at + w + u64(6) * PLANE] ^ own, sums[w + u64(5) * PLANE] ^ minus, carry)
        distances[w + u64(6) * PLANE] = d
        carries[w] = carry
    for plane in range(7, len(distances) // WORDS):
        here = u64(plane) * PLANE
        for word in range(WORDS):
            w = u64(word)
            d, carry = _add(planes[ones_at + here + w] ^ own, sums[here - PLANE + w] ^ minus, carries[w])
            distances[here + w] = d
            carries[w] = carry


def bit_planes(codes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """codes[order], packed uint8 (n, n_bits // 8), as blocks of planes: uint64, flat.

    ``order`` fills whole blocks, with -1 where there is no item.
    """
    n_bits = codes.shape[1] * 8
    planes = aligned(len(order) // ITEMS * block_planes(n_bits) * WORDS)
    _fill_planes(as_words(codes), order, n_bits, sum_planes(n_bits), planes)
    return planes


@compiled
def _fill_planes(words, order, n_bits, n_sum, planes):  # type: ignore[no-untyped-def]
    """Transposes 64 items at a time: they fill one word of every plane. ``words`` uint64 (n, n_words)."""
    stride = (n_bits + 1 + n_sum) * WORDS
    square = np.zeros(64, dtype=np.uint64)  # one word of each of the 64 items
    ones = np.zeros(64, dtype=np.uint64)  # |p| of each
    for group in range(len(order) // 64):
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
