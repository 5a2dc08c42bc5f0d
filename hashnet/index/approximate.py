"""What the approximate kinds scan, put into order: IVF lists, the HNSW walk, hash buckets.

FAISS returns ties of these kinds in no particular order and cuts them anywhere. Our kernel keeps
them while it scans lists; FAISS is asked for more than k until the k-th distance is smaller than
the last one returned, when every candidate at the k-th distance is there. Too few hits (removed
rows, short lists) widen the search; they never come back as fewer while the index holds more.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import faiss
import numpy as np

from hashnet.codes import as_words
from hashnet.index.faiss_flat import split_hits
from hashnet.kernels import block_scratch, default_threads, pad_columns, run_all, scan_lists, top_k

if TYPE_CHECKING:
    from hashnet.index.segment import Segment

QUERIES_A_THREAD = 16  # fewer are answered before another thread has woken up
SLACK = 16  # asked for beyond k: resolves most ties in one go
MAX_FETCHED = 1 << 22  # slots asked of FAISS at once, queries x fetch: 48 MB, and a few times that to sort
ID_BITS = 47  # ids below 2**47 sort as one integer together with their distance


def ivf_top_k(
    segment: Segment, queries: np.ndarray, k: int, exclude: np.ndarray | None, engine: str
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, distances) (q, k) among the lists scanned: nprobe of them, more where k hits need more."""
    ids = np.full((len(queries), k), -1, dtype=np.int64)
    distances = np.full((len(queries), k), -1, dtype=np.int32)
    wanted = _wanted(segment, len(queries), k, exclude)
    nlist, nprobe = segment.options.nlist, segment.options.nprobe  # type: ignore[union-attr]
    scan = scan_by_faiss if engine == "faiss" else scan_by_kernel
    rows = np.flatnonzero(wanted)
    while len(rows):
        excluded = None if exclude is None else exclude[rows]
        near, far, count = scan(segment, queries[rows], k, excluded, nprobe)
        ids[rows], distances[rows] = near, far
        rows = rows[count < wanted[rows]] if nprobe < nlist else rows[:0]
        nprobe = min(nlist, nprobe * 4)
    return ids, distances


