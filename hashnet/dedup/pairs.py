"""near_duplicates: all pairs of items within a Hamming radius; cross_duplicates: the same between two sets.

>>> codes = np.array([[0b0000], [0b0001], [0b1111], [0b0000]], dtype=np.uint8)
>>> pairs = near_duplicates(codes, radius=1)
>>> list(zip(pairs.a.tolist(), pairs.b.tolist(), pairs.distances.tolist()))
[(0, 1, 1), (0, 3, 0), (1, 3, 1)]

Equal codes are joined once, as a group, and written out at the end: a thousand copies of one picture cost
the join nothing. The number of pairs is estimated from a sample before any work, and counted exactly before
they are written out, so that a result which does not fit is refused and never half built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hashnet.codes import as_words, check_codes
from hashnet.dedup.join import NOTHING, Edges, estimate_pairs, join
from hashnet.errors import CodeError, DataError
from hashnet.io import as_array, binary_matrix, check_ids, check_whole
from hashnet.kernels import compiled
from hashnet.store import CodeStore

MAX_PAIRS = 100_000_000  # 20 bytes each
MAX_EDGES = 2 * MAX_PAIRS  # pairs of different codes that a join may hold
DISTANCE_BITS = 13
NO_EDGES = Edges(*NOTHING)


@dataclass(frozen=True)
class NearPairs:
    """Pairs of ids ``a`` and ``b`` int64 (m,) with their ``distances`` int32 (m,), sorted by (a, b).

    All pairs within ``complete_radius`` are there. It is the requested radius, unless ``max_pairs``
    cut the result (``truncated``): then the nearest pairs were kept, -1 where not even equal codes fit.
    """

    a: np.ndarray
    b: np.ndarray
    distances: np.ndarray
    radius: int
    complete_radius: int

    def __len__(self) -> int:
        return len(self.a)

    @property
    def truncated(self) -> bool:
        return self.complete_radius < self.radius

    def table(self) -> pa.Table:
        """Columns a, b, distance."""
        return pa.table({"a": self.a, "b": self.b, "distance": self.distances})


@dataclass(frozen=True)
class CodeSet:
    """Items in the order of their ids: ``ids`` int64 (n,) ascending, ``codes`` uint8 (n, n_bits // 8)."""

    ids: np.ndarray
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def read(cls, store: CodeStore, shards: Sequence[int] | None = None) -> CodeSet:
        """Of a store, or of some of its shards; rows are stored in the order of their ids."""
        tables = list(store.tables(["row_id", "code"], shards))
        if not tables:
            return cls(np.zeros(0, np.int64), np.zeros((0, store.n_bits // 8), np.uint8))
        table = pa.concat_tables(tables)
        return cls.of(binary_matrix(table["code"], store.n_bits // 8), table["row_id"].to_numpy())

    @classmethod
    def of(cls, source: Any, ids: Any = None, name: str = "codes") -> CodeSet:
        """Of a CodeStore, or of packed codes with ids that default to 0 … n - 1."""
        if isinstance(source, CodeStore):
            return cls.read(source)
        codes = check_codes(as_array(source, name), name=name)
        ids = np.arange(len(codes)) if ids is None else check_ids(ids, n=len(codes))
        if len(ids) and not (np.diff(ids) > 0).all():
            order = np.argsort(ids, kind="stable")
            ids, codes = ids[order], np.ascontiguousarray(codes[order])
        if len(ids) and (np.diff(ids) == 0).any():
            raise CodeError(f"ids must differ; {ids[1:][np.diff(ids) == 0][0]} comes more than once")
        return cls(ids, codes)


def near_duplicates(
    codes: Any,
    radius: int = 2,
    *,
    ids: Any = None,
    max_pairs: int | None = None,
    threads: int | None = None,
) -> NearPairs:
    """All pairs of items whose codes differ in at most ``radius`` bits, exactly; a < b.

    ``codes`` is a CodeStore, or packed codes uint8 (n, n_bits // 8) with ``ids`` int64 (n,), which default to
    0 … n - 1. More than MAX_PAIRS pairs are refused with their estimated number; with ``max_pairs`` that many
    of the nearest are kept instead, ties by (a, b), and the result says that it was cut.
    """
    items = CodeSet.of(codes, ids)
    limit = Limit.of(max_pairs, radius, items)
    joined = limit.radius_that_fits(items.codes) if limit.radius else 0  # equal codes are counted, not joined
    return CodeJoin.within(items, joined, limit.edges, threads).pairs(limit)


def cross_duplicates(
    left: Any,
    right: Any,
    radius: int = 2,
    *,
    max_pairs: int | None = None,
    threads: int | None = None,
) -> NearPairs:
    """All pairs of one item of ``left`` (``a``) and one of ``right`` (``b``) within the radius, exactly.

    Both are CodeStores or packed codes: new rows against a store, or a test set against a training set.
    """
    one, other = CodeSet.of(left, name="left codes"), CodeSet.of(right, name="right codes")
    if one.codes.shape[1] != other.codes.shape[1]:
        raise CodeError(
            f"left codes have {one.codes.shape[1] * 8} bits, right codes {other.codes.shape[1] * 8}; "
            "encode both with the same model"
        )
    limit = Limit.of(max_pairs, radius, one, other)
    both = np.concatenate([one.codes, other.codes])
    joined = limit.radius_that_fits(both, len(one)) if len(one) and len(other) else limit.radius
    return CodeJoin.between(one, other, joined, limit.edges, threads).pairs(limit)


@dataclass(frozen=True)
class CodeJoin:
    """What is within a radius of what: ``edges`` between groups of equal codes of one set, or of two.

    ``n_at`` int64 (radius + 1,) counts the pairs of items at each distance, without writing them out.
    """

    left: CodeSet
    right: CodeSet  # the same as ``left`` where a set was joined with itself
    left_groups: Groups
    right_groups: Groups
    edges: Edges
    n_at: np.ndarray

    @classmethod
    def within(
        cls, items: CodeSet, radius: int, max_edges: int = MAX_EDGES, threads: int | None = None
    ) -> CodeJoin:
        """Every item with every other one of the set."""
        groups = Groups.of(items.codes)
        edges = join(groups.distinct(items.codes), radius, 0, max_edges, threads) if radius else NO_EDGES
        n_at = _pairs_per_distance(edges, groups, groups, radius)
        n_at[0] += groups.n_equal_pairs
        return cls(items, items, groups, groups, edges, n_at)

    @classmethod
    def between(
        cls,
        left: CodeSet,
        right: CodeSet,
        radius: int,
        max_edges: int = MAX_EDGES,
        threads: int | None = None,
    ) -> CodeJoin:
        """Every item of one set with every item of the other."""
        ones, others = Groups.of(left.codes), Groups.of(right.codes)
        edges = NO_EDGES
        if len(left) and len(right):
            distinct = np.concatenate([ones.distinct(left.codes), others.distinct(right.codes)])
            found = join(distinct, radius, len(ones), max_edges, threads)
            edges = Edges(found.left, found.right - len(ones), found.distances)
        return cls(left, right, ones, others, edges, _pairs_per_distance(edges, ones, others, radius))

    @property
    def same(self) -> bool:
        return self.left is self.right

    def pairs(self, limit: Limit) -> NearPairs:
        """The pairs of items, as many as the limit allows."""
        quota = limit.quota(self.n_at)
        edges = self.edges
        if self.same:  # each group with itself, and every edge both ways
            every = np.arange(len(self.left_groups))
            edges = Edges(
                np.concatenate([every, edges.left, edges.right]),
                np.concatenate([every, edges.right, edges.left]),
                np.concatenate([np.zeros(len(every), np.int32), edges.distances, edges.distances]),
            )
        by_left = np.argsort(edges.left, kind="stable")
        start = np.zeros(len(self.left_groups) + 1, dtype=np.int64)
        np.cumsum(np.bincount(edges.left, minlength=len(self.left_groups)), out=start[1:])
        near = _Neighbours(self.left_groups.group, start, edges.right[by_left], edges.distances[by_left])
        others = self.right_groups
        a, b, distances = _write_pairs(
            near, others.start, others.members, self.same, quota.complete, quota.partial, quota.total
        )
        return NearPairs(self.left.ids[a], self.right.ids[b], distances, limit.radius, quota.complete)

    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids (a, b) of pairs that connect whatever is connected: fewer than there are items, a forest."""
        n_left = len(self.left_groups)
        offset = 0 if self.same else n_left
        first = np.concatenate(
            [self.left.ids[self.left_groups.firsts], self.right.ids[self.right_groups.firsts]]
        )
        kept = spanning_forest(self.edges.left, self.edges.right + offset, len(first))
        a, b = first[self.edges.left[kept]], first[self.edges.right[kept] + offset]
        if self.same:  # an item with equal ones: the first of them with each
            groups = self.left_groups
            other = np.ones(len(groups.members), dtype=bool)
            other[groups.start[:-1]] = False
            rest = groups.members[other]
            a = np.concatenate([a, self.left.ids[groups.firsts][groups.group[rest]]])
            b = np.concatenate([b, self.left.ids[rest]])
        return np.minimum(a, b), np.maximum(a, b)


@dataclass(frozen=True)
class Groups:
    """Rows with equal codes: those of group g are ``members[start[g]:start[g + 1]]``, ascending."""

    start: np.ndarray  # int64 (groups + 1,)
    members: np.ndarray  # int64 (n,)
    group: np.ndarray  # int64 (n,): the group of each row

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.start)

    @property
    def n_equal_pairs(self) -> int:
        return int((self.sizes * (self.sizes - 1) // 2).sum())

    @property
    def firsts(self) -> np.ndarray:
        """The first row of each group."""
        return self.members[self.start[:-1]]

    def distinct(self, codes: np.ndarray) -> np.ndarray:
        """One code per group."""
        return codes[self.firsts]

    @classmethod
    def of(cls, codes: np.ndarray) -> Groups:
        """The groups of codes uint8 (n, n_bits // 8)."""
        words = as_words(codes)
        members = np.lexsort(words.T) if len(words) else np.zeros(0, np.int64)  # stable: rows ascend
        ordered = words[members]
        new = np.ones(len(words), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        start = np.append(np.flatnonzero(new), len(words)).astype(np.int64)
        group = np.empty(len(words), dtype=np.int64)
        group[members] = np.cumsum(new) - 1
        return cls(start, members, group)


@dataclass(frozen=True)
class _Quota:
    """Which pairs are kept: all within ``complete``, and the first ``partial`` one bit further."""

    complete: int
    partial: int
    total: int


@dataclass(frozen=True)
class Limit:
    """How many pairs may come back: ``max_pairs`` of the nearest are kept; where it is None, more than
    MAX_PAIRS are refused."""

    max_pairs: int | None
    radius: int  # never more than the codes have bits
    n_items: int

    @classmethod
    def of(cls, max_pairs: int | None, radius: int, *items: CodeSet) -> Limit:
        """Of values that a caller gave."""
        max_pairs = None if max_pairs is None else check_whole("max_pairs", max_pairs, 1)
        radius = min(check_whole("radius", radius, 0), items[0].codes.shape[1] * 8)
        return cls(max_pairs, radius, sum(map(len, items)))

    @property
    def pairs(self) -> int:
        return MAX_PAIRS if self.max_pairs is None else self.max_pairs

    @property
    def cut(self) -> bool:
        return self.max_pairs is not None

    @property
    def edges(self) -> int:
        """Pairs of different codes that the join may hold: an estimate may be off by some."""
        return max(self.pairs, MAX_EDGES)

    def radius_that_fits(self, codes: np.ndarray, split: int = 0) -> int:
        """The radius to join with: smaller than asked where ``cut`` and the pairs would not fit in memory."""
        expected = estimate_pairs(codes, self.radius, split)
        if expected[-1] > self.pairs and not self.cut:
            raise self._too_many(f"about {expected[-1]:,.0f} pairs of", f"lie within radius {self.radius}")
        return max(int((expected <= max(self.pairs, MAX_PAIRS)).sum()) - 1, 0)

    def quota(self, n_at: np.ndarray) -> _Quota:
        """The quota for ``n_at`` int64 (radius + 1,) pairs at each distance."""
        within = np.cumsum(n_at)
        if within[-1] > self.pairs and not self.cut:
            raise self._too_many(f"{within[-1]:,} pairs of", f"lie within radius {self.radius}")
        complete = int((within <= self.pairs).sum()) - 1  # the last distance that fits whole
        kept = int(within[complete]) if complete >= 0 else 0
        partial = self.pairs - kept if complete + 1 < len(n_at) else 0
        return _Quota(complete, partial, kept + partial)

    def _too_many(self, many: str, what: str) -> DataError:
        return DataError(
            f"{many} {self.n_items:,} codes {what}, more than the limit of {self.pairs:,}; "
            f"use a smaller radius, or max_pairs=N to keep the N nearest pairs"
        )


def _pairs_per_distance(edges: Edges, left: Groups, right: Groups, radius: int) -> np.ndarray:
    """int64 (radius + 1,): the pairs of items at each distance, of edges between groups."""
    n_at = np.zeros(radius + 1, dtype=np.int64)
    np.add.at(n_at, edges.distances, left.sizes[edges.left] * right.sizes[edges.right])
    return n_at


class _Neighbours(NamedTuple):
    """The groups near row i: ``groups`` and ``distances`` of the range of ``start`` at ``group[i]``."""

    group: np.ndarray
    start: np.ndarray
    groups: np.ndarray
    distances: np.ndarray


@compiled
def _write_pairs(near, member_start, members, ordered, complete, partial, total):  # type: ignore[no-untyped-def]
    """(a, b, distances): row a with the members of every group near its own, sorted by (a, b)."""
    a, b = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    distances = np.empty(total, dtype=np.int32)
    count = 0
    for row in range(len(near.group)):
        if count == total:
            break
        first, last = near.start[near.group[row]], near.start[near.group[row] + 1]
        size = 0  # room for the row's pairs
        for e in range(first, last):
            size += member_start[near.groups[e] + 1] - member_start[near.groups[e]]
        if ordered and size == 1:  # itself alone, as most rows are
            continue
        found = np.empty(size, dtype=np.int64)  # partner and distance in one number, to sort by partner
        n_found = 0
        for e in range(first, last):
            if near.distances[e] > complete + 1:
                continue
            for m in range(member_start[near.groups[e]], member_start[near.groups[e] + 1]):
                if not ordered or members[m] > row:
                    found[n_found] = members[m] << DISTANCE_BITS | near.distances[e]
                    n_found += 1
        found = np.sort(found[:n_found])
        for i in range(n_found):
            distance = found[i] & ((1 << DISTANCE_BITS) - 1)
            if distance > complete:
                if partial == 0:
                    continue
                partial -= 1
            a[count], b[count], distances[count] = row, found[i] >> DISTANCE_BITS, distance
            count += 1
    return a, b, distances


def connected_components(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, clusters) int64 (m,): every id of the pairs (a, b) once, ascending, with its cluster.

    A cluster is a connected component, named by its smallest id.

    >>> ids, clusters = connected_components(np.array([1, 5, 9]), np.array([5, 7, 12]))
    >>> ids.tolist(), clusters.tolist()
    ([1, 5, 7, 9, 12], [1, 1, 1, 9, 9])
    """
    ids, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    root = _roots(places[: len(a)], places[len(a) :], len(ids))
    return ids, ids[root]


def spanning_forest(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """Positions int64 of those edges (a, b) between nodes 0 … n - 1 that join two components."""
    return _forest(a, b, n)[0]


def _roots(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    parent = _forest(a, b, n)[1]
    while (parent[parent] != parent).any():
        parent = parent[parent]
    return parent


@compiled
def _forest(a, b, n):  # type: ignore[no-untyped-def]
    """(edges that joined two trees, parent of each node); the root of a tree is its smallest node."""
    parent = np.arange(n)
    kept = np.empty(min(len(a), n), dtype=np.int64)
    count = 0
    for e in range(len(a)):
        x, y = a[e], b[e]
        while parent[x] != x:  # path halving
            parent[x] = parent[parent[x]]
            x = parent[x]
        while parent[y] != y:
            parent[y] = parent[parent[y]]
            y = parent[y]
        if x != y:
            parent[max(x, y)] = min(x, y)
            kept[count] = e
            count += 1
    return kept[:count].copy(), parent
