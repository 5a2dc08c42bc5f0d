"""tune: the smallest nprobe of an IVF index and the smallest oversample of rescoring for a requested recall.

Recall of nprobe is distance recall: the share of the k results of a query that lie no farther than its
true k-th neighbour. Hamming ties make comparing ids meaningless; distances say what was missed. Recall of
rescoring is the share of the k nearest vectors, by exact search, among the k results.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hashnet.errors import IndexMismatch, Unsupported
from hashnet.index.features import IndexFeatures
from hashnet.index.kinds.ivf import IvfOptions
from hashnet.index.search import Nearest
from hashnet.index.segment import Segment
from hashnet.index.snapshot import Snapshot
from hashnet.kernels import merge_scores

SAMPLE = 256  # queries drawn where none are given: recall to within about 0.01
FLIPPED = 0.05  # share of bits flipped in drawn codes, since an indexed code finds itself too easily
FIRST_CANDIDATES = 8  # per result, looked at first; more where they do not reach the recall


def tune(
    state: Snapshot,
    queries: np.ndarray | None,
    vectors: np.ndarray | None,
    recall: float,
    k: int,
    metric: str,
    nearest: Nearest,
) -> dict[str, Any]:
    """nprobe, oversample and how they were found."""
    if isinstance(recall, bool) or not isinstance(recall, (int, float, np.number)) or not 0 < recall <= 1:
        raise IndexMismatch(f"recall must lie above 0 and at most at 1, got {recall!r}")
    if state.kind != "ivf" and state.features is None:
        raise Unsupported(f"only an ivf index, or one with features, can be tuned; this one is {state.kind}")
    if queries is not None and not len(queries):
        raise IndexMismatch("tune needs at least one query, got 0")
    tuned: dict[str, Any] = {"wished": float(recall), "k": k}  # the key keeps its name in old files
    if state.kind == "ivf":
        tuned |= _tuned_probes(state, queries, recall, k)
    if state.features is not None and (queries is None or vectors is not None):
        tuned |= _tuned_oversample(state, queries, vectors, recall, k, metric, nearest)
    return tuned


def tuned_snapshot(state: Snapshot, tuned: dict[str, Any]) -> Snapshot:
    """The next state, with what ``tune`` found."""
    state = dataclasses.replace(state, version=state.version + 1, tuned=tuned, changes=None)
    segment = state.segments[0] if state.segments else None
    if "nprobe" not in tuned or segment is None or not isinstance(segment.options, IvfOptions):
        return state
    chosen = _with_nprobe(segment, min(tuned["nprobe"], segment.options.nlist))
    return dataclasses.replace(state, options=chosen.options, segments=(chosen, *state.segments[1:]))


def _tuned_probes(state: Snapshot, queries: np.ndarray | None, recall: float, k: int) -> dict[str, Any]:
    segment = state.segments[0]
    if not isinstance(segment.options, IvfOptions):
        raise Unsupported("every row of its lists was removed; compact() makes new lists, then tune")
    if queries is None:
        queries = _sample_queries(segment)
    nlist = segment.options.nlist
    _, true_distances = _with_nprobe(segment, nlist).search(queries, k, None, "kernel")
    truth = true_distances.max(axis=1, keepdims=True)  # how far the k-th neighbour of each query is
    reached: dict[int, float] = {}

    def good(nprobe: int) -> bool:
        _, distances = _with_nprobe(segment, nprobe).search(queries, k, None, "kernel")
        found = (distances >= 0) & (distances <= truth)
        reached[nprobe] = float(found.sum() / (len(queries) * min(k, segment.n_live)))
        return reached[nprobe] >= recall

    high = 1
    while high < nlist and not good(high):
        high *= 2
    low, high = high // 2, min(high, nlist)  # low is known to be too few
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    if high not in reached:
        good(high)
    return {"nprobe": high, "recall": round(reached[high], 6), "queries": len(queries)}


def _tuned_oversample(
    state: Snapshot,
    queries: np.ndarray | None,
    vectors: np.ndarray | None,
    recall: float,
    k: int,
    metric: str,
    nearest: Nearest,
) -> dict[str, Any]:
    """The smallest oversample with which the k nearest vectors are among the candidates often enough.

    Candidates are then ordered by the vectors themselves, so a true neighbour among them is returned.
    """
    assert state.features is not None
    ids, own = state.ids(), None
    if queries is None or vectors is None:
        own = np.sort(np.random.default_rng(0).choice(ids, min(SAMPLE, len(ids)), replace=False))
        queries, vectors = state.codes_of(own), state.features.take(own)
    wanted = min(k, len(ids) - (own is not None))
    truth = exact_neighbours(state.features, ids, vectors, wanted + (own is not None), metric)
    if own is not None:
        truth = _without(truth, own)
    n_candidates = min(len(ids), k * FIRST_CANDIDATES + 1)
    while True:
        near, _ = nearest(state, queries, n_candidates, None)
        if own is not None:
            near = np.where(near == own[:, None], -2, near)  # a query is no neighbour of itself
        places = np.array(
            [[_place(row, i) for i in of_query] for row, of_query in zip(near, truth, strict=True)]
        )
        at = np.sort(places, axis=None)
        last = int(np.ceil(recall * at.size)) - 1  # so many must be among the candidates
        if at[last] < n_candidates or n_candidates == len(ids):
            break
        n_candidates = min(len(ids), n_candidates * 4)
    oversample = max(1, -(-(int(min(at[last], len(ids) - 1)) + 1) // k))
    found = float((places < oversample * k).mean()) if places.size else 1.0
    return {"oversample": oversample, "rescored_recall": round(found, 6), "queries": len(queries)}


def _place(candidates: np.ndarray, wanted: int) -> int:
    at = np.flatnonzero(candidates == wanted)
    return int(at[0]) if len(at) else np.iinfo(np.int64).max


def _without(neighbours: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Each row without the query itself, or without its last."""
    kept = neighbours != own[:, None]
    kept[kept.all(axis=1), -1] = False
    return neighbours[kept].reshape(len(neighbours), -1)


