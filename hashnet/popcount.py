"""The processor's own population count for numba kernels, and how those kernels use threads.

LLVM turns ``popcount`` inside a loop into VPOPCNTDQ, AVX2 or POPCNT, whatever the machine has.
numba's fallback threading layer aborts the process when two Python threads run parallel kernels
at once, as a served index does, so ``omp`` (or ``tbb``, where installed) is asked for.
"""

from __future__ import annotations

import numba
from numba import types
from numba.extending import intrinsic

numba.config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]
numba.config.THREADING_LAYER = "threadsafe"


@intrinsic
def popcount(typingctx, word):  # type: ignore[no-untyped-def]
    """Number of one bits of a uint64, as uint64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen
