"""Scores of stored vectors against float queries, and the check of every row that is read for them.

A row is the bytes of a vector: float16, float32, or int8 that a scale per row multiplies. Nothing is read but
the rows that are scored.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hashnet.kernels.jit import compiled, load64, read_vector

DTYPES = ("float16", "float32", "int8")
F16, F32 = 0, 1  # places in DTYPES
_HALF, _FLOAT, _BYTE = ir.HalfType(), ir.FloatType(), ir.IntType(8)


def _reader(stored: Any) -> Any:
    """A step of kernels: the value of the LLVM type ``stored`` at ``values[start]`` as float32."""

    @intrinsic
    def read(typingctx, values, start):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            found = read_vector(context, builder, signature.args[0], args[0], args[1], stored)
            if stored is _HALF:
                return builder.fpext(found, _FLOAT)
            return builder.sitofp(found, _FLOAT) if stored is _BYTE else found

        return types.float32(values, types.intp), codegen

    return read


half_at, float_at, byte_at = _reader(_HALF), _reader(_FLOAT), _reader(_BYTE)


@compiled
def damaged_row(memory, starts, n_words, weights, ids, scale_bits, checks):  # type: ignore[no-untyped-def]
    """The number of the first row that does not fit its check; -1 where all do.

    Row i is the ``n_words`` x 8 bytes of ``memory`` uint8 from ``starts[i]`` on; ``weights`` uint64
    (n_words + 2,) are those of the words, the id and the scale; ids int64, scale_bits uint32, checks uint64,
    (m,) each.
    """
    for i in range(len(starts)):
        total = np.uint64(ids[i]) * weights[-2] + np.uint64(scale_bits[i]) * weights[-1]
        for j in range(n_words):
            total += load64(memory, starts[i] + 8 * j) * weights[j]
        if total != checks[i]:
            return i
    return -1


@functools.partial(compiled, fastmath=True)  # sums may be taken in any order: that of the vector registers
def score_rows(memory, starts, dtype, scales, queries, of_query, cosine, scores):  # type: ignore[no-untyped-def]
    """Fills ``scores`` float32 (m,): of row i and query ``of_query[i]`` of ``queries`` float32 (q, d).

    Row i is d numbers of DTYPES[dtype] in ``memory`` uint8 from ``starts[i]`` on, times ``scales[i]``. With
    ``cosine`` a score is divided by the norm of the row, and 0 where that is 0; queries are of norm 1 then.
    """
    d = queries.shape[1]
    for i in range(len(starts)):
        start, query = starts[i], queries[of_query[i]]
        dot, norm = np.float32(0), np.float32(0)
        if dtype == F16:
            for j in range(d):
                value = half_at(memory, start + 2 * j)
                dot += value * query[j]
                norm += value * value
        elif dtype == F32:
            for j in range(d):
                value = float_at(memory, start + 4 * j)
                dot += value * query[j]
                norm += value * value
        else:
            for j in range(d):
                value = byte_at(memory, start + j)
                dot += value * query[j]
                norm += value * value
        if cosine:
            scores[i] = dot / np.sqrt(norm) if norm > 0 else np.float32(0)
        else:
            scores[i] = dot * scales[i]
