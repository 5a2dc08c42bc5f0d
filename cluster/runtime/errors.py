"""Errors that crossed Ray: finds the HashnetError that a worker raised inside what Ray wrapped around it."""

from __future__ import annotations

from typing import NoReturn

from cluster.runtime.ray_internals import inner_errors
from hashnet.errors import HashnetError

RETRY_HINT = "\nFailed to apply UDF transform"  # Ray Data appends how to configure its retries
OUT_OF_MEMORY_ADVICE = (
    "Ray ended a worker because its node ran low on memory (the lines above say what used how much); run the "
    "same command again with less at a time (train: a smaller batch_size; encode_db: a smaller chunk_rows; "
    "compare: a larger cpus_per_cell, so that fewer run at once), or on nodes with more memory"
)


def hashnet_error_in(error: BaseException) -> HashnetError | None:
    """The HashnetError that ``error`` is or was caused by, as it was raised; None when there is none."""
    seen: list[BaseException] = []  # Ray's causes may form a ring
    waiting = [error]
    while waiting:
        current = waiting.pop()
        wraps = isinstance(getattr(current, "cause", None), BaseException)
        if isinstance(current, HashnetError) and not wraps:
            return current
        seen.append(current)
        waiting += [inner for inner in inner_errors(current) if inner not in seen]
    return None


def reraise_hashnet_error(error: BaseException) -> NoReturn:
    """Raises the HashnetError inside ``error``, or the error itself where there is none."""
    found = hashnet_error_in(error)
    if found is None or found is error:  # never from itself: a loop over its causes would not end
        raise error
    if found.args and isinstance(found.args[0], str):
        found.args = (found.args[0].partition(RETRY_HINT)[0], *found.args[1:])
    raise found from error
