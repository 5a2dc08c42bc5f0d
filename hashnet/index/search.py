"""One search of an index at one version: candidates by distance or score, rescored by vectors if asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.codes import pack_signs
from hashnet.errors import IndexMismatch
from hashnet.index.filters import Where, parse_where
from hashnet.index.kinds import KINDS
from hashnet.index.rows import check_names
from hashnet.index.snapshot import Snapshot
from hashnet.index.validation import (
    check_excluded,
    check_logits,
    check_oversample,
    check_queries,
    check_rescoring,
    check_search_size,
)
from hashnet.kernels import merge_scores
from hashnet.results import SearchResult

SCANNED_ROWS = 1 << 17  # of an approximate kind: scoring all of them takes about as long as a search
OVERSAMPLE = 10  # candidates per result, where an approximate kind is searched with logits
RESCORED = 4  # candidates per result that are rescored, unless ``tune`` found another number

Nearest = Callable[[Snapshot, np.ndarray, int, Where | None], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Request:
    """The arguments of ``BinaryIndex.search``, as they came."""

    codes: Any
    k: Any
    logits: Any = None
    where: Any = None
    exclude_self: Any = None
    oversample: Any = None
    rescore: Any = None
    features: Any = None
    metric: str = "cosine"
    columns: Sequence[str] | None = None


def search(state: Snapshot, request: Request, nearest: Nearest) -> SearchResult:
    """The hits of a request; ``nearest`` gives (ids, distances) (q, k) by Hamming distance."""
    logits, oversample = request.logits, request.oversample
    if (request.codes is None) == (logits is None):
        raise IndexMismatch("search needs codes or logits, one of them")
    if logits is not None:
        logits = check_logits(logits, state)
        queries = pack_signs(logits)
    else:
        queries = check_queries(request.codes, state)
        if oversample is not None and request.rescore is None:
            raise IndexMismatch(
                "oversample= is for search(logits=…) and rescore=; codes are ranked by distance alone"
            )
    k = check_search_size(request.k, len(queries))
    vectors = check_rescoring(request.rescore, request.features, request.metric, len(queries), state)
    where = parse_where(request.where, state.n_classes, state.schema) if request.where is not None else None
    exclude = check_excluded(request.exclude_self, queries, state)
    names = check_names(request.columns or (), state.schema)
    wanted = k
    if vectors is not None:
        oversample = default_oversample(state) if oversample is None else oversample
        wanted, oversample = check_oversample(oversample, k, len(queries)), None
    fetch = wanted if exclude is None else wanted + 1  # one of them may be the query itself
    scores = None
    if logits is None:
        ids, distances = nearest(state, queries, fetch, where)
    else:
        ids, distances, scores = _by_score(state, logits, queries, fetch, where, oversample, nearest)
    if exclude is not None:
        kept = _others(exclude, ids)
        ids, distances = ids[kept].reshape(-1, wanted), distances[kept].reshape(-1, wanted)
        scores = None if scores is None else scores[kept].reshape(-1, wanted)
    if vectors is not None:
        assert state.features is not None
        scores = state.features.scores(vectors, ids, request.metric)
        ids, distances, scores = best(ids, distances, scores, k)
    table = None if request.columns is None else state.columns_of(ids.reshape(-1), names)
    return SearchResult(ids, distances, state.version, scores, table)


def default_oversample(state: Snapshot) -> float:
    """Candidates per result that are rescored unless a request says otherwise."""
    return (state.tuned or {}).get("oversample", RESCORED)


def _by_score(
    state: Snapshot,
    logits: np.ndarray,
    queries: np.ndarray,
    k: int,
    where: Where | None,
    oversample: Any,
    nearest: Nearest,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, distances, scores) (q, k) of the highest <logits, signs>: of all items, or of the nearest."""
    if oversample is None and (KINDS[state.kind].exact or state.n_live <= SCANNED_ROWS):
        parts = [segment.exact_scores(logits, k, where) for segment in state.segments]
        ids, scores = merge_scores([i for i, _ in parts], [s for _, s in parts], k)
        return ids, state.distances(queries, ids), scores
    n_candidates = check_oversample(OVERSAMPLE if oversample is None else oversample, k, len(queries))
    ids, distances = nearest(state, queries, n_candidates, where)
    return best(ids, distances, state.scores(logits, ids), k)


def best(
    ids: np.ndarray, distances: np.ndarray, scores: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The k best of candidates (q, m) by (score descending, id); unused ones have id -1 and score -inf."""
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    ids, distances, scores = (np.take_along_axis(a, order, axis=1) for a in (ids, distances, scores))
    return ids, distances, scores


def _others(exclude: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool (q, k + 1), k per row: all but the id that a query excludes or, where there is none, the last."""
    dropped = (ids == exclude[:, None]) & (exclude >= 0)[:, None]
    dropped[:, -1] |= ~dropped.any(axis=1)
    return ~dropped
