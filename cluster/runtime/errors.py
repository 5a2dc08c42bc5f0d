"""The error of ours inside what Ray made of it: Ray wraps what a worker raised, sometimes in a ring."""

from __future__ import annotations

from typing import NoReturn

from hashnet.errors import HashnetError

RETRY_HINT = "\nFailed to apply UDF transform"  # Ray Data appends how to configure its retries
LESS_MEMORY = (
    "Ray ended a worker because its node ran low on memory (the lines above say what used how much); run the "
    "same command again with less at a time (train: a smaller batch_size; encode_db: a smaller chunk_rows; "
    "compare: a larger cpus_per_cell, so that fewer run at once), or on nodes with more memory"
)


def ours(error: BaseException) -> HashnetError | None:
    """The HashnetError that ``error`` is or was caused by, as it was raised; None when there is none."""
    met, waiting = [], [error]
    while waiting:
        seen = waiting.pop()
        wrapped = getattr(seen, "cause", None)
        if isinstance(seen, HashnetError) and not isinstance(wrapped, BaseException):
            return seen
        met.append(seen)
        of_workers = getattr(seen, "worker_failures", {}).values()  # Ray Train's, each in a shell of its own
        inner = (seen.__cause__, wrapped, getattr(seen, "_base_exc", None), *of_workers)
        waiting += [cause for cause in inner if isinstance(cause, BaseException) and cause not in met]
    return None


def raise_ours(error: BaseException) -> NoReturn:
    """Raises the HashnetError inside ``error``, or the error itself."""
    found = ours(error)
    if found is None or found is error:  # never from itself: whoever followed its causes would find no end
        raise error
    if found.args and isinstance(found.args[0], str):
        found.args = (found.args[0].partition(RETRY_HINT)[0], *found.args[1:])
    raise found from error
