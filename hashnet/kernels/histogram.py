"""What bit-sliced distances say: how many items lie at each distance, and which within a radius.

D holds the distances of a block as sum planes (``hashnet.kernels.bitslice``), T rows of item masks.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hashnet.kernels.bitslice import ALL, WORDS, U, W, spread
from hashnet.kernels.jit import compiled, popcount

ONE = np.uint64(1)
SPARSE = np.uint64(128)  # distances that fewer items than one in this many have are counted item by item


@njit(inline="always")
def lowest(mask):  # type: ignore[no-untyped-def]
    """The place (0 to 63) of the lowest one bit."""
    return popcount((mask & (~mask + ONE)) - ONE)


@compiled
def _split(T, level, D, flip):  # type: ignore[no-untyped-def]
    """Row 8 + level of T = the items of the row above with bit 7 + level set (clear: flip = ALL)."""
    child, parent, plane = U(8 + level) * W, U(9 + level) * W, U(7 + level) * W
    some = U(0)
    for word in range(WORDS):
        w = U(word)
        v = T[parent + w] & (D[plane + w] ^ flip)
        T[child + w] = v
        some |= v
    return some != 0


@compiled
def _split_in_eight(T, D):  # type: ignore[no-untyped-def]
    """Rows 0 to 7 of T = the items of row 8 by their bits 4 to 6; bit r of the result: row r has any."""
    a0, a1, a2, a3, a4, a5, a6, a7 = U(0), U(0), U(0), U(0), U(0), U(0), U(0), U(0)
    for word in range(WORDS):
        w = U(word)
        v, low, mid = T[w + U(8) * W], D[w + U(4) * W], D[w + U(5) * W]
        upper = v & D[w + U(6) * W]
        lower = v ^ upper
        v3 = lower & mid
        v1 = lower ^ v3
        v7 = upper & mid
        v5 = upper ^ v7
        r1, r3, r5, r7 = v1 & low, v3 & low, v5 & low, v7 & low
        r0, r2, r4, r6 = v1 ^ r1, v3 ^ r3, v5 ^ r5, v7 ^ r7
        T[w], T[w + W], T[w + U(2) * W], T[w + U(3) * W] = r0, r1, r2, r3
        T[w + U(4) * W], T[w + U(5) * W], T[w + U(6) * W], T[w + U(7) * W] = r4, r5, r6, r7
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
def _book(out, i, d, n, na, nb, nc, nab, nac, nbc, nabc):  # type: ignore[no-untyped-def]
    """Adds to out[i, d], out[i, d + 2] … the items by their bits a, b, c, from the sizes of subsets."""
    out[i, d + 14] += np.int64(nabc)
    out[i, d + 12] += np.int64(nbc - nabc)
    out[i, d + 10] += np.int64(nac - nabc)
    out[i, d + 8] += np.int64(nc - nac - nbc + nabc)
    out[i, d + 6] += np.int64(nab - nabc)
    out[i, d + 4] += np.int64(nb - nab - nbc + nabc)
    out[i, d + 2] += np.int64(na - nab - nac + nabc)
    out[i, d] += np.int64(n - na - nb - nc + nab + nac + nbc - nabc)


@compiled
def _count_leaf(D, T, row, out, i, d):  # type: ignore[no-untyped-def]
    """Counts the items of one row of T by their bits 1 to 3; bit 0 is that of ``d``, their least distance.

    The sizes of subsets (all, with bit a, with a and b, …) need half the ANDs of the eight values.
    """
    n, na, nb, nc, nab, nac, nbc, nabc = U(0), U(0), U(0), U(0), U(0), U(0), U(0), U(0)
    here = U(row) * W
    for word in range(WORDS):
        w = U(word)
        v = T[here + w]
        a, b, c = v & D[w + W], v & D[w + U(2) * W], v & D[w + U(3) * W]
        ab = a & b
        n += popcount(v)
        na += popcount(a)
        nb += popcount(b)
        nc += popcount(c)
        nab += popcount(ab)
        nac += popcount(a & c)
        nbc += popcount(b & c)
        nabc += popcount(ab & c)
    _book(out, i, d, n, na, nb, nc, nab, nac, nbc, nabc)


@compiled
def _count_leaf_marked(D, T, row, R, j, base, out, marked, i, d):  # type: ignore[no-untyped-def]
    """The same, and in ``marked`` the same of the items marked in R[j], block at ``base``."""
    n, na, nb, nc, nab, nac, nbc, nabc = U(0), U(0), U(0), U(0), U(0), U(0), U(0), U(0)
    m, ma, mb, mc, mab, mac, mbc, mabc = U(0), U(0), U(0), U(0), U(0), U(0), U(0), U(0)
    here = U(row) * W
    for word in range(WORDS):
        w = U(word)
        v, r = T[here + w], R[j, base + w]
        a, b, c = v & D[w + W], v & D[w + U(2) * W], v & D[w + U(3) * W]
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
    _book(out, i, d, n, na, nb, nc, nab, nac, nbc, nabc)
    _book(marked, i, d, m, ma, mb, mc, mab, mac, mbc, mabc)


@compiled
def _is_sparse(out, i, h, base):  # type: ignore[no-untyped-def]
    """Whether fewer than one in SPARSE of the items before this block lie at distances 16h to 16h + 15."""
    total = 0
    for d in range(16 * h, 16 * h + 16):
        total += out[i, d]
    return U(total) * SPARSE < base * U(64)


@compiled
def _count_one_by_one(D, T, row, R, j, base, both, out, marked, i, first):  # type: ignore[no-untyped-def]
    """What the other two do, item by item: quicker where there are few."""
    here = U(row) * W
    for word in range(WORDS):
        w = U(word)
        mask = T[here + w]
        while mask:
            bit = lowest(mask)
            mask &= mask - ONE
            low = (D[w + W] >> bit) & ONE | ((D[w + U(2) * W] >> bit) & ONE) << ONE
            d = first + 2 * np.int64(low | ((D[w + U(3) * W] >> bit) & ONE) << U(2))
            out[i, d] += 1
            if both:
                marked[i, d] += np.int64((R[j, base + w] >> bit) & ONE)


@compiled
def histogram(D, odd, valid, T, R, j, base, both, out, marked, i):  # type: ignore[no-untyped-def]
    """Adds to out[i] how many of the block's first ``valid`` items lie at each distance.

    Their distances are all odd, or all even. With ``both``, adds to marked[i] how many of those marked in
    R[j], block at ``base``, do. out has n_bits + 16 bins, T two rows more than D. This walks the tree of the
    upper sum bits: a branch without items is left out whole, and real distances fill only a few; those that
    were rare in the blocks before are counted singly.
    """
    top = U(len(T)) - W
    for word in range(WORDS):
        T[top + U(word)] = ALL if 64 * word + 64 <= valid else U(0)
    if valid < WORDS * 64:
        T[top + U(valid >> 6)] = (ONE << U(valid & 63)) - ONE
    levels = len(D) // WORDS - 7
    g = 0  # distances 128 g to 128 g + 127
    while g * 128 <= out.shape[1] - 16:
        level = levels - 1
        if g:  # the rows above the lowest one bit of g are those of the branch before
            level = 0
            while not (g >> level) & 1:
                level += 1
        alive = True
        while alive and level >= 0:
            alive = _split(T, level, D, U(0) if (g >> level) & 1 else ALL)
            level -= alive
        if not alive:
            g += 1 << level
            continue
        some = _split_in_eight(T, D)
        for row in range(8):
            if not (some >> row) & 1:
                continue
            h = 8 * g + row
            d = 16 * h + odd
            if _is_sparse(out, i, h, base):
                _count_one_by_one(D, T, row, R, j, base, both, out, marked, i, d)
            elif both:
                _count_leaf_marked(D, T, row, R, j, base, out, marked, i, d)
            else:
                _count_leaf(D, T, row, out, i, d)
        g += 1


@compiled
def within(D, radius, T):  # type: ignore[no-untyped-def]
    """Row 0 of T = mask of the items at distance <= radius."""
    r0, r1, r2, r3 = spread(radius, 0), spread(radius, 1), spread(radius, 2), spread(radius, 3)
    r4, r5, r6 = spread(radius, 4), spread(radius, 5), spread(radius, 6)
    for word in range(WORDS):  # from the lowest bit up: a higher bit that differs decides
        w = U(word)
        more = D[w] & ~r0
        d = D[w + W]
        more = (d & ~r1) | (more & ~(d ^ r1))
        d = D[w + U(2) * W]
        more = (d & ~r2) | (more & ~(d ^ r2))
        d = D[w + U(3) * W]
        more = (d & ~r3) | (more & ~(d ^ r3))
        d = D[w + U(4) * W]
        more = (d & ~r4) | (more & ~(d ^ r4))
        d = D[w + U(5) * W]
        more = (d & ~r5) | (more & ~(d ^ r5))
        d = D[w + U(6) * W]
        more = (d & ~r6) | (more & ~(d ^ r6))
        T[w] = ~more
    for plane in range(7, len(D) // WORDS):
        here, r = U(plane) * W, spread(radius, plane)
        for word in range(WORDS):
            w = U(word)
            d = D[here + w]
            T[w] = ~((d & ~r) | (~T[w] & ~(d ^ r)))


@njit(inline="always")
def distance_at(D, w, bit):  # type: ignore[no-untyped-def]
    """The distance, int64, of the item at one bit of word w."""
    distance = U(0)
    for plane in range(len(D) // WORDS):
        distance |= ((D[U(plane) * W + w] >> bit) & ONE) << U(plane)
    return np.int64(distance)
