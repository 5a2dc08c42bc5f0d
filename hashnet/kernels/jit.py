"""How kernels are compiled, and machine-level steps numba lacks: population counts, unaligned words, lanes.

LLVM turns ``popcount`` inside a loop into VPOPCNTDQ, AVX2 or POPCNT, whatever the machine has.
numba's fallback threading layer aborts the process when two Python threads run parallel kernels
at once, as a served index does, so ``omp`` (or ``tbb``, where installed) is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    """A digest of this package and of the one in ``folder``: numba looks at a kernel's own file alone.

    Kernels use functions and constants of these two packages and of no other.
    """
    digest = hashlib.sha256()
    for path in sorted({*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class KernelCache(UserWideCacheLocator):
    """Keeps machine code in the user's cache folder by what the code says, not by where it lies.

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


def _distances(n_queries: int, in_turn: bool = False) -> Any:
    """A step of kernels: the Hamming distances of ``n_queries`` queries (1 or 4) to four rows.

    ``in_turn`` reads one row after the other, which prefetching follows; else each chunk of the four at once.
    """

    @intrinsic
    def distances(typingctx, codes, start, row_bytes, queries, first, n_chunks):  # type: ignore[no-untyped-def]
        """A uint64 per query, 16 bits per row.

        Rows begin at ``start``, ``start + row_bytes`` … of ``codes`` uint8; the first ``n_chunks`` x 64 bytes
        of each are compared with the queries that begin at the words ``first`` of ``queries`` uint64 (flat).
        Ones are counted 64 bytes at once: per word where the machine does that, else per byte.
        """
        by_word = _host_has("avx512vpopcntdq")
        unit = ir.VectorType(ir.IntType(64), 8) if by_word else ir.VectorType(ir.IntType(8), LANES)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            codes, start, row_bytes, queries, first, n_chunks = args
            word, zeros = start.type, ir.Constant(unit, [0] * unit.count)
            kind = ir.FunctionType(unit, [unit])
            name = f"llvm.ctpop.v{unit.count}i{unit.element.width}"
            ones = cgutils.get_or_insert_function(builder.module, kind, name)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(4)] for _ in range(n_queries)]
            begins = cgutils.unpack_tuple(builder, first)
            for rows in [[0], [1], [2], [3]] if in_turn else [[0, 1, 2, 3]]:
                with cgutils.for_range(builder, n_chunks) as loop:
                    place = builder.mul(loop.index, word(8))
                    wanted = [
                        read_vector(context, builder, signature.args[3], queries, builder.add(b, place), unit)
                        for b in begins
                    ]
                    chunk = builder.add(start, builder.mul(loop.index, word(LANES)))
                    for row in rows:
                        at = builder.add(chunk, builder.mul(row_bytes, word(row)))
                        here = read_vector(context, builder, signature.args[0], codes, at, unit)
                        for query, totals in zip(wanted, sums, strict=True):
                            different = builder.call(ones, [builder.xor(here, query)])
                            builder.store(builder.add(builder.load(totals[row]), different), totals[row])
            packed = []  # of each query: partial sums of the four rows, 16 bits each
            for totals in sums:
                parts = [builder.load(total) for total in totals]
                parts = parts if by_word else [_sum_bytes(builder, part) for part in parts]
                for row in range(1, 4):
                    shift = ir.Constant(parts[0].type, [16 * row] * parts[0].type.count)
                    parts[0] = builder.or_(parts[0], builder.shl(parts[row], shift))
                packed.append(parts[0])
            total, n = _across(builder, packed), n_queries
            found = [builder.extract_element(total, ir.IntType(32)(lane)) for lane in range(n)]
            return context.make_tuple(builder, signature.return_type, found)

        places = types.UniTuple(types.intp, n_queries)
        result = types.UniTuple(types.uint64, n_queries)
        return result(codes, types.intp, types.intp, queries, places, types.intp), codegen

    return distances


def _across(builder: Any, vectors: list[Any]) -> Any:
    """A vector whose lane i is the sum of vector i's lanes; there are 1, 2, 4 or as many as lanes."""

    def picked(a: Any, b: Any, numbers: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers))

    width, run = vectors[0].type.count, 1  # each vector holds runs of sums, one per vector it was made of
    while len(vectors) > 1:
        low = [i for i in range(width) if i // run % 2 == 0]
        halves = [[low[i : i + run] for i in range(0, len(low), run)], []]
        halves[1] = [[i + run for i in part] for part in halves[0]]
        masks = [[lane for part in half for lane in (*part, *(i + width for i in part))] for half in halves]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.add(picked(a, b, masks[0]), picked(a, b, masks[1])) for a, b in pairs]
        run *= 2
    (total,) = vectors
    while width > run:
        width //= 2
        first, second = list(range(width)), list(range(width, 2 * width))
        total = builder.add(picked(total, total, first), picked(total, total, second))
    return total


four_distances, four_in_turn, sixteen_distances = _distances(1), _distances(1, in_turn=True), _distances(4)


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
    words = builder.bitcast(total, ir.VectorType(long, 4))
    for bits, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        masks = ir.Constant(words.type, [mask] * 4)
        above = builder.lshr(words, ir.Constant(words.type, [bits] * 4))
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
