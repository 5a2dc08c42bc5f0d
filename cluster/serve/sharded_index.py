"""ShardedIndex: a database beyond one machine, in slices that Ray actors hold.

    with ShardedIndex("s3://bucket/run/codes", n_slices=8, num_cpus=8) as index:
        hits = index.search(codes, k=100)        # as BinaryIndex.search: ordered by (distance, id)

A slice is a range of the store's shards. Ray restarts an actor that dies, on any node with room, and the
actor rebuilds its slice from the store. Meanwhile a search waits for it or, with ``on_missing="raise"``,
fails and names the missing slice; it never returns the hits of the other slices as if they were all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster.runtime import Need, capacity, connection, reraise_hashnet_error
from hashnet.errors import ClusterError, DataError, IndexMismatch, LineageMismatch, UnknownId
from hashnet.index import (
    BinaryIndex,
    IndexSpec,
    check_ids,
    check_search_size,
    check_width,
    parse_options,
    read_code_blocks,
)
from hashnet.io import check_whole
from hashnet.kernels import merge_hits, merge_top_k
from hashnet.results import SearchResult
from hashnet.store import CodeStore

BYTES_BESIDE_CODE = 24  # per row while a slice is built: its id, twice, and rows read ahead
BYTES_OF_LABELS = 40  # per row with labels, before and after sorting
ON_MISSING = ("wait", "raise")


class IndexSlice:
    """One slice, inside an actor: some shards of a store as a BinaryIndex.

    ``shards`` maps their names to the sha256 they must have.
    """

    def __init__(
        self, uri: str, shards: dict[str, str], kind: str, engine: str, labels: bool, options: dict[str, Any]
    ) -> None:
        store = CodeStore.open(uri)
        places = {shard.name: number for number, shard in enumerate(store.shards)}
        numbers = [places.get(name, -1) for name in shards]
        for name, number in zip(shards, numbers, strict=True):
            if number < 0 or store.shards[number].sha256 != shards[name]:
                raise LineageMismatch(f"{uri} no longer has shard {name} as it was opened; make a new one")
        self.index = BinaryIndex.from_blocks(
            read_code_blocks(store, labels, numbers),
            sum(store.shards[number].rows for number in numbers),
            IndexSpec.of_store(store, kind, options, labels=labels),
            engine=engine,
        )

    def describe(self) -> dict[str, Any]:
        return self.index.describe() | {"pid": os.getpid()}

    def search(
        self, codes: np.ndarray, k: int, where: Any, own: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(ids (q, k), distances (q, k), whether each query's own id is in this slice)."""
        mine, held = self._own(own)
        hits = self.index.search(codes, k, where=where, exclude_self=mine)
        return hits.ids, hits.distances, held

    def search_radius(
        self, codes: np.ndarray, radius: int, where: Any, own: np.ndarray | None
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray | None]:
        mine, held = self._own(own)
        hits = self.index.search_radius(codes, radius, where=where, exclude_self=mine)
        return [(of_query.ids, of_query.distances) for of_query in hits], held

    def _own(self, own: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        if own is None:
            return None, None
        held = (own >= 0) & self.index.contains(np.maximum(own, 0))
        return np.where(held, own, -1), held


class ShardedIndex:
    """``n_slices`` actors over the code store at ``store``; the same searches as BinaryIndex.

    Each slice reserves ``num_cpus`` cores and the memory it needs; a cluster that can never provide them is
    refused at once. ``options`` are those of the index kind.
    """

    def __init__(
        self,
        store: CodeStore | str,
        n_slices: int,
        *,
        kind: str = "flat",
        engine: str = "auto",
        num_cpus: float = 1,
        labels: bool = True,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        source = store if isinstance(store, CodeStore) else CodeStore.open(str(store))
        if not len(source):
            raise DataError(f"there are no codes to index: {source.uri} has 0 rows; encode some first")
        most = sum(shard.rows > 0 for shard in source.shards)
        if not 1 <= n_slices <= most:
            raise ClusterError(
                f"n_slices must lie between 1 and {most} (the shards of {source.uri} that hold rows), "
                f"got {n_slices}"
            )
        parse_options(
            kind, options, source.n_bits, len(source)
        )  # a mistake in them is found here, not in an actor
        connection.connect()
        import ray

        self.n_bits, self.kind, self.timeout_s = source.n_bits, kind, timeout_s
        self._rows = len(source)
        self._ray = ray
        self.slices = _cut([shard.rows for shard in source.shards], n_slices)
        largest = max(sum(source.shards[i].rows for i in shards) for shards in self.slices)
        beside = BYTES_BESIDE_CODE + (BYTES_OF_LABELS if labels and source.n_classes is not None else 0)
        memory = largest * (self.n_bits // 8 + beside) + (256 << 20)
        need = {"CPU": num_cpus, "memory": memory}
        capacity.require(
            "sharded index",
            [Need("slice", n_slices, need, fix="fewer cores or more, smaller slices")],
        )
        actor = ray.remote(IndexSlice).options(
            num_cpus=num_cpus,
            memory=memory,
            scheduling_strategy="SPREAD",
            max_restarts=-1,  # a slice that dies is rebuilt from the store
            max_task_retries=-1,  # and the calls it missed are repeated
        )
        self._actors = [
            actor.remote(
                source.uri,
                {source.shards[i].name: source.shards[i].sha256 for i in shards},
                kind,
                engine,
                labels,
                options,
            )
            for shards in self.slices
        ]
        self._described = self._call(lambda slice_: slice_.describe, (), "wait", timeout_s)

    def __len__(self) -> int:
        return self._rows

    def search(
        self,
        codes: np.ndarray,
        k: int = 10,
        *,
        where: Any = None,
        exclude_self: Any = None,
        on_missing: str = "wait",
        timeout_s: float | None = None,
    ) -> SearchResult:
        """The k nearest of each query over all slices, as ``BinaryIndex.search``.

        ``on_missing``: "wait" for a slice that is being rebuilt (at most ``timeout_s``), or "raise"
        ClusterError with its number.
        """
        queries = check_width(codes, self.n_bits)
        own = self._own(exclude_self, queries)
        arguments = (queries, check_search_size(k, len(queries)), where, own)
        found = self._call(lambda slice_: slice_.search, arguments, on_missing, timeout_s)
        self._refuse_unknown(own, [held for *_, held in found])
        ids, distances = merge_top_k([ids for ids, _, _ in found], [far for _, far, _ in found], k)
        return SearchResult(ids, distances)

    def search_radius(
        self,
        codes: np.ndarray,
        radius: int = 2,
        *,
        where: Any = None,
        exclude_self: Any = None,
        on_missing: str = "wait",
        timeout_s: float | None = None,
    ) -> list[SearchResult]:
        """For each query everything with distance <= radius, as ``BinaryIndex.search_radius``."""
        queries = check_width(codes, self.n_bits)
        own = self._own(exclude_self, queries)
        arguments = (queries, check_whole("radius", radius, 0, IndexMismatch), where, own)
        found = self._call(lambda slice_: slice_.search_radius, arguments, on_missing, timeout_s)
        self._refuse_unknown(own, [held for _, held in found])
        merged = [merge_hits(list(of_query)) for of_query in zip(*(hits for hits, _ in found), strict=True)]
        return [SearchResult(ids, distances) for ids, distances in merged]

    def describe(self) -> dict[str, Any]:
        """Kind, rows, engine, and the rows of each slice."""
        first = self._described[0]
        shared = {name: first[name] for name in ("kind", "n_bits", "engine", "exact", "n_classes", "lineage")}
        return shared | {"rows": len(self), "slices": [about["rows"] for about in self._described]}

    def missing(self, timeout_s: float = 5.0) -> list[int]:
        """Numbers of the slices that do not respond at the moment."""
        return sorted(self._responses(lambda slice_: slice_.describe, (), 0, timeout_s)[1])

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def __enter__(self) -> ShardedIndex:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(
        self, method: Callable[[Any], Any], arguments: tuple, on_missing: str, timeout_s: float | None
    ) -> list[Any]:
        """The response of every slice, in order; ClusterError names the slices that gave none."""
        if on_missing not in ON_MISSING:
            raise IndexMismatch(f"on_missing must be wait or raise, got {on_missing!r}")
        retries = -1 if on_missing == "wait" else 0
        responses, missing = self._responses(method, arguments, retries, timeout_s or self.timeout_s)
        if missing:
            which = "; ".join(f"slice {number} ({reason})" for number, reason in sorted(missing.items()))
            raise ClusterError(
                f"{len(missing)} of {len(self.slices)} slices of the index did not respond, "
                f"so the search has no result: {which}. Ray rebuilds a lost slice from "
                "the store while the cluster has room; search again"
            )
        return responses

    def _responses(
        self, method: Callable[[Any], Any], arguments: tuple, retries: int, timeout_s: float
    ) -> tuple[list[Any], dict[int, str]]:
        """(responses, slice number → why it gave none)."""
        if not self._actors:
            raise ClusterError("this ShardedIndex was closed; make a new one")
        exceptions = self._ray.exceptions
        shared = [self._ray.put(a) if isinstance(a, np.ndarray) else a for a in arguments]
        futures = [method(actor).options(max_task_retries=retries).remote(*shared) for actor in self._actors]
        deadline = time.monotonic() + timeout_s
        responses, missing = [], {}
        for number, future in enumerate(futures):
            try:
                responses.append(self._ray.get(future, timeout=max(0.0, deadline - time.monotonic())))
            except exceptions.GetTimeoutError:
                missing[number] = f"no response within {timeout_s:g} s"
                self._ray.cancel(future)
            except exceptions.RayActorError as error:
                missing[number] = str(error).strip().splitlines()[-1]
            except exceptions.RayTaskError as error:
                reraise_hashnet_error(error)
        return responses, missing

    def _own(self, ids: Any, queries: np.ndarray) -> np.ndarray | None:
        return None if ids is None or ids is False else check_ids(ids, len(queries), lowest=-1)

    def _refuse_unknown(self, own: np.ndarray | None, held: list[np.ndarray | None]) -> None:
        if own is None:
            return
        unknown = own[(own >= 0) & ~np.logical_or.reduce([mask for mask in held if mask is not None])]
        if len(unknown):
            raise UnknownId(f"the index holds no id {unknown[0]} ({len(unknown)} of {len(own)} are unknown)")


def _cut(rows: list[int], n_slices: int) -> list[list[int]]:
    """Shard numbers of each slice: consecutive shards that hold rows, about as many rows in each slice."""
    filled = [number for number, held in enumerate(rows) if held]  # a shard may be all quarantined
    ends = np.cumsum([rows[number] for number in filled])
    slices: list[list[int]] = []
    start = 0
    for number in range(n_slices):
        target = ends[-1] * (number + 1) / n_slices
        stop = int(np.searchsorted(ends, target - 0.5)) + 1
        stop = min(max(stop, start + 1), len(filled) - (n_slices - number - 1))
        slices.append(filled[start:stop])
        start = stop
    return slices
