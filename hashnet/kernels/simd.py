"""Machine-level steps numba lacks: words read at any byte, 64 comparisons at once, lowest set bit.

Codes are flat uint8 arrays: a memory-mapped FAISS file has them at odd addresses, where numba would
not take them for words.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64  # distances compared at once: one 512-bit register of bytes, two of AVX2


def _read(context: Any, builder: Any, array_type: Any, array: Any, start: Any, kind: Any) -> Any:
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
        return _read(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))

    return types.uint64(codes, types.intp), codegen


@intrinsic
def load32(typingctx, codes, start):  # type: ignore[no-untyped-def]
    """The 4 bytes ``codes[start : start + 4]`` as uint32, little-endian."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _read(context, builder, signature.args[0], args[0], args[1], ir.IntType(32))

    return types.uint32(codes, types.intp), codegen


@intrinsic
def lanes_below(typingctx, distances, start, bound):  # type: ignore[no-untyped-def]
    """A uint64 whose bit i says whether ``distances[start + i] < bound``, for i = 0..63."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), LANES)
        found = _read(context, builder, signature.args[0], args[0], args[1], vector)
        nothing = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(nothing, args[2], ir.IntType(32)(0))
        every_lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        bounds = builder.shuffle_vector(one, nothing, every_lane)
        return builder.bitcast(builder.icmp_unsigned("<", found, bounds), ir.IntType(LANES))

    return types.uint64(distances, types.intp, distances.dtype), codegen


@intrinsic
def lowest_bit(typingctx, mask):  # type: ignore[no-untyped-def]
    """Position of the lowest set bit of a uint64 that is not 0."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.intp(types.uint64), codegen
