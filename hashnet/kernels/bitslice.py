"""Distances of 64 database items in one go, in plain word arithmetic.

The database is stored as bit planes: word w of plane b holds bit b of 64 items. A tree of full adders
sums planes into a bit-sliced number, a few planes of sum bits that hold 64 numbers a word; LLVM turns
these loops into the widest vectors the machine has. With |p| the ones of an item and |q| those of the
query, the distance is

    d = |q| + |p| - 2 |p & q|     adding up the planes where the query has a one, or
    d = |q| - |p| + 2 |p & ~q|    adding up those where it has a zero,

so at most half of the planes are read. |p| is stored as planes, too. Whether a distance is even or odd
depends on |p| and |q| alone: the items of a block are either all even or all odd, and so are their distances.

A block is a row of planes, WORDS words each: the bits, one plane of zeros, and |p|. Arrays are passed
whole, with the place to start at: a numba slice costs an atomic reference count.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hashnet.kernels.jit import compiled

WORDS = 128  # words of a plane in one block: 8,192 items; the planes of a 64-bit block are 72 KiB
ITEMS = WORDS * 64
GROUP = 8  # planes added together
GROUPS, FLIPPED, ONES, PLANES = 0, 1, 2, 3  # columns of a query plan, see plan_queries

U = np.uint64
ALL = np.uint64(2**64 - 1)
W = np.uint64(WORDS)


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
    """What ``distances`` needs of query bits (q, n_bits) of 0 and 1, int64 (q, 3 + planes added).

    Columns: groups of planes, whether the zeros are added, |q|, and where the planes start.
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
    return ALL if (number >> bit) & 1 else U(0)


@compiled
def _add_group(P, at, plan, i, g, start, S, C):  # type: ignore[no-untyped-def]
    """Adds group g of query i's planes to the sum planes 0, 1, 2, which begin as ``start``.

    The carries, which weigh 8, become plane g % 4 of C. P[at] is where the block starts.
    """
    x = PLANES + GROUP * g
    p0, p1, p2, p3 = (
        at + U(plan[i, x]),
        at + U(plan[i, x + 1]),
        at + U(plan[i, x + 2]),
        at + U(plan[i, x + 3]),
    )
    p4, p5, p6, p7 = (
        at + U(plan[i, x + 4]), at + U(plan[i, x + 5]), at + U(plan[i, x + 6]), at + U(plan[i, x + 7])
    )  # fmt: skip
    first, out = g == 0, U(g % 4) * W
    t0, t1, t2 = spread(start, 0), spread(start, 1), spread(start, 2)
    for word in range(WORDS):  # one long body: LLVM makes it one loop over vectors
        w = U(word)
        if first:
            s0, s1, s2 = t0, t1, t2
        else:
            s0, s1, s2 = S[w], S[w + W], S[w + U(2) * W]
        s0, a = _add(s0, P[p0 + w], P[p1 + w])
        s0, b = _add(s0, P[p2 + w], P[p3 + w])
        s1, c = _add(s1, a, b)
        s0, a = _add(s0, P[p4 + w], P[p5 + w])
        s0, b = _add(s0, P[p6 + w], P[p7 + w])
        s1, d = _add(s1, a, b)
        s2, c = _add(s2, c, d)
        S[w], S[w + W], S[w + U(2) * W] = s0, s1, s2
        C[out + w] = c


@compiled
def _add_carries(C, start, first, S):  # type: ignore[no-untyped-def]
    """Adds the four planes of C to the sum planes 3, 4, 5; plane 0 of C becomes the carry above them."""
    t3, t4, t5 = spread(start, 3), spread(start, 4), spread(start, 5)
    for word in range(WORDS):
        w = U(word)
        if first:
            s3, s4, s5 = t3, t4, t5
        else:
            s3, s4, s5 = S[w + U(3) * W], S[w + U(4) * W], S[w + U(5) * W]
        x, a = _add(C[w], C[w + W], C[w + U(2) * W])
        b = x & C[w + U(3) * W]
        x ^= C[w + U(3) * W]
        s4, k = _add(s4, a ^ b, s3 & x)
        s5, k = _add(s5, a & b, k)
        S[w + U(3) * W], S[w + U(4) * W], S[w + U(5) * W] = s3 ^ x, s4, s5
        C[w] = k


@compiled
def distances(P, at, zeros, plan, i, S, C, D):  # type: ignore[no-untyped-def]
    """The distances of the block at P[at] to query i as sum planes in D: plane b has weight 2**b.

    S and C (four planes) are scratch; ``zeros`` is where the block's plane of zeros starts, after which the
    planes of |p| follow.
    """
    n_groups, flipped, ones = plan[i, GROUPS], plan[i, FLIPPED], plan[i, ONES]
    n_sum = len(D) // WORDS
    # |q| goes into the sums from the start, as half of it: they are taken twice
    start = ones // 2 if flipped else -((ones + 1) // 2)
    for quad in range(0, n_groups, 4):
        for g in range(quad, min(quad + 4, n_groups)):
            _add_group(P, at, plan, i, g, start, S, C)
        for g in range(n_groups - quad, 4):
            C[g * WORDS : (g + 1) * WORDS] = 0
        _add_carries(C, start, quad == 0, S)
        for plane in range(6, n_sum - 1):
            here, bit = U(plane) * W, spread(start, plane)
            for word in range(WORDS):
                w = U(word)
                old = bit if quad == 0 else S[here + w]
                S[here + w] = old ^ C[w]
                C[w] &= old
    _finish(P, at + U(zeros) + W, S, U(0) if flipped else ALL, spread(ones, 0), D, C)


@compiled
def _finish(P, p, S, minus, odd, D, C):  # type: ignore[no-untyped-def]
    """D = |p| - 2 S (minus = ALL) or 2 S - |p| (minus = 0), and 1 less or more when |q| is odd."""
    own = ~minus  # subtracting is adding the complement and one: of S, or of |p|
    for word in range(WORDS):
        w = U(word)
        low = P[p + w]
        D[w] = low ^ odd
        k = ((low ^ own) & (odd ^ own)) | ~(odd ^ own)
        d, k = _add(P[p + w + W] ^ own, S[w] ^ minus, k)
        D[w + W] = d
        d, k = _add(P[p + w + U(2) * W] ^ own, S[w + W] ^ minus, k)
        D[w + U(2) * W] = d
        d, k = _add(P[p + w + U(3) * W] ^ own, S[w + U(2) * W] ^ minus, k)
        D[w + U(3) * W] = d
        d, k = _add(P[p + w + U(4) * W] ^ own, S[w + U(3) * W] ^ minus, k)
        D[w + U(4) * W] = d
        d, k = _add(P[p + w + U(5) * W] ^ own, S[w + U(4) * W] ^ minus, k)
        D[w + U(5) * W] = d
        d, k = _add(P[p + w + U(6) * W] ^ own, S[w + U(5) * W] ^ minus, k)
        D[w + U(6) * W] = d
        C[w] = k
    for plane in range(7, len(D) // WORDS):
        here = U(plane) * W
        for word in range(WORDS):
            w = U(word)
            d, k = _add(P[p + here + w] ^ own, S[here - W + w] ^ minus, C[w])
            D[here + w] = d
            C[w] = k
