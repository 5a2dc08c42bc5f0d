"""Distances of 64 database items in one go, and their histogram, in plain word arithmetic.

The database is stored as bit planes: word w of plane b holds bit b of 64 items. XOR with the
query's bit and a tree of full adders give the distances of 64 items as a few planes of sum bits
(a bit-sliced number), and the histogram of distances follows by AND and popcount. LLVM turns
these loops into the widest vectors the machine has.

Arrays are passed whole, with the place to start at: a numba slice costs an atomic reference count.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hashnet.popcount import compiled, popcount

WORDS = 128  # words of a plane in one block: 8,192 items; the planes of a 64-bit block are 64 KiB
ITEMS = WORDS * 64
U = np.uint64
ONE, ALL = np.uint64(1), np.uint64(2**64 - 1)
W = np.uint64(WORDS)


@njit(inline="always")
def _add(a, b, c):  # type: ignore[no-untyped-def]
    """Sum bit and carry bit of three bits, in 64 lanes."""
    u = a ^ b
    return u ^ c, (a & b) | (u & c)


@compiled
def _add_group(P, p, M, i, g, S, C, c):  # type: ignore[no-untyped-def]
    """Adds planes 16g .. 16g+15 (XOR the bits of query i) to the sum planes 0..3 of S.

    The carries, which weigh 16, become plane c of C. P[p] is where the block's planes start.
    """
    keep = ALL if g else U(0)
    p, c = p + U(16 * g) * W, c * W
    m0, m1, m2, m3 = M[i, 16 * g], M[i, 16 * g + 1], M[i, 16 * g + 2], M[i, 16 * g + 3]
    m4, m5, m6, m7 = M[i, 16 * g + 4], M[i, 16 * g + 5], M[i, 16 * g + 6], M[i, 16 * g + 7]
    m8, m9, m10, m11 = M[i, 16 * g + 8], M[i, 16 * g + 9], M[i, 16 * g + 10], M[i, 16 * g + 11]
    m12, m13, m14, m15 = M[i, 16 * g + 12], M[i, 16 * g + 13], M[i, 16 * g + 14], M[i, 16 * g + 15]
    for word in range(WORDS):  # one long body: LLVM makes it one loop over vectors
        w = U(word)
        x = p + w
        s0, s1, s2, s3 = S[w] & keep, S[w + W] & keep, S[w + U(2) * W] & keep, S[w + U(3) * W] & keep
        s0, a = _add(s0, P[x] ^ m0, P[x + W] ^ m1)
        s0, b = _add(s0, P[x + U(2) * W] ^ m2, P[x + U(3) * W] ^ m3)
        s1, d = _add(s1, a, b)
        s0, a = _add(s0, P[x + U(4) * W] ^ m4, P[x + U(5) * W] ^ m5)
        s0, b = _add(s0, P[x + U(6) * W] ^ m6, P[x + U(7) * W] ^ m7)
        s1, e = _add(s1, a, b)
        s2, f = _add(s2, d, e)
        s0, a = _add(s0, P[x + U(8) * W] ^ m8, P[x + U(9) * W] ^ m9)
        s0, b = _add(s0, P[x + U(10) * W] ^ m10, P[x + U(11) * W] ^ m11)
        s1, d = _add(s1, a, b)
        s0, a = _add(s0, P[x + U(12) * W] ^ m12, P[x + U(13) * W] ^ m13)
        s0, b = _add(s0, P[x + U(14) * W] ^ m14, P[x + U(15) * W] ^ m15)
        s1, e = _add(s1, a, b)
        s2, a = _add(s2, d, e)
        s3, a = _add(s3, f, a)
        S[w], S[w + W], S[w + U(2) * W], S[w + U(3) * W] = s0, s1, s2, s3
        C[c + w] = a


@compiled
def _add_carries(C, S, first):  # type: ignore[no-untyped-def]
    """Adds the four carry planes of C to the sum planes 4, 5, 6; C[0] becomes the carry above."""
    keep = U(0) if first else ALL
    for word in range(WORDS):
        w = U(word)
        x4, a = _add(C[w], C[w + W], C[w + U(2) * W])
        b = x4 & C[w + U(3) * W]
        x4 ^= C[w + U(3) * W]
        s4, s5, s6 = S[w + U(4) * W] & keep, S[w + U(5) * W] & keep, S[w + U(6) * W] & keep
        s5, d = _add(s5, a ^ b, s4 & x4)
        s6, d = _add(s6, a & b, d)
        S[w + U(4) * W], S[w + U(5) * W], S[w + U(6) * W] = s4 ^ x4, s5, s6
        C[w] = d


@compiled
def distances(P, p, M, i, S, C):  # type: ignore[no-untyped-def]
    """The distances of a block to query i as sum planes in S: plane b has weight 2**b."""
    n_groups, n_sum = M.shape[1] // 16, len(S) // WORDS
    for start in range(0, n_groups, 4):
        C[:] = 0
        for g in range(start, min(start + 4, n_groups)):
            _add_group(P, p, M, i, g, S, C, U(g - start))
        _add_carries(C, S, start == 0)
        for plane in range(7, n_sum):
            at = U(plane) * W
            for word in range(WORDS):
                w = U(word)
                old = U(0) if start == 0 else S[at + w]
                S[at + w] = old ^ C[w]
                C[w] &= old


@compiled
def _split(T, level, S, flip):  # type: ignore[no-untyped-def]
    """Row ``level`` of T = the items of the row above with bit level + 3 set (clear: flip = ALL)."""
    child, parent, plane = U(level) * W, U(level + 1) * W, U(level + 3) * W
    some = U(0)
    for word in range(WORDS):
        w = U(word)
        v = T[parent + w] & (S[plane + w] ^ flip)
        T[child + w] = v
        some |= v
    return some != 0


@compiled
def _count_leaf(S, T, out, i, h):  # type: ignore[no-untyped-def]
    """Adds to out[i, 8h .. 8h+7] the items of T's row 0 with each value of the three lowest bits.

    Counting the subsets (n with bit a, with a and b, …) and subtracting needs half the ANDs.
    """
    n, na, nb, nc, nab, nac, nbc, nabc = U(0), U(0), U(0), U(0), U(0), U(0), U(0), U(0)
    for word in range(WORDS):
        w = U(word)
        v = T[w]
        a, b, c = v & S[w], v & S[w + W], v & S[w + U(2) * W]
        ab = a & b
        n += popcount(v)
        na += popcount(a)
        nb += popcount(b)
        nc += popcount(c)
        nab += popcount(ab)
        nac += popcount(a & c)
        nbc += popcount(b & c)
        nabc += popcount(ab & c)
    out[i, 8 * h + 7] += np.int64(nabc)
    out[i, 8 * h + 6] += np.int64(nbc - nabc)
    out[i, 8 * h + 5] += np.int64(nac - nabc)
    out[i, 8 * h + 4] += np.int64(nc - nac - nbc + nabc)
    out[i, 8 * h + 3] += np.int64(nab - nabc)
    out[i, 8 * h + 2] += np.int64(nb - nab - nbc + nabc)
    out[i, 8 * h + 1] += np.int64(na - nab - nac + nabc)
    out[i, 8 * h] += np.int64(n - na - nb - nc + nab + nac + nbc - nabc)


@compiled
def histogram(S, T, out, i):  # type: ignore[no-untyped-def]
    """Adds to out[i] (a multiple of 8 bins) how many items lie at each distance.

    The items are the mask in the last row of T. This walks the tree of the upper sum bits: a
    branch without items is left out whole, and real distances fill only a few branches.
    """
    levels = len(S) // WORDS - 3
    h = 0
    while h * 8 < out.shape[1]:
        level = levels - 1
        if h:  # the rows above the lowest one bit of h are those of the branch before
            level = 0
            while not (h >> level) & 1:
                level += 1
        alive = True
        while alive and level >= 0:
            alive = _split(T, level, S, U(0) if (h >> level) & 1 else ALL)
            level -= alive
        if alive:
            _count_leaf(S, T, out, i, h)
            h += 1
        else:
            h += 1 << level


@compiled
def within(S, radius, T):  # type: ignore[no-untyped-def]
    """Row 0 of T = mask of the items at distance <= radius (row 1 is scratch)."""
    for word in range(WORDS):
        T[U(word)] = 0
        T[U(word) + W] = ALL
    for plane in range(len(S) // WORDS - 1, -1, -1):
        at = U(plane) * W
        one = (radius >> plane) & 1
        for word in range(WORDS):
            w = U(word)
            equal, bit = T[w + W], S[at + w]
            if one:
                T[w] |= equal & ~bit
                T[w + W] = equal & bit
            else:
                T[w + W] = equal & ~bit
    for word in range(WORDS):
        T[U(word)] |= T[U(word) + W]


@njit(inline="always")
def lowest(mask):  # type: ignore[no-untyped-def]
    """The place (0 to 63) of the lowest one bit."""
    return popcount((mask & (~mask + ONE)) - ONE)


@njit(inline="always")
def distance_at(S, w, bit):  # type: ignore[no-untyped-def]
    """The distance, int64, of the item at one bit of word w."""
    distance = U(0)
    for plane in range(len(S) // WORDS):
        distance |= ((S[U(plane) * W + w] >> bit) & ONE) << U(plane)
    return np.int64(distance)
