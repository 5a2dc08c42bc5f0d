"""How kernels are compiled, and machine-level steps numba lacks: population counts, unaligned words, lanes.

LLVM turns ``popcount`` inside a loop into VPOPCNTDQ, AVX2 or POPCNT, whatever the machine has.
numba's fallback threading layer aborts the process when two Python threads run parallel kernels
at once, as a served index does, so ``omp`` (or ``tbb``, where installed) is requested.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import UserWideCacheLocator
from numba.extending import intrinsic

numba.config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]  # type: ignore[attr-defined]
numba.config.THREADING_LAYER = "threadsafe"  # type: ignore[attr-defined]


@intrinsic
def popcount(typingctx, word):  # type: ignore[no-untyped-def]
    """Number of one bits of a uint64, as uint64; of a uint32, as uint32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    width = types.uint32 if word == types.uint32 else types.uint64
    return width(width), codegen


@functools.cache
def _sources(folder: Path) -> str:
    """A digest of this package and of the one in ``folder``: numba itself checks only a kernel's own file.

    Kernels use functions and constants of these two packages and of no other.
    """
    digest = hashlib.sha256()
    for path in sorted({*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class KernelCache(UserWideCacheLocator):
    """Keeps machine code in the user's cache folder under a digest of the source, not its location.

    Every clone, and every copy that Ray unpacks for a job, then finds what another one compiled.
    """

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The folder, below numba's own, for the kernels of a file."""
        folder = Path(py_file).parent
        return f"hashnet-{_sources(folder)}-{folder.name}"


def compiled(function: Callable, **options: Any) -> Any:
    """``function`` compiled on first use, without the GIL, and kept on disk where a place is writable.

    ``options`` are numba's. Threads share such kernels freely. NUMBA_CACHE_DIR chooses another place; with
    none that is writable each process compiles anew.
    """
    before = numba.config.CACHE_LOCATOR_CLASSES  # type: ignore[attr-defined]
    numba.config.CACHE_LOCATOR_CLASSES = f"UserProvidedCacheLocator,{__name__}.KernelCache"  # type: ignore[attr-defined]
    try:
        return numba.njit(function, nogil=True, cache=True, **options)
    except RuntimeError:  # numba found no folder it may write its cache to
        return numba.njit(function, nogil=True, **options)
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = before  # type: ignore[attr-defined]


def memory_between(low: int, high: int) -> np.ndarray:
    """uint8 (high - low,) of the bytes at these addresses, which the caller keeps alive.

    It is writable whatever lies there: numba would compile anew for read-only arrays.
    """
    return np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), np.uint8)


LANES = 64  # distances compared at once: one 512-bit register of bytes, two of AVX2


def read_vector(context: Any, builder: Any, array_type: Any, array: Any, start: Any, kind: Any) -> Any:
    """A load from ``array[start]`` on that assumes no alignment; x86 and ARM do it at full speed."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.bitcast(builder.gep(data, [start]), kind.as_pointer())
    value = builder.load(pointer)
    value.align = 1
    return value


def write_vector(context: Any, builder: Any, array_type: Any, array: Any, start: Any, vector: Any) -> None:
    """A store of ``vector`` into ``array[start]`` and on that assumes no alignment."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.bitcast(builder.gep(data, [start]), vector.type.as_pointer())
    builder.store(vector, pointer).align = 1


@intrinsic
def load64(typingctx, codes, start):  # type: ignore[no-untyped-def]
    """The 8 bytes ``codes[start : start + 8]`` as uint64, little-endian."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return read_vector(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))

    return types.uint64(codes, types.intp), codegen


@intrinsic
def load32(typingctx, codes, start):  # type: ignore[no-untyped-def]
    """The 4 bytes ``codes[start : start + 4]`` as uint32, little-endian."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return read_vector(context, builder, signature.args[0], args[0], args[1], ir.IntType(32))

    return types.uint32(codes, types.intp), codegen


