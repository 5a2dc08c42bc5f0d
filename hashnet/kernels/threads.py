"""How many threads a search or an evaluation uses, and the pool searches share."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