def scan_by_kernel(
    segment: Segment, queries: np.ndarray, k: int, exclude: np.ndarray | None, nprobe: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, distances, hits a query) of the ``nprobe`` nearest lists, by our kernel."""
    rows, n_queries = segment.rows, len(queries)
    probes, _ = top_k(rows.centroids, queries, nprobe)
    words = np.array(as_words(queries))
    dead = rows.ids[segment.dead] if len(segment.dead) else segment.dead
    excluded = np.full(n_queries, -1, dtype=np.int64) if exclude is None else exclude
    width = min(k, len(rows))
    ids = np.full((n_queries, width), -1, dtype=np.int64)
    distances = np.full((n_queries, width), -1, dtype=np.int32)

    def scan(part: slice) -> np.ndarray:
        return scan_lists(
            rows.inverted,
            probes[part],
            words[part],
            dead,
            excluded[part],
            block_scratch(rows.n_bits),
            ids[part],
            distances[part],
        )

    threads = min(default_threads(), max(1, n_queries // QUERIES_A_THREAD))
    cuts = np.linspace(0, n_queries, threads + 1).astype(int)
    counts = run_all([partial(scan, slice(a, b)) for a, b in pairwise(cuts)])
    return pad_columns(ids, k), pad_columns(distances, k), np.concatenate(counts)


def scan_by_faiss(
    segment: Segment, queries: np.ndarray, k: int, exclude: np.ndarray | None, nprobe: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same by FAISS, which is asked for ever more until no tie is cut."""
    n, n_queries = len(segment.rows), len(queries)
    ids = np.full((n_queries, k), -1, dtype=np.int64)
    distances = np.full((n_queries, k), -1, dtype=np.int32)
    counts = np.zeros(n_queries, dtype=np.int64)
    parameters = faiss.SearchParametersIVF(nprobe=nprobe)
    rows, fetch = np.arange(n_queries), min(n, k + SLACK)
    while len(rows):
        cut = []  # queries whose ties were
        step = max(1, MAX_FETCHED // fetch)
        for some in (rows[i : i + step] for i in range(0, len(rows), step)):
            far, near = segment.rows.inner.search(queries[some], fetch, params=parameters)
            last, whole = far[:, -1].copy(), near[:, -1] < 0  # an unused slot: all that was scanned is here
            near, far, count = tidy(segment, near, far, None if exclude is None else exclude[some])
            near, far = pad_columns(near, k), pad_columns(far, k)
            resolved = whole | (fetch >= n) | ((count >= k) & (last > far[:, -1]))
            done = some[resolved]
            ids[done], distances[done], counts[done] = near[resolved], far[resolved], count[resolved]
            cut.append(some[~resolved])
        rows, fetch = np.concatenate(cut), min(n, fetch * 4)
    return ids, distances, np.minimum(counts, k)


def hnsw_top_k(
    segment: Segment, queries: np.ndarray, k: int, exclude: np.ndarray | None, engine: str
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, distances) (q, k) among the ef_search candidates of the walk; exact where it finds too few."""
    n = len(segment.rows)
    breadth = min(n, max(segment.options.ef_search, k + SLACK))  # type: ignore[union-attr]
    if not len(queries) or not n:
        nothing = np.full((len(queries), k), -1, dtype=np.int64)
        return nothing, nothing.astype(np.int32)
    parameters = faiss.SearchParametersHNSW(efSearch=breadth)
    far, near = segment.rows.inner.search(queries, breadth, params=parameters)
    near, far, count = tidy(segment, segment.rows.ids_at(near), far, exclude)
    near, far = pad_columns(near, k), pad_columns(far, k)
    short = np.flatnonzero(count < _wanted(segment, len(queries), k, exclude))
    if len(short):
        excluded = None if exclude is None else exclude[short]
        positions, exact_far = segment.exact_top_k(queries[short], k, None, excluded, engine)
        near[short], far[short] = segment.rows.ids_at(positions), exact_far
    return near, far


def range_hits(
    segment: Segment, queries: np.ndarray, radius: int, exclude: np.ndarray | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each query (ids, distances) within the radius: of the hash buckets or of the lists scanned."""
    if not len(queries):
        return []
    rows = segment.rows
    radius = min(radius, rows.n_bits)
    scanned = segment.probing if rows.kind == "ivf" else rows.inner
    limits, distances, found = scanned.range_search(queries, radius + 1)
    ids = found if rows.kind == "ivf" else rows.ids_at(found)
    hits = split_hits(limits, ids, distances, exclude)
    if not len(segment.dead):
        return hits
    dead = rows.ids[segment.dead]
    live = [~np.isin(near, dead, assume_unique=True) for near, _ in hits]
    return [(near[kept], far[kept]) for (near, far), kept in zip(hits, live, strict=True)]


def _wanted(segment: Segment, n_queries: int, k: int, exclude: np.ndarray | None) -> np.ndarray:
    """How many hits each query can have at most, int64 (q,)."""
    available = np.full(n_queries, segment.n_live, dtype=np.int64)
    if exclude is not None:
        available -= segment.find(exclude) >= 0
    return np.minimum(available, k)


def tidy(
    segment: Segment, ids: np.ndarray, distances: np.ndarray, exclude: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, distances, hits a query) ordered by (distance, id), without removed and excluded ones."""
    unwanted = ids < 0
    if len(segment.dead):
        unwanted |= np.isin(ids, segment.rows.ids[segment.dead])
    if exclude is not None:
        unwanted |= ids == exclude[:, None]
    distances = distances.astype(np.int64)
    distances[unwanted] = 1 << 14  # beyond every distance: sorts to the end
    if ids.max(initial=0) < 1 << ID_BITS:
        keys = (distances << ID_BITS) | np.where(unwanted, 0, ids)
        keys.sort(axis=1)
        ids, distances = keys & ((1 << ID_BITS) - 1), keys >> ID_BITS
    else:
        order = np.lexsort((ids, distances), axis=1)
        ids, distances = np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)
    beyond = distances >= 1 << 14
    ids[beyond], distances[beyond] = -1, -1
    return ids, distances.astype(np.int32), (~beyond).sum(axis=1)
