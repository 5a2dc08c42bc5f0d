"""The nprobe nearest lists of an IVF index, scanned for the k nearest codes: the compiled loop.

Lists hold ids in no common order, so an equal distance met later may have the smaller id: all
candidates at the k-th distance are kept, and cut down to the smallest ids when room runs out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hashnet.kernels.hamming import block_distances, block_rows, fill_words, transposed_words
from hashnet.kernels.jit import LANES, compiled, lanes_below, load64, lowest_bit

ANY_ID = np.iinfo(np.int64).max


class InvertedLists(NamedTuple):
    """Codes and ids of each list, as bytes of one array.

    List l has ``sizes[l]`` codes from byte ``code_at[l]`` on and its int64 ids from byte ``id_at[l]`` on.
    ``memory`` uint8 spans all lists, wherever they lie; only the lists themselves may be touched.
    """

    memory: np.ndarray
    code_at: np.ndarray  # int64 (nlist,)
    id_at: np.ndarray
    sizes: np.ndarray
    row_bytes: int


@compiled
def scan_lists(lists, probes, queries, listed, allowed, out, ids, distances):  # type: ignore[no-untyped-def]
    """Fills ``ids`` int64 and ``distances`` int32 (q, k) from the lists in ``probes`` int64 (q, nprobe).

    ``listed`` are ascending ids: the only ones that may be found where ``allowed``, else those that may not.
    ``out`` is a ``block_scratch``. Returns how many hits each query has, int64 (q,).
    """
    restricted = allowed or len(listed) > 0
    memory, code_at, id_at, sizes, row_bytes = lists
    n_bits, k = row_bytes * 8, ids.shape[1]
    room = 2 * k + max(k, 4 * LANES)
    found = np.empty(room, np.int64)
    far = np.empty(room, out.dtype)
    counts = np.empty(n_bits + 2, np.int64)
    words, block = transposed_words(row_bytes, 1), block_rows(row_bytes)
    hits = np.zeros(len(queries), np.int64)
    for q in range(len(queries)):
        counts[:] = 0
        # candidates kept, those of them within the bound, the k-th distance so far, and the largest id that
        # still matters at that distance
        used, within, bound, last_id = 0, 0, n_bits, ANY_ID
        for p in range(probes.shape[1]):
            inverted = probes[q, p]
            if inverted < 0:
                continue
            end = code_at[inverted] + sizes[inverted] * row_bytes
            for start in range(0, sizes[inverted], block):
                count = min(block, sizes[inverted] - start)
                at = code_at[inverted] + start * row_bytes
                if words.size:
                    fill_words(memory, at, end, row_bytes, count, words)
                block_distances(memory, at, row_bytes, count, words, queries[q], out)
                out[count : count + LANES] = n_bits + 1
                for lane in range(0, count, LANES):
                    mask = lanes_below(out, lane, out.dtype.type(bound + 1))
                    while mask != 0:
                        i = lane + lowest_bit(mask)
                        mask &= mask - np.uint64(1)
                        distance = np.int64(out[i])
                        number = np.int64(load64(memory, id_at[inverted] + 8 * (start + i)))
                        # the bound may have moved since the 64 were compared
                        if distance > bound or (distance == bound and number > last_id):
                            continue
                        if restricted and _holds(listed, number) != allowed:
                            continue
                        found[used] = number
                        far[used] = out[i]
                        used += 1
                        counts[distance] += 1
                        within += 1
                        while within - counts[bound] >= k:  # k candidates lie closer: tighten
                            within -= counts[bound]
                            bound -= 1
                            last_id = ANY_ID
                        if used == room:
                            used, last_id = _keep_best(found, far, used, counts, bound, within, k)
                            within = used
        used, last_id = _keep_best(found, far, used, counts, bound, within, k)
        hits[q] = used
        order_hits(found, far, used)
        ids[q, :used] = found[:used]
        distances[q, :used] = far[:used]
    return hits


@compiled
def order_hits(found, far, used):  # type: ignore[no-untyped-def]
    """Orders the first ``used`` candidates by (distance, id), in place: a heap sort.

    numba's own argsort and sort may not both be in kernels that are kept on disk: what was compiled in one
    process is linked by name with what another compiled, and their inner functions share names.
    """
    for root in range(used // 2 - 1, -1, -1):
        _sink(found, far, root, used)
    for last in range(used - 1, 0, -1):
        found[0], found[last] = found[last], found[0]
        far[0], far[last] = far[last], far[0]
        _sink(found, far, 0, last)


@compiled
def _sink(found, far, root, size):  # type: ignore[no-untyped-def]
    """Restores a heap whose root is the last by (distance, id)."""
    while True:
        last = root
        for child in range(2 * root + 1, min(2 * root + 3, size)):
            if far[child] > far[last] or (far[child] == far[last] and found[child] > found[last]):
                last = child
        if last == root:
            return
        found[root], found[last] = found[last], found[root]
        far[root], far[last] = far[last], far[root]
        root = last


@compiled
def _keep_best(found, far, used, counts, bound, within, k):  # type: ignore[no-untyped-def]
    """(candidates left, largest id left at the bound): at most k, those nearest with the smallest ids."""
    ties = np.empty(counts[bound], np.int64)
    n_ties = 0
    for c in range(used):
        if far[c] == bound:
            ties[n_ties] = found[c]
            n_ties += 1
    wanted = min(k - (within - counts[bound]), n_ties)
    last_id = ANY_ID
    if wanted < n_ties:
        ties = np.sort(ties)
        last_id = ties[wanted - 1]
        counts[bound] = wanted
    kept = 0
    for c in range(used):
        if far[c] < bound or (far[c] == bound and found[c] <= last_id):
            found[kept] = found[c]
            far[kept] = far[c]
            kept += 1
    return kept, last_id


@compiled
def _holds(ascending, number):  # type: ignore[no-untyped-def]
    """Whether the array holds the number, by bisection."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low < len(ascending) and ascending[low] == number