def exact_neighbours(
    features: IndexFeatures, ids: np.ndarray, queries: np.ndarray, k: int, metric: str
) -> np.ndarray:
    """int64 (q, k): the ids, among ``ids`` ascending, of the nearest vectors; all are read, in blocks."""
    best_ids = np.full((len(queries), 0), -1, dtype=np.int64)
    best_scores = np.full((len(queries), 0), -np.inf, dtype=np.float32)
    for block_ids, block in features.blocks(ids):
        if metric == "cosine":  # the queries' norms do not change their order
            norms = np.linalg.norm(block, axis=1, keepdims=True)
            block = block / np.where(norms > 0, norms, 1)
        scores = queries @ block.T  # (q, block)
        width = min(k, len(block))
        near = np.argpartition(-scores, width - 1, axis=1)[:, :width]
        found = np.take_along_axis(scores, near, axis=1)
        order = np.lexsort((block_ids[near], -found), axis=1)
        parts = [np.take_along_axis(a, order, axis=1) for a in (block_ids[near], found)]
        best_ids, best_scores = merge_scores([best_ids, parts[0]], [best_scores, parts[1]], k)
    return best_ids


def _sample_queries(segment: Segment) -> np.ndarray:
    """At most SAMPLE indexed codes with a few bits flipped, uint8 (n, n_bits // 8)."""
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(segment.live_positions, min(SAMPLE, segment.n_live), replace=False))
    codes = segment.rows.take(positions)
    return codes ^ np.packbits(rng.random((len(codes), segment.rows.n_bits)) < FLIPPED, axis=1)


def _with_nprobe(segment: Segment, nprobe: int) -> Segment:
    assert isinstance(segment.options, IvfOptions)
    return dataclasses.replace(segment, options=dataclasses.replace(segment.options, nprobe=nprobe))