@intrinsic
def lanes_below(typingctx, distances, start, bound):  # type: ignore[no-untyped-def]
    """A uint64 whose bit i says whether ``distances[start + i] < bound``, for i = 0..63."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), LANES)
        found = read_vector(context, builder, signature.args[0], args[0], args[1], vector)
        nothing = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(nothing, args[2], ir.IntType(32)(0))
        every_lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        bounds = builder.shuffle_vector(one, nothing, every_lane)
        return builder.bitcast(builder.icmp_unsigned("<", found, bounds), ir.IntType(LANES))

    return types.uint64(distances, types.intp, distances.dtype), codegen


WORDS = ir.VectorType(ir.IntType(64), 8)  # one 512-bit register, two of AVX2: the same word of eight rows
BYTES = ir.VectorType(ir.IntType(8), LANES)  # the same bits as bytes


@intrinsic
def interleave_chunk(typingctx, codes, at, row_bytes, out, i):  # type: ignore[no-untyped-def]
    """Writes 64 bytes of eight rows, from byte ``at`` + row x ``row_bytes`` on, into ``out[i : i + 64]``.

    ``out`` uint64 (flat): first word 0 of the eight rows, then word 1 and so on. A transpose of 8 x 8 words.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        codes, at, row_bytes, out, i = args
        index = at.type
        places = [builder.add(at, builder.mul(row_bytes, index(row))) for row in range(8)]
        v = [read_vector(context, builder, signature.args[0], codes, place, WORDS) for place in places]
        for step in (1, 2, 4):  # rows a and a + step exchange the blocks of step x step off the diagonal
            keep_low = [lane - step + 8 if lane & step else lane for lane in range(8)]
            keep_high = [lane + 8 if lane & step else lane + step for lane in range(8)]
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), 8), lanes) for lanes in (keep_low, keep_high)]
            for a in (row for row in range(8) if not row & step):
                low, high = v[a], v[a + step]
                v[a], v[a + step] = (builder.shuffle_vector(low, high, mask) for mask in masks)
        for w in range(8):
            place = builder.add(i, index(8 * w))
            write_vector(context, builder, signature.args[3], out, place, v[w])
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, out, types.intp), codegen


@intrinsic
def eight_distances(typingctx, rows, at, query, n_words, out, i):  # type: ignore[no-untyped-def]
    """Writes the distances of eight rows to ``query`` uint64 (n_words,) into ``out[i : i + 8]``.

    ``rows`` uint64 (flat) has the first words of the eight rows from ``at`` on, then their second words and
    so on: (n_words, 8). A vector then holds one word of every row: each lane is a row, and nothing has to be
    summed across lanes.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        rows, at, query, n_words, out, i = args

        def different(w):  # type: ignore[no-untyped-def]
            """WORDS: the bits in which word ``w`` of the eight rows differs from the query's."""
            place = builder.add(at, builder.mul(w, w.type(8)))
            here = read_vector(context, builder, signature.args[0], rows, place, WORDS)
            one = ir.VectorType(ir.IntType(64), 1)
            wanted = read_vector(context, builder, signature.args[2], query, w, one)
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
            return builder.xor(here, builder.shuffle_vector(wanted, wanted, lanes))

        ones = _ones_by_word if _host_has("avx512vpopcntdq") else _ones_by_plane
        lanes = ir.VectorType(context.get_data_type(signature.args[4].dtype), 8)
        found = builder.trunc(ones(builder, n_words, different), lanes)
        write_vector(context, builder, signature.args[4], out, i, found)
        return context.get_dummy_value()

    return types.void(rows, types.intp, query, types.intp, out, types.intp), codegen


def _ones_by_word(builder: Any, n_words: Any, different: Callable) -> Any:
    """WORDS: the ones of ``different(w)`` for all w < n_words, counted word by word (VPOPCNTQ)."""
    index = n_words.type
    total = cgutils.alloca_once_value(builder, ir.Constant(WORDS, [0] * 8))

    def count(w: Any) -> None:
        builder.store(builder.add(builder.load(total), _ones(builder, different(w))), total)

    with cgutils.for_range(builder, builder.udiv(n_words, index(8))) as loop:
        first = builder.mul(loop.index, index(8))
        for w in range(8):
            count(builder.add(first, index(w)))
    with cgutils.for_range(builder, builder.urem(n_words, index(8))) as loop:
        count(builder.sub(builder.sub(n_words, index(1)), loop.index))
    return builder.load(total)


