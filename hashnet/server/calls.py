"""One search on its way to the index and back, between processes; and what a client is told of a mistake.

What a client did wrong is part of an answer, not an exception, so that one bad request does not spoil
the others that are answered with it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from hashnet.errors import HashnetError, IndexMismatch, RequestRejected, UnknownId, Unsupported
from hashnet.results import SearchResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexAsk:
    """One search as the index sees it: codes uint8 (q, bytes), or ids int64 (q,) of indexed items."""

    codes: np.ndarray | None = None
    ids: np.ndarray | None = None
    k: int | None = None
    radius: int | None = None
    labels: tuple[int, ...] | None = None
    exclude_self: bool = False
    min_version: int = 0
    want_codes: bool = False  # the queries' codes in the answer, too
    want_hit_codes: bool = False  # and those of the hits
    max_hits: int = 4_000_000
    deadline: float = field(default_factory=lambda: time.time() + 3600)

    def __len__(self) -> int:
        return len(self.codes if self.ids is None else self.ids)  # type: ignore[arg-type] # one is there

    @property
    def group(self) -> tuple:
        """Asks that are equal in this are searched together."""
        return self.k, self.radius, self.labels, self.exclude_self


@dataclass(frozen=True)
class IndexAnswer:
    """``hits`` is one (q, k) SearchResult, or a list of 1-D ones; ``error`` is (code, message, status)."""

    version: int
    hits: SearchResult | list[SearchResult] | None = None
    codes: np.ndarray | None = None
    hit_codes: np.ndarray | None = None  # of all used hits, query after query
    error: tuple[str, str, int] | None = None

    def checked(self) -> IndexAnswer:
        """Itself, or the client's mistake raised."""
        if self.error is not None:
            code, message, status = self.error
            raise RequestRejected(message, code=code, status=status)
        return self


def blame(error: HashnetError) -> tuple[str, str, int]:
    """(code, message, status) that a client is told."""
    message = str(error.args[0]) if error.args else str(error)
    if isinstance(error, RequestRejected):
        return error.code, message, error.status
    if isinstance(error, UnknownId):
        return "unknown_id", message, 404
    if isinstance(error, Unsupported):
        return "unsupported", message, 422
    if isinstance(error, (IndexMismatch, ValueError)):
        return "invalid_request", message, 422
    log.error("a request failed", exc_info=error)
    return "internal", "the server failed; its log has the details", 500
