"""The processor's own population count for numba kernels, and how those kernels are compiled.

LLVM turns ``popcount`` inside a loop into VPOPCNTDQ, AVX2 or POPCNT, whatever the machine has.
numba's fallback threading layer aborts the process when two Python threads run parallel kernels
at once, as a served index does, so ``omp`` (or ``tbb``, where installed) is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types
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


def compiled(function: Callable) -> Any:
    """``function`` compiled on first use, without the GIL, and kept on disk where a place is writable.

    Threads share such kernels freely. A read-only checkout without a home folder only costs the
    compile time again in each process.
    """
    try:
        return numba.njit(function, nogil=True, cache=True)
    except RuntimeError:  # numba found no folder it may write its cache to
        return numba.njit(function, nogil=True)
