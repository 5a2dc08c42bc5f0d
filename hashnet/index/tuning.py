"""tune: the smallest nprobe of an IVF index that reaches a requested recall.

Recall here is distance recall: the share of the k results of a query that lie no farther than its
true k-th neighbour. Hamming ties make comparing ids meaningless; distances say what was missed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hashnet.errors import IndexMismatch, Unsupported
from hashnet.index.kinds.ivf import IvfOptions
from hashnet.index.segment import Segment
from hashnet.index.snapshot import Snapshot

SAMPLE = 256  # queries drawn where none are given: recall to within about 0.01
FLIPPED = 0.05  # share of bits flipped in drawn codes, since an indexed code finds itself too easily


def tuned_snapshot(state: Snapshot, queries: np.ndarray | None, recall: float, k: int) -> Snapshot:
    """The next state, with nprobe and how it was found in ``tuned``."""
    if isinstance(recall, bool) or not isinstance(recall, (int, float, np.number)) or not 0 < recall <= 1:
        raise IndexMismatch(f"recall must lie above 0 and at most at 1, got {recall!r}")
    if state.kind != "ivf":
        raise Unsupported(f"only an ivf index has something to tune, this one is {state.kind}")
    segment = state.segments[0]
    if not isinstance(segment.options, IvfOptions):
        raise Unsupported("every row of its lists was removed; compact() makes new lists, then tune")
    if queries is None:
        queries = sample_queries(segment, SAMPLE, seed=0)
    if not len(queries):
        raise IndexMismatch("tune needs at least one query, got 0")
    nlist = segment.options.nlist
    truth = _kth_distance(segment, queries, k, nlist)
    reached: dict[int, float] = {}

    def good(nprobe: int) -> bool:
        reached[nprobe] = distance_recall(_with_nprobe(segment, nprobe), queries, k, truth)
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
    tuned: dict[str, Any] = {
        "nprobe": high,
        "recall": round(reached[high], 6),
        "wished": float(recall),  # a numpy number is not JSON; the key keeps its name in old files
        "k": k,
        "queries": len(queries),
    }
    chosen = _with_nprobe(segment, high)
    segments = (chosen, *state.segments[1:])
    return dataclasses.replace(
        state,
        version=state.version + 1,
        options=chosen.options,
        segments=segments,
        tuned=tuned,
        changes=None,
    )


def sample_queries(segment: Segment, n: int, seed: int) -> np.ndarray:
    """Indexed codes with a few bits flipped, uint8 (n, n_bits // 8)."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(segment.live_positions, min(n, segment.n_live), replace=False))
    codes = segment.rows.take(positions)
    return codes ^ np.packbits(rng.random((len(codes), segment.rows.n_bits)) < FLIPPED, axis=1)


def distance_recall(segment: Segment, queries: np.ndarray, k: int, truth: np.ndarray) -> float:
    """Share of the true k neighbours' places filled by results at most ``truth`` (q,) away."""
    _, distances = segment.search(queries, k, None, "kernel")
    found = (distances >= 0) & (distances <= truth[:, None])
    return float(found.sum() / (len(queries) * min(k, segment.n_live)))


def _kth_distance(segment: Segment, queries: np.ndarray, k: int, nlist: int) -> np.ndarray:
    """The true distance of the k-th neighbour, by scanning every list."""
    _, distances = _with_nprobe(segment, nlist).search(queries, k, None, "kernel")
    return distances.max(axis=1)


def _with_nprobe(segment: Segment, nprobe: int) -> Segment:
    assert isinstance(segment.options, IvfOptions)
    return dataclasses.replace(segment, options=dataclasses.replace(segment.options, nprobe=nprobe))