def _ones_by_plane(builder: Any, n_words: Any, different: Callable) -> Any:
    """The same where counting is expensive (7 instructions or more): words are first added up, bit by bit.

    Three planes, ``one + 2 two + 4 four``, hold in every bit position how many of the words had a one there
    (Harley and Seal). Seven words fill them. Every eight words more are added with seven adders, and what is
    carried out of ``four`` is the only vector that has to be counted; the planes themselves are counted at
    the end. Words left over are counted one at a time.
    """
    index, zeros = n_words.type, ir.Constant(WORDS, [0] * 8)
    planes = [cgutils.alloca_once_value(builder, zeros) for _ in range(3)]
    eights = cgutils.alloca_once_value(builder, ir.Constant(BYTES, [0] * LANES))
    add = partial(_full_adder, builder)

    enough = builder.icmp_unsigned(">=", n_words, index(7))
    with builder.if_then(enough):
        x = [different(index(w)) for w in range(7)]
        one, two_a = add(x[0], x[1], x[2])
        one, two_b = add(one, x[3], x[4])
        one, two_c = add(one, x[5], x[6])
        two, four = add(two_a, two_b, two_c)
        for plane, value in zip(planes, (one, two, four), strict=True):
            builder.store(value, plane)

    after_seven = builder.sub(n_words, index(7))
    chunks = builder.select(enough, builder.udiv(after_seven, index(8)), index(0))
    with cgutils.for_range(builder, chunks) as loop:
        first = builder.add(builder.mul(loop.index, index(8)), index(7))
        x = [different(builder.add(first, index(w))) for w in range(8)]
        one, two, four = (builder.load(plane) for plane in planes)
        one, two_a = add(one, x[0], x[1])
        one, two_b = add(one, x[2], x[3])
        one, two_c = add(one, x[4], x[5])
        one, two_d = add(one, x[6], x[7])
        two, four_a = add(two, two_a, two_b)
        two, four_b = add(two, two_c, two_d)
        four, eight = add(four, four_a, four_b)
        for plane, value in zip(planes, (one, two, four), strict=True):
            builder.store(value, plane)
        builder.store(builder.add(builder.load(eights), _ones_of_bytes(builder, eight)), eights)

    one, two, four = (_ones_of_bytes(builder, builder.load(plane)) for plane in planes)
    two = builder.add(two, builder.add(four, four))
    rest = cgutils.alloca_once_value(builder, builder.add(one, builder.add(two, two)))
    left = builder.select(enough, builder.urem(after_seven, index(8)), n_words)
    with cgutils.for_range(builder, left) as loop:
        last = different(builder.sub(builder.sub(n_words, index(1)), loop.index))
        builder.store(builder.add(builder.load(rest), _ones_of_bytes(builder, last)), rest)

    # a byte of ``rest`` is at most 8 x (7 + 7), and one of ``eights`` at most 8 per chunk: 64 at 4,096 bits
    weighed = builder.shl(_sums_of_words(builder, builder.load(eights)), ir.Constant(WORDS, [3] * 8))
    return builder.add(_sums_of_words(builder, builder.load(rest)), weighed)


def _full_adder(builder: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """(sum, carry) of three bits, in each of the 512 positions of three WORDS."""
    if _host_has("avx512f"):  # one instruction each, by truth table; LLVM makes four of the formulas below
        kind = ir.FunctionType(WORDS, [WORDS] * 3 + [ir.IntType(32)])
        logic = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.pternlog.q.512")
        parity, majority = (builder.call(logic, [a, b, c, ir.IntType(32)(t)]) for t in (0x96, 0xE8))
        return parity, majority
    either = builder.xor(a, b)
    return builder.xor(either, c), builder.or_(builder.and_(a, b), builder.and_(either, c))


def _ones(builder: Any, vector: Any) -> Any:
    """How many ones each lane has."""
    kind = vector.type
    name = f"llvm.ctpop.v{kind.count}i{kind.element.width}"
    count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)
    return builder.call(count, [vector])


def _ones_of_bytes(builder: Any, words: Any) -> Any:
    """BYTES: how many ones each byte of WORDS has."""
    return _ones(builder, builder.bitcast(words, BYTES))


def _sums_of_words(builder: Any, counts: Any) -> Any:
    """WORDS: the sum of each eight of BYTES."""
    if _host_has("avx512bw"):
        kind = ir.FunctionType(WORDS, [BYTES, BYTES])
        add_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.psad.bw.512")
        return builder.call(add_up, [counts, ir.Constant(BYTES, [0] * LANES)])
    return _fold_bytes(builder, builder.bitcast(counts, WORDS))


