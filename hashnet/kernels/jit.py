"""The processor's own population count for numba kernels, and how those kernels are compiled.

LLVM turns ``popcount`` inside a loop into VPOPCNTDQ, AVX2 or POPCNT, whatever the machine has.
numba's fallback threading layer aborts the process when two Python threads run parallel kernels
at once, as a served index does, so ``omp`` (or ``tbb``, where installed) is asked for.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types
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
def _sources() -> str:
    """A digest of the package's code: kernels call functions of other files, which numba does not look at."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class KernelCache(UserWideCacheLocator):
    """Keeps machine code in the user's cache folder by what the code says, not by where it lies.

    Every clone, and every copy that Ray unpacks for a job, then finds what another one compiled.
    """

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The folder, below numba's own, for the kernels of a file."""
        return f"hashnet-{_sources()}-{Path(py_file).parent.name}"


def compiled(function: Callable) -> Any:
    """``function`` compiled on first use, without the GIL, and kept on disk where a place is writable.

    Threads share such kernels freely. NUMBA_CACHE_DIR chooses another place; with none that is writable
    each process compiles anew.
    """
    before = numba.config.CACHE_LOCATOR_CLASSES  # type: ignore[attr-defined]
    numba.config.CACHE_LOCATOR_CLASSES = f"UserProvidedCacheLocator,{__name__}.KernelCache"  # type: ignore[attr-defined]
    try:
        return numba.njit(function, nogil=True, cache=True)
    except RuntimeError:  # numba found no folder it may write its cache to
        return numba.njit(function, nogil=True)
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = before  # type: ignore[attr-defined]
