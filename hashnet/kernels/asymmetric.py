"""Asymmetric search: the query keeps its logits, the database its bits; score = <logits, signs>.

A code is cut into nibbles of four bits. What a nibble contributes to the score has 16 values, so a query is
tables float64 (n_nibbles, 16), and a score is a sum of look-ups. The best score possible is the sum of the
largest value of each table; a row loses ``largest - value`` at each nibble. These losses are rounded *down*
to whole numbers up to 63, so that their sum bounds the true loss from below, and one shuffle instruction
looks up 32 of them at once. Only rows whose bound is small enough to beat the k-th best score so far are
scored, in float64: the result is exact, ordered by (score descending, position). One or
two queries of 64 bits are bounded by weighted Hamming distances instead.

>>> import numpy as np
>>> codes = np.array([[0b11110000], [0b11111111]], dtype=np.uint8)
>>> top_scores(codes, np.array([[2, 1, 1, 1, -3, 1, 1, 1]], dtype=np.float32), k=2)
(array([[0, 1]]), array([[5., 5.]], dtype=float32))
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hashnet.codes import pack_signs
from hashnet.kernels.exact import divide, pad_columns, writable_bytes
from hashnet.kernels.hamming import BLOCK
from hashnet.kernels.jit import (
    LANES,
    compiled,
    has_avx2,
    lanes_below,
    load64,
    lowest_bit,
    popcount,
    read_vector,
    run_all,
)

PLANE_BYTES = 16 << 10  # nibbles of a block: they stay in the first-level cache
GROUP = 128  # queries that share a block's nibbles
SMALL = 500_000  # comparisons of 64 bits below which another thread does not pay
FEW = 2  # queries for which two population counts per row are cheaper than taking rows apart
HELD = 1 << 22  # results of a group, queries x k: a huge k makes groups smaller
u64 = np.uint64
MAX_LOSS = 63  # of a nibble: four of them fit into a byte, and those of 4,096 bits into 16 bits


@intrinsic
def lanes_within(typingctx, nibbles, at, stride, losses, table_at, n_tables, bound):  # type: ignore[no-untyped-def]
    """A uint64 whose bit i says whether the losses of lane i add up to at most ``bound``, uint16.

    Lane i has the nibbles ``nibbles[at + i + stride * t]``, t < n_tables (a multiple of 4), and loses
    ``losses[table_at + 16 * t + nibble]`` at each.
    """
    byte, half = ir.IntType(8), ir.IntType(16)
    lanes, halves = ir.VectorType(byte, LANES), ir.VectorType(half, LANES // 2)

    def constant(value: int) -> Any:
        return ir.Constant(halves, [value] * (LANES // 2))

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        first, stride, losses, table_at, n_tables, bound = args[1:]
        word = first.type
        even = cgutils.alloca_once_value(builder, constant(0))  # sums of lanes 0, 2, 4 …
        odd = cgutils.alloca_once_value(builder, constant(0))
        with cgutils.for_range(builder, builder.udiv(n_tables, word(4))) as loop:
            four = builder.mul(loop.index, word(4))
            total = None
            for t in range(4):
                number = builder.add(four, word(t))
                start = builder.add(first, builder.mul(stride, number))
                places = read_vector(context, builder, signature.args[0], args[0], start, lanes)
                start = builder.add(table_at, builder.mul(number, word(16)))
                table = read_vector(
                    context, builder, signature.args[3], losses, start, ir.VectorType(byte, 16)
                )
                found = _look_up(builder, table, places)
                total = found if total is None else builder.add(total, found)
            pairs = builder.bitcast(total, halves)
            builder.store(builder.add(builder.load(even), builder.and_(pairs, constant(255))), even)
            builder.store(builder.add(builder.load(odd), builder.lshr(pairs, constant(8))), odd)
        nothing = ir.Constant(halves, ir.Undefined)
        one = builder.insert_element(nothing, bound, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES // 2), [0] * (LANES // 2))
        bounds = builder.shuffle_vector(one, nothing, zeros)
        below = [
            builder.sext(builder.icmp_unsigned("<=", builder.load(s), bounds), halves) for s in (even, odd)
        ]
        both = builder.or_(builder.and_(below[0], constant(0xFF)), builder.and_(below[1], constant(0xFF00)))
        inside = builder.icmp_unsigned("!=", builder.bitcast(both, lanes), ir.Constant(lanes, [0] * LANES))
        return builder.bitcast(inside, ir.IntType(LANES))

    signature = types.uint64(nibbles, types.intp, types.intp, losses, types.intp, types.intp, types.uint16)
    return signature, codegen


def _look_up(builder: Any, table: Any, places: Any) -> Any:
    """table[places]: 64 bytes looked up in 16."""
    int32 = ir.IntType(32)

    def pick(vector: Any, numbers: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(int32, len(numbers)), numbers)
        return builder.shuffle_vector(vector, vector, mask)

    if has_avx2():
        half = ir.VectorType(ir.IntType(8), 32)
        kind = ir.FunctionType(half, [half, half])
        shuffle = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
        twice = pick(table, [*range(16), *range(16)])
        parts = [builder.call(shuffle, [twice, pick(places, list(range(i, i + 32)))]) for i in (0, 32)]
        return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(int32, LANES), list(range(LANES))))
    found = ir.Constant(places.type, ir.Undefined)
    for lane in range(LANES):
        place = builder.zext(builder.extract_element(places, int32(lane)), int32)
        found = builder.insert_element(found, builder.extract_element(table, place), int32(lane))
    return found


class ScoreTables(NamedTuple):
    """q queries as sums of look-ups; ``n_tables`` is the number of nibbles, filled up to a multiple of 4."""

    values: np.ndarray  # float64 (q, n_tables, 16): what a nibble adds to the score
    losses: np.ndarray  # uint8, flat (q * n_tables * 16,): floor((largest - value) / unit)
    best: np.ndarray  # float64 (q,): the sum of the largest values
    units: np.ndarray  # float64 (q,): the loss that counts 1


def score_tables(logits: np.ndarray) -> ScoreTables:
    """Of logits float32 (q, n_bits)."""
    q, n_bits = logits.shape
    n_tables = -(-n_bits // 16) * 4
    padded = np.zeros((q, n_tables * 4))
    padded[:, :n_bits] = logits
    # signs of the four bits of a nibble, most significant first: (16, 4)
    signs = (np.arange(16)[:, None] >> np.array([3, 2, 1, 0]) & 1) * 2.0 - 1
    values = padded.reshape(q, n_tables, 4) @ signs.T
    largest = values.max(axis=2, keepdims=True)
    loss = largest - values
    units = np.maximum(loss.max(axis=(1, 2)) / MAX_LOSS, np.finfo(np.float64).tiny)
    losses = np.floor(loss / units[:, None, None] * (1 - 1e-12)).astype(np.uint8).reshape(-1)
    return ScoreTables(values, losses, largest.sum(axis=(1, 2)), units)


@njit(inline="always")
def _swap(a, b, shift, mask):  # type: ignore[no-untyped-def]
    """The two words with the bits of b under the mask and those of a above them exchanged."""
    t = ((a >> shift) ^ b) & mask
    return a ^ (t << shift), b ^ t


@compiled
def _fill_nibbles(codes, at, end, row_bytes, count, stride, nibbles):  # type: ignore[no-untyped-def]
    """The nibbles of ``count`` rows from byte ``at`` on, in order: nibble t of row i at t * stride + i.

    ``nibbles`` is uint8, flat; no byte of ``codes`` from ``end`` on is read. Squares of 8 rows x 8 bytes are
    transposed in registers; the last rows, where loading 8 bytes would read past the end, go one by one.
    """
    words, columns = nibbles.view(np.uint64), np.empty(8, np.uint64)
    low, four = u64(0x0F0F0F0F0F0F0F0F), u64(4)
    for whole in range(0, row_bytes, 8):
        squares = min(count, max(0, (end - 8 - at - whole) // row_bytes + 1)) // 8
        n_columns = min(8, row_bytes - whole)
        for i in range(0, squares * 8, 8):
            from_ = at + i * row_bytes + whole
            a, b = load64(codes, from_), load64(codes, from_ + row_bytes)
            c, d = load64(codes, from_ + 2 * row_bytes), load64(codes, from_ + 3 * row_bytes)
            e, f = load64(codes, from_ + 4 * row_bytes), load64(codes, from_ + 5 * row_bytes)
            g, h = load64(codes, from_ + 6 * row_bytes), load64(codes, from_ + 7 * row_bytes)
            a, e = _swap(a, e, u64(32), u64(0x00000000FFFFFFFF))
            b, f = _swap(b, f, u64(32), u64(0x00000000FFFFFFFF))
            c, g = _swap(c, g, u64(32), u64(0x00000000FFFFFFFF))
            d, h = _swap(d, h, u64(32), u64(0x00000000FFFFFFFF))
            a, c = _swap(a, c, u64(16), u64(0x0000FFFF0000FFFF))
            b, d = _swap(b, d, u64(16), u64(0x0000FFFF0000FFFF))
            e, g = _swap(e, g, u64(16), u64(0x0000FFFF0000FFFF))
            f, h = _swap(f, h, u64(16), u64(0x0000FFFF0000FFFF))
            a, b = _swap(a, b, u64(8), u64(0x00FF00FF00FF00FF))
            c, d = _swap(c, d, u64(8), u64(0x00FF00FF00FF00FF))
            e, f = _swap(e, f, u64(8), u64(0x00FF00FF00FF00FF))
            g, h = _swap(g, h, u64(8), u64(0x00FF00FF00FF00FF))
            columns[0], columns[1], columns[2], columns[3] = a, b, c, d
            columns[4], columns[5], columns[6], columns[7] = e, f, g, h
            for column in range(n_columns):
                place = (2 * (whole + column) * stride + i) // 8
                words[place] = (columns[column] >> four) & low
                words[place + stride // 8] = columns[column] & low
        for column in range(n_columns):
            place = 2 * (whole + column) * stride
            for i in range(squares * 8, count):
                byte = codes[at + i * row_bytes + whole + column]
                nibbles[place + i] = byte >> 4
                nibbles[place + stride + i] = byte & 15


@compiled
def score_code(values, codes, at, row_bytes):  # type: ignore[no-untyped-def]
    """The score, float64, of the code at ``codes[at]`` by the tables (n_tables, 16) of one query."""
    total = 0.0
    for b in range(row_bytes):
        byte = codes[at + b]
        total += values[2 * b, byte >> 4] + values[2 * b + 1, byte & 15]
    return total


@compiled
def score_candidates(values, codes, row_bytes, scores):  # type: ignore[no-untyped-def]
    """Fills ``scores`` float32 (q, m): of m codes per query, flat uint8 (q * m * row_bytes,)."""
    n_queries, m = scores.shape
    for q in range(n_queries):
        for i in range(m):
            scores[q, i] = score_code(values[q], codes, (q * m + i) * row_bytes, row_bytes)


@compiled
def _sift_down(scores, positions, root, size):  # type: ignore[no-untyped-def]
    """Restores a heap whose root is the worst: the smallest score and, among equals, the largest position."""
    while True:
        worst, left = root, 2 * root + 1
        for child in range(left, min(left + 2, size)):
            a, b = scores[child], scores[worst]
            if a < b or (a == b and positions[child] > positions[worst]):
                worst = child
        if worst == root:
            return
        scores[root], scores[worst] = scores[worst], scores[root]
        positions[root], positions[worst] = positions[worst], positions[root]
        root = worst


@compiled
def _insert(scores, positions, size, score, position):  # type: ignore[no-untyped-def]
    """Adds to a heap of ``size`` entries that has room."""
    at = size
    while at:
        parent = (at - 1) // 2
        if scores[parent] < score:  # positions ascend: the new one is the worst of its equals
            break
        scores[at], positions[at] = scores[parent], positions[parent]
        at = parent
    scores[at], positions[at] = score, position


@compiled
def scan_scores(codes, row_bytes, low, high, tables, first, last, allowed, positions, scores):  # type: ignore[no-untyped-def]
    """Fills ``positions`` int64 and ``scores`` float32 (last - first, k) with the best of the rows.

    Rows low … high - 1, queries first … last - 1 of ``tables``; unused slots hold -1, -inf before and after.
    ``allowed`` uint8 (n,) is 1 where a row may be found, or empty where all may.
    """
    values, losses, best, units = tables
    n_tables, k = values.shape[1], positions.shape[1]
    block = max(LANES, PLANE_BYTES // n_tables // LANES * LANES)
    nibbles = np.zeros(n_tables * block, np.uint8)
    group = min(GROUP, last - first, max(1, HELD // k))
    filtered = len(allowed) > 0
    used = np.zeros(last - first, np.int64)
    for start_query in range(0, last - first, group):
        size = min(group, last - first - start_query)
        for start in range(low, high, block):
            count = min(block, high - start)
            _fill_nibbles(codes, start * row_bytes, len(codes), row_bytes, count, block, nibbles)
            for j in range(start_query, start_query + size):
                q = first + j
                bound = _bound(best[q], units[q], scores[j, 0] if used[j] == k else -np.inf)
                if bound < 0:  # nothing can be better
                    continue
                for lane in range(0, count, LANES):
                    mask = lanes_within(
                        nibbles, lane, block, losses, q * n_tables * 16, n_tables, np.uint16(bound)
                    )
                    while mask != 0:
                        i = lane + lowest_bit(mask)
                        mask &= mask - np.uint64(1)
                        row = start + i
                        if i >= count or (filtered and allowed[row] == 0):
                            continue
                        score = np.float32(score_code(values[q], codes, row * row_bytes, row_bytes))
                        used[j] = _offer(scores[j], positions[j], used[j], score, row)
                        if used[j] == k:
                            bound = _bound(best[q], units[q], scores[j, 0])
                            if bound < 0:
                                break
                    if bound < 0:
                        break
    for j in range(last - first):
        _sort_heap(scores[j], positions[j], used[j])


class BitWeights(NamedTuple):
    """q queries of 64 bits with the loss of each bit rounded down to 0, 1, 2 or 3 units."""

    codes: np.ndarray  # uint64 (q,): the packed signs
    ones: np.ndarray  # uint64 (q,): the bits that lose 1 or 3 units
    twos: np.ndarray  # uint64 (q,): the bits that lose 2 or 3 units
    units: np.ndarray  # float64 (q,)


def bit_weights(logits: np.ndarray) -> BitWeights:
    """Of logits float32 (q, 64); of a few units per query, the one that rounds off least."""
    loss = 2 * np.abs(logits.astype(np.float64))
    largest = np.maximum(loss.max(axis=1), np.finfo(np.float64).tiny)
    sizes = largest[:, None] * (np.arange(1, 17) / 16)  # (q, 16)
    kept = np.minimum(np.floor(loss[:, None, :] / sizes[:, :, None]), 3).sum(axis=2) * sizes
    units = np.take_along_axis(sizes, kept.argmax(axis=1)[:, None], 1)  # (q, 1)
    weights = np.minimum(np.floor(loss / units * (1 - 1e-12)), 3).astype(np.uint8)
    ones, twos = (np.packbits(weights & bit != 0, axis=1).view(np.uint64)[:, 0] for bit in (1, 2))
    return BitWeights(pack_signs(logits).view(np.uint64)[:, 0], ones, twos, units[:, 0])


@compiled
def scan_few(codes, low, high, tables, weights, first, last, allowed, positions, scores):  # type: ignore[no-untyped-def]
    """The same for a few queries of 64 bits, for which taking rows apart into nibbles does not pay.

    Bounds are Hamming distances with the weights 0 to 3, as bytes: two population counts per row.
    """
    values, best, k = tables.values, tables.best, positions.shape[1]
    filtered = len(allowed) > 0
    out = np.empty(BLOCK + LANES, np.uint8)
    for j in range(last - first):
        q, used, bound = first + j, 0, 255
        code, ones, twos = weights.codes[q], weights.ones[q], weights.twos[q]
        for start in range(low, high, BLOCK):
            count = min(BLOCK, high - start)
            for i in range(count):
                different = load64(codes, (start + i) * 8) ^ code
                out[i] = popcount(different & ones) + u64(2) * popcount(different & twos)
            out[count : count + LANES] = 255  # more than 64 bits can lose
            for lane in range(0, count, LANES):
                mask = lanes_below(out, lane, np.uint8(bound))
                while mask != 0:
                    i = lane + lowest_bit(mask)
                    mask &= mask - np.uint64(1)
                    row = start + i
                    if out[i] >= bound or (filtered and allowed[row] == 0):
                        continue
                    score = np.float32(score_code(values[q], codes, row * 8, 8))
                    used = _offer(scores[j], positions[j], used, score, row)
                    if used == k:
                        bound = min(255, _bound(best[q], weights.units[q], scores[j, 0]) + 1)
        _sort_heap(scores[j], positions[j], used)


@compiled
def _offer(scores, positions, used, score, row):  # type: ignore[no-untyped-def]
    """Puts a row into a heap (k,) of ``used`` entries if it has room or a worse one; how many it has then."""
    if used < len(scores):
        _insert(scores, positions, used, score, row)
        return used + 1
    if score > scores[0]:
        scores[0], positions[0] = score, row
        _sift_down(scores, positions, 0, used)
    return used


@compiled
def _sort_heap(scores, positions, used):  # type: ignore[no-untyped-def]
    """Heap sort: the worst goes to the end."""
    for end in range(used - 1, 0, -1):
        scores[0], scores[end] = scores[end], scores[0]
        positions[0], positions[end] = positions[end], positions[0]
        _sift_down(scores, positions, 0, end)


@compiled
def _bound(best, unit, kth):  # type: ignore[no-untyped-def]
    """The largest sum of losses a row may have to score more than ``kth``; -1 where none can."""
    if np.float64(kth) >= best:
        return -1
    return min(65535, np.int64(min((best - np.float64(kth)) / unit * (1 + 1e-12) + 1e-6, 65535.0)))


def top_scores(
    codes: np.ndarray,
    logits: np.ndarray,
    k: int,
    *,
    allowed: np.ndarray | None = None,
    threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(positions int64, scores float32), both (q, k), of the highest scores; -1, -inf where there are none.

    ``codes`` uint8 (n, n_bits // 8) and ``logits`` float32 (q, n_bits), finite; ``allowed`` uint8 (n,) marks
    the rows that may be found. A score is summed in float64 and rounded once.
    """
    n, n_queries = len(codes), len(logits)
    width = min(k, n)
    flat, tables = writable_bytes(codes), score_tables(logits)
    only = np.empty(0, np.uint8) if allowed is None else allowed
    weights = bit_weights(logits) if n_queries <= FEW and codes.shape[1] == 8 else None
    by_query, ranges = divide(codes.shape, n_queries, threads, small=SMALL)

    def scan(low: int, high: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.full((last - first, width), -1, dtype=np.int64)
        scores = np.full((last - first, width), -np.inf, dtype=np.float32)
        if weights is not None:
            scan_few(flat, low, high, tables, weights, first, last, only, positions, scores)
        else:
            scan_scores(flat, codes.shape[1], low, high, tables, first, last, only, positions, scores)
        return positions, scores

    if not width or not n_queries:
        return np.full((n_queries, k), -1), np.full((n_queries, k), -np.inf, dtype=np.float32)
    parts = run_all([partial(scan, *bounds) for bounds in ranges])
    if by_query or len(parts) == 1:
        positions, scores = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return pad_columns(positions, k), pad_columns(scores, k, -np.inf)
    return merge_scores([p for p, _ in parts], [s for _, s in parts], k)


def score_codes(codes: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Scores float32 (q, m) of codes uint8 (q, m, n_bits // 8): m candidates of each query."""
    scores = np.empty(codes.shape[:2], dtype=np.float32)
    score_candidates(score_tables(logits).values, writable_bytes(codes), codes.shape[2], scores)
    return scores


def merge_scores(ids: list[np.ndarray], scores: list[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, scores) (q, k) of several parts (q, k_i), by (score descending, id); -1, -inf if unused."""
    all_ids, all_scores = np.concatenate(ids, axis=1), np.concatenate(scores, axis=1)
    order = np.lexsort((all_ids, -all_scores), axis=1)[:, :k]
    ids_, scores_ = np.take_along_axis(all_ids, order, 1), np.take_along_axis(all_scores, order, 1)
    return pad_columns(ids_, k), pad_columns(scores_, k, -np.inf)