def _distances(in_turn: bool) -> Any:
    """A step of kernels: the Hamming distances of one query to four rows that are read where they lie.

    ``in_turn`` reads one row after the other, which prefetching follows; else each chunk of the four at once.
    """

    @intrinsic
    def distances(typingctx, codes, start, row_bytes, query, n_chunks):  # type: ignore[no-untyped-def]
        """A uint64 of four distances, 16 bits per row.

        Rows begin at ``start``, ``start + row_bytes`` … of ``codes`` uint8; the first ``n_chunks`` x 64 bytes
        of each are compared with ``query`` uint64. Ones are counted 64 bytes at once: per word where the
        machine does that, else per byte.
        """
        by_word = _host_has("avx512vpopcntdq")
        unit = WORDS if by_word else BYTES

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            codes, start, row_bytes, query, n_chunks = args
            word, zeros = start.type, ir.Constant(unit, [0] * unit.count)
            totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(4)]
            for rows in [[0], [1], [2], [3]] if in_turn else [[0, 1, 2, 3]]:
                with cgutils.for_range(builder, n_chunks) as loop:
                    place = builder.mul(loop.index, word(8))
                    wanted = read_vector(context, builder, signature.args[3], query, place, unit)
                    chunk = builder.add(start, builder.mul(loop.index, word(LANES)))
                    for row in rows:
                        at = builder.add(chunk, builder.mul(row_bytes, word(row)))
                        here = read_vector(context, builder, signature.args[0], codes, at, unit)
                        different = _ones(builder, builder.xor(here, wanted))
                        builder.store(builder.add(builder.load(totals[row]), different), totals[row])
            parts = [builder.load(total) for total in totals]
            parts = parts if by_word else [_sum_bytes(builder, part) for part in parts]
            packed = parts[0]  # partial sums of the four rows, 16 bits each
            for row in range(1, 4):
                shift = ir.Constant(packed.type, [16 * row] * packed.type.count)
                packed = builder.or_(packed, builder.shl(parts[row], shift))
            return _sum_of_lanes(builder, packed)

        return types.uint64(codes, types.intp, types.intp, query, types.intp), codegen

    return distances


four_distances, four_in_turn = _distances(in_turn=False), _distances(in_turn=True)


def _sum_of_lanes(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes, by halves."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        picks = [list(range(half)), list(range(half, 2 * half))]
        kind = ir.VectorType(ir.IntType(32), half)
        low, high = (builder.shuffle_vector(vector, vector, ir.Constant(kind, lanes)) for lanes in picks)
        vector = builder.add(low, high)
    return builder.extract_element(vector, ir.IntType(32)(0))


def _sum_bytes(builder: Any, vector: Any) -> Any:
    """Four numbers of 64 bits that add up to the 64 bytes of a vector, each of which is at most 127."""
    int32, byte, long = ir.IntType(32), ir.IntType(8), ir.IntType(64)
    halves = [
        builder.shuffle_vector(
            vector, vector, ir.Constant(ir.VectorType(int32, 32), list(range(first, first + 32)))
        )
        for first in (0, 32)
    ]
    total = builder.add(*halves)
    if has_avx2():
        kind = ir.FunctionType(ir.VectorType(long, 4), [ir.VectorType(byte, 32)] * 2)
        add_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.psad.bw")
        return builder.call(add_up, [total, ir.Constant(ir.VectorType(byte, 32), [0] * 32)])
    return _fold_bytes(builder, builder.bitcast(total, ir.VectorType(long, 4)))


def _fold_bytes(builder: Any, words: Any) -> Any:
    """The sum of the 8 bytes of each word of a vector, by halves."""
    kind = words.type
    for bits, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        masks = ir.Constant(kind, [mask] * kind.count)
        above = builder.lshr(words, ir.Constant(kind, [bits] * kind.count))
        words = builder.add(builder.and_(words, masks), builder.and_(above, masks))
    return words


def has_avx2() -> bool:
    """Whether code is compiled for a machine with AVX2, which shuffles and adds up bytes."""
    return _host_has("avx2")


def _host_has(feature: str) -> bool:
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:  # type: ignore[attr-defined]
        return False
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


@intrinsic
def lowest_bit(typingctx, mask):  # type: ignore[no-untyped-def]
    """Position of the lowest set bit of a uint64 that is not 0."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.intp(types.uint64), codegen


# ---------------------------------------------------------------- threads
# How many threads a search or an evaluation uses, and the pool searches share.

T = TypeVar("T")

_pool: ThreadPoolExecutor | None = None


def default_threads() -> int:
    """OMP_NUM_THREADS where it is set (Ray sets it to an actor's CPUs), else the cores we may use."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if told.isdigit() and int(told) > 0:
        return int(told)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(calls: list[Callable[[], T]]) -> list[T]:
    """The results of all calls, in order; the first runs here, the others on the pool.

    Plain Python threads, since compiled kernels let go of the GIL: any number of callers may
    search at once, and a one-core actor starts no thread at all.
    """
    if len(calls) == 1:
        return [calls[0]()]
    waiting = [_threads().submit(call) for call in calls[1:]]
    first = calls[0]()
    return [first, *(future.result() for future in waiting)]


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="hashnet-search")
    return _pool


def _forget_pool() -> None:
    global _pool
    _pool = None  # a forked child has none of the threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
