"""One search of an index at one version: candidates by distance or score, rescored by vectors on request;
and the checks of its arguments and of updates: wrong ones raise an error and never crash FAISS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet import io
from hashnet import labels as label_sets
from hashnet.codes import check_codes, pack_signs
from hashnet.errors import CodeError, IndexMismatch, Unsupported
from hashnet.index.filters import Where, parse_where
from hashnet.index.kinds import KINDS
from hashnet.index.rows import check_names
from hashnet.index.snapshot import Snapshot
from hashnet.io import as_array, check_whole
from hashnet.kernels import DTYPES, merge_scores
from hashnet.results import SearchResult
from hashnet.store import METRICS, check_vectors

MAX_SLOTS = 1 << 28  # of one answer, q x k: 3 GB
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


# ---------------------------------------------------------------- arguments


def check_search_size(k: Any, n_queries: int) -> int:
    """``k`` as an int >= 1 whose answer fits into memory."""
    k = check_whole("k", k, 1, IndexMismatch)
    if max(n_queries, 1) * k > MAX_SLOTS:
        raise Unsupported(
            f"{n_queries} queries x k = {k} is too large for one response; "
            "search with fewer queries or a smaller k"
        )
    return k


def check_ids(ids: Any, n: int | None = None, *, lowest: int = 0, distinct: bool = False) -> np.ndarray:
    """int64 (n,) of whole numbers >= ``lowest``; with ``distinct`` each of them once."""
    array = io.check_ids(ids, "ids", IndexMismatch, n=n, lowest=lowest)
    if distinct:
        values, counts = np.unique(array, return_counts=True)
        if len(values) != len(array):
            first = values[counts > 1][0]
            raise IndexMismatch(f"id {first} is given {counts.max()} times in one call; give each id once")
    return array


def check_labels(labels: Any, n: int, n_classes: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """(label, row) pairs and the number of classes, of class ids (n,) or multi-hot (n, n_classes).

    Class ids are not blown up to multi-hot rows: 1,281,167 of 1,000 classes would take 1.3 GB.
    """
    array = as_array(labels, "labels")
    if n_classes is not None:
        n_classes = check_whole("n_classes", n_classes, 1, IndexMismatch)
    if array.ndim and len(array) != n:
        raise CodeError(f"{n} codes came with {len(array)} labels; give one label set per code")
    if array.ndim == 1 and len(array):
        if array.dtype.kind not in "iu" or array.min() < 0:
            label_sets.as_multi_hot(array)  # raises: the row it names is one of all rows
        return array, np.arange(n), label_sets.as_multi_hot(array[[array.argmax()]], n_classes).shape[1]
    multi_hot = label_sets.as_multi_hot(array, n_classes)
    rows, classes = np.nonzero(multi_hot)
    return classes, rows, multi_hot.shape[1]


def check_width(codes: Any, n_bits: int, what: str = "the query has") -> np.ndarray:
    """``codes`` as C-contiguous uint8 (n, n_bits // 8)."""
    codes = check_codes(as_array(codes, "codes"))
    if codes.shape[1] * 8 != n_bits:
        raise IndexMismatch(
            f"the index has {n_bits} bits, {what} {codes.shape[1] * 8}; "
            "encode with the model the index was made with"
        )
    return codes


def check_queries(codes: Any, state: Snapshot) -> np.ndarray:
    """Queries that this state of an index can answer."""
    queries = check_width(codes, state.n_bits)
    refuse_empty(state)
    return queries


def check_logits(logits: Any, state: Snapshot) -> np.ndarray:
    """``logits`` as C-contiguous float32 (q, n_bits); one row may come as 1-D."""
    array = np.atleast_2d(as_array(logits, "logits"))
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise IndexMismatch(
            f"logits must be numbers of shape (q, {state.n_bits}), got {array.dtype} of shape {array.shape}"
        )
    if array.shape[1] != state.n_bits:
        raise IndexMismatch(
            f"the index has {state.n_bits} bits, the logits have {array.shape[1]} columns; give one logit "
            "per bit, of the model the index was made with (Encoder.logits)"
        )
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array).all(axis=1)).argmax())
        raise IndexMismatch(f"row {row} of the logits holds NaN or infinity; look at the model or its input")
    refuse_empty(state)
    return array


def check_oversample(oversample: Any, k: int, n_queries: int) -> int:
    """How many candidates are re-ranked for k results: k x ``oversample``, which is >= 1."""
    is_number = isinstance(oversample, (int, float, np.number)) and not isinstance(oversample, bool)
    if not is_number or not 1 <= oversample < np.inf:
        raise IndexMismatch(f"oversample must be a number >= 1, got {oversample!r}")
    return check_search_size(math.ceil(k * oversample), n_queries)


def check_rescoring(
    rescore: Any, features: Any, metric: str, n_queries: int | None, state: Snapshot
) -> np.ndarray | None:
    """The queries' vectors float32 (q, width) to rescore by; None where nothing is rescored."""
    if rescore is None:
        if features is not None:
            raise IndexMismatch('features= are for rescore="features"; give both, or neither')
        return None
    if rescore != "features":
        raise IndexMismatch(f'rescore must be "features" or None, got {rescore!r}')
    if metric not in METRICS:
        raise IndexMismatch(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    check_has_features(state)
    assert state.features is not None
    if features is None:
        raise IndexMismatch(
            'rescore="features" needs the queries\' own vectors: give features= (Encoder.features)'
        )
    return check_vectors(features, state.features.width, "features", n_queries)


def check_dtype(dtype: Any) -> str:
    """How vectors are kept: float16, float32 or int8."""
    if dtype not in DTYPES:
        raise IndexMismatch(f"features_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def check_has_features(state: Snapshot) -> None:
    """Unsupported unless the index has vectors."""
    if state.features is None:
        raise Unsupported(
            "this index has no vectors to rescore by; encode with output=codes,features and build it again, "
            "or give features= when it is made"
        )


def check_new_features(features: Any, n: int, state: Snapshot) -> np.ndarray | None:
    """The vectors of ``n`` items to be added: of every item, where the index has vectors; else None."""
    if state.features is None:
        if features is not None:
            raise Unsupported("this index was built without features; add the codes without them")
        return None
    if features is None:
        raise IndexMismatch(
            f"every item of this index has a vector of {state.features.width} values, for rescoring: "
            "give features= with the new codes"
        )
    return check_vectors(features, state.features.width, "features", n)


def refuse_empty(state: Snapshot) -> None:
    if not state.n_live:
        raise IndexMismatch("the index is empty: every item was removed; add codes before searching")


def check_excluded(ids: Any, queries: np.ndarray, state: Snapshot) -> np.ndarray | None:
    """The queries' own ids, int64 (q,), all of them known or -1; None where nothing is excluded."""
    if ids is None or ids is False:
        return None
    if ids is True:
        raise IndexMismatch(
            "exclude_self needs to know which items the queries are: pass their ids, exclude_self=ids"
        )
    ids = check_ids(ids, len(queries), lowest=-1)
    state.refuse_unknown(ids[ids >= 0])
    return ids
