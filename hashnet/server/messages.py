"""Records that travel between the HTTP process and those of the index, the model and the writer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hashnet.client import Queries
from hashnet.results import SearchResult


@dataclass(frozen=True)
class SearchOptions:
    """How to search: either ``k`` or ``radius``. Requests with equal options are searched together."""

    k: int | None = None
    radius: int | None = None
    labels: tuple[int, ...] | None = None  # only items with one of these class ids
    exclude_self: bool = False  # leave a queried id out of its own hits


@dataclass(frozen=True)
class SearchRequest:
    """One checked search, from the parsed request to the index."""

    queries: Queries  # codes or ids by the time it reaches the index
    options: SearchOptions
    max_hits: int
    min_version: int = 0
    with_items: bool = False  # describe the hits: the response needs their codes
    with_codes: bool = False  # the response needs the codes of the queries
    deadline: float = field(default_factory=lambda: time.time() + 3600)  # as time.time()

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class SearchResponse:
    """The hits of one request: one (q, k) SearchResult, or a list of q 1-D ones after a radius search."""

    version: int
    hits: SearchResult | list[SearchResult]
    query_codes: np.ndarray | None = None  # uint8 (q, bytes), where requested
    hit_codes: np.ndarray | None = None  # uint8, of all used hits, query after query, where requested


@dataclass(frozen=True)
class IndexInfo:
    """What an index process serves at the moment."""

    n_bits: int
    size: int
    kind: str
    engine: str
    version: int
    n_classes: int | None
    lineage: dict[str, Any]


@dataclass(frozen=True)
class IndexedItems:
    """Items looked up by id in one version of the index."""

    version: int
    held: np.ndarray  # bool (n,): whether each id is indexed
    codes: np.ndarray  # uint8 (n, bytes); 0 where it is not
    labels: list[list[int]] | None  # of those that are; None where not requested or not stored


@dataclass(frozen=True)
class AddItems:
    """Items to add: codes uint8 (n, bytes), ids int64 (n,), and class ids per item or None."""

    codes: np.ndarray
    ids: np.ndarray
    labels: list[list[int]] | None = None


@dataclass(frozen=True)
class RemoveItems:
    """Items to remove: ids int64 (n,)."""

    ids: np.ndarray


@dataclass(frozen=True)
class Written:
    """The index after a change."""

    version: int
    size: int
