"""``slices=N``: an index larger than one machine, in slices that Serve replicas hold.

    client ──▶ HTTP replica ──┬──▶ slice 0 of N    items whose id % N is 0
                              ├──▶ slice 1 …       each slice_replicas times
                              └──▶ writer          all slices, memory-mapped

A slice is an index of its own in the index folder, built from the code store by the first replica that starts
with it. The HTTP replica asks every slice and merges by (distance, id): the result is that of one index over
everything. A slice that is lost is opened again elsewhere; until then a request waits or gets 503 with its
number. It never returns the hits of the other slices as if they were all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from ray import serve

from cluster.runtime import ray_internals, run_name
from cluster.serve.replicas import LOST, RayTelemetry, set_threads
from hashnet.client import Queries
from hashnet.errors import ConfigError, HashnetError, UnknownId
from hashnet.index import BinaryIndex, CodeBlock, IndexArtefact, IndexSpec, read_code_blocks
from hashnet.io import storage
from hashnet.kernels import merge_hits, merge_top_k
from hashnet.results import SearchResult
from hashnet.run import Run
from hashnet.server import (
    ApiError,
    IndexedItems,
    IndexInfo,
    IndexService,
    LiveIndex,
    SearchOptions,
    SearchRequest,
    SearchResponse,
    ServeConfig,
    ServedRun,
    check_width,
    too_many_hits,
    used_ids,
)
from hashnet.store import CodeStore, FeatureStore

BEFORE_THE_LIMIT_S = 0.5  # a slice is given up on this long before its request is


def slice_folders(index: str, n: int) -> list[str]:
    """Where the slices of an index are."""
    return [storage.join(index, f"slices-{n}", f"{number:03d}") for number in range(n)]


def build_slice(
    store: CodeStore, folder: str, number: int, n: int, features: FeatureStore | None = None
) -> None:
    """Writes slice ``number`` of ``n`` of a code store, unless it is there, with vectors to rescore by.

    A slice of a store that has grown since is built again; changes made through the API are kept.
    """
    artefact = IndexArtefact(folder)
    if artefact.exists():
        about = artefact.read()
        if about["updates"] and not about.get("features"):
            features = None  # items were added to it without vectors
        if (
            bool(about.get("features")) == (features is not None)
            and about["lineage"].get("codes_sha256") == store.sha256
        ):
            return
    rows = sum(int((ids % n == number).sum()) for ids in _ids(store))
    spec = IndexSpec.of_store(store, "flat", {})
    blocks = (_own_rows(block, number, n) for block in read_code_blocks(store))
    index = BinaryIndex.from_blocks(blocks, rows, spec, engine="faiss")
    if features is not None:
        index.attach_features(features)
    index.replace(folder)


def _features(config: ServeConfig, store: CodeStore) -> FeatureStore | None:
    """The vectors of the run, where they are of the same rows as the codes."""
    artefact = Run(config.run).store("features", "database")
    if not artefact.exists():
        return None
    features: FeatureStore = artefact.open()
    fits = features.rows_sha256 == store.rows_sha256 and features.plan.dtype is not None
    return features if fits else None


def _ids(store: CodeStore) -> Iterator[np.ndarray]:
    for table in store.tables(["row_id"]):
        yield table["row_id"].to_numpy()


def _own_rows(block: CodeBlock, number: int, n: int) -> CodeBlock:
    """The rows of a block that belong to a slice."""
    own = block.ids % n == number
    place = np.cumsum(own) - 1  # the new number of each row
    labels = label_rows = None
    if block.labels is not None and block.label_rows is not None:
        kept = own[block.label_rows]
        labels, label_rows = block.labels[kept], place[block.label_rows[kept]]
    columns = None if block.columns is None else block.columns.filter(own)
    return CodeBlock(block.ids[own], block.codes[own], labels, label_rows, columns)


@serve.deployment
class SliceReplica:
    """Holds one slice and follows its versions."""

    def __init__(self, number: int, config: ServeConfig, served: ServedRun) -> None:
        ray_internals.keep_replica_on_loopback()
        set_threads(config.threads)
        assert config.slices is not None
        assert served.codes is not None
        folder = slice_folders(served.index, config.slices)[number]
        store = CodeStore.open(served.codes)
        build_slice(store, folder, number, config.slices, _features(config, store))
        live = LiveIndex(folder, config.search_engine, config.index_device, served.model_sha256)
        self.service = IndexService(live, config.follow_s, RayTelemetry(run_name(config.run)))

    async def call(self, method: str, fresh: bool, *arguments: Any) -> Any:
        """A method of IndexService, or the error it raised; ``fresh`` looks for a new version first."""
        try:
            if fresh:
                await self.service.follow()
            return await getattr(self.service, method)(*arguments)
        except HashnetError as error:
            return error


class SlicedIndex:
    """All slices as one index, for the HTTP application. Versions are sums of the slices' versions."""

    def __init__(self, slices: list[Any], timeout_s: float) -> None:
        self.slices, self.timeout_s = slices, timeout_s

    async def info(self, min_version: int = 0) -> IndexInfo:
        """Kind and lineage of the slices, size and version of all of them."""
        found = await self._all("info", min_version)
        size, version = sum(one.size for one in found), sum(one.version for one in found)
        return replace(found[0], size=size, version=version)

    async def lookup(self, ids: np.ndarray, with_labels: bool = False, min_version: int = 0) -> IndexedItems:
        """Every id from the slice that owns it."""
        n = len(self.slices)
        rows = [np.flatnonzero(ids % n == number) for number in range(n)]
        arguments = [(ids[own], with_labels) for own in rows]
        found: list[IndexedItems] = await self._each("lookup", min_version, arguments)
        held = np.zeros(len(ids), dtype=bool)
        codes = np.zeros((len(ids), found[0].codes.shape[1]), dtype=np.uint8)
        further: dict[str, list[Any] | None] = {"labels": None, "columns": None}
        for own, part in zip(rows, found, strict=True):
            held[own], codes[own] = part.held, part.codes
        for name in further:
            parts = [getattr(part, name) for part in found]
            if any(part is not None for part in parts):
                by_row: dict[int, Any] = {}
                for own, part, values in zip(rows, found, parts, strict=True):
                    known = values if values is not None else [None] * int(part.held.sum())
                    by_row |= dict(zip(own[part.held].tolist(), known, strict=True))
                further[name] = [by_row[row] for row in sorted(by_row)]
        return IndexedItems(sum(part.version for part in found), held, codes, **further)

    async def find_keys(self, keys: Sequence[str], min_version: int = 0) -> np.ndarray:
        """The id of each key, in whichever slice holds it; -1 where none does."""
        return np.max(await self._all("find_keys", min_version, keys), axis=0)

    async def check_vectors(self, model_sha256: str | None, min_version: int = 0) -> None:
        """As IndexService.check_vectors."""
        await self._all("check_vectors", min_version, model_sha256)

    async def search(self, request: SearchRequest) -> SearchResponse:
        """The hits of all slices, merged; ids are looked up in their slices first.

        What is rescored are the first k x oversample items of all slices together.
        """
        own: np.ndarray | None = None
        queries, wanted = request.queries, request.options.k
        if request.options.asymmetric and not request.options.rescore and request.options.oversample:
            raise ApiError("unsupported", "slices score every item: leave oversample out")
        if request.options.rescore:
            queries, wanted = await self._with_vectors(request)
        if queries.kind == "ids":
            found = await self.lookup(queries.values, min_version=request.min_version)
            if not found.held.all():
                unknown = int(queries.values[~found.held][0])
                raise ApiError("unknown_id", f"the index holds no id {unknown}", 404)
            own = queries.values if request.options.exclude_self else None
            queries = Queries("codes", found.codes, queries.vectors)
        options = replace(
            request.options, k=wanted, exclude_self=False, rescore=False, oversample=None, columns=None
        )
        if own is not None and wanted is not None:
            options = replace(options, k=wanted + 1)  # one of them is the query itself
        part = replace(request, queries=queries, options=options, min_version=0, with_items=False)
        parts: list[SearchResponse] = await self._all("search", request.min_version, part)
        hits = _merged(parts, options.k)
        if own is not None:
            hits = _without(hits, own, wanted)
        if request.options.rescore:
            assert isinstance(hits, SearchResult)
            hits = await self._rescored(hits, queries.vectors, request.options)
        if isinstance(hits, list) and sum(map(len, hits)) > request.max_hits:
            raise too_many_hits(request)
        hit_codes = None
        if request.with_items:
            hit_codes = (await self.lookup(used_ids(hits))).codes
        columns = None
        if request.options.columns is not None:
            columns = await self._columns(used_ids(hits), request.options.columns)
        version = sum(one.version for one in parts)
        return SearchResponse(version, hits, queries.values, hit_codes, columns)

    async def _columns(self, ids: np.ndarray, names: tuple[str, ...]) -> pa.Table:
        """Columns of hits, each from the slice that owns it."""
        n = len(self.slices)
        rows = [np.flatnonzero(ids % n == number) for number in range(n)]
        try:
            parts = await self._each("columns", 0, [(ids[own], names) for own in rows])
        except UnknownId:  # removed since it was found
            raise ApiError("version_behind", "a hit was removed during the search; try again", 503) from None
        return pa.concat_tables(parts).take(pa.array(np.argsort(np.concatenate(rows))))

    async def _with_vectors(self, request: SearchRequest) -> tuple[Queries, int]:
        """(the queries with the vectors to rescore by, how many candidates are rescored)."""
        queries, options = request.queries, request.options
        about = await self.info(request.min_version)
        check_width(about.n_vector, queries.vectors)
        assert about.oversample is not None
        assert options.k is not None
        wanted = math.ceil(options.k * (options.oversample or about.oversample))
        if queries.kind != "ids":
            return queries, wanted
        ids, n = queries.values, len(self.slices)
        rows = [np.flatnonzero(ids % n == number) for number in range(n)]
        found = await self._each("vectors", request.min_version, [(ids[own],) for own in rows])
        vectors = np.empty((len(ids), about.n_vector or 0), dtype=np.float32)
        for own, part in zip(rows, found, strict=True):
            vectors[own] = part
        return Queries("ids", ids, vectors), wanted

    async def _rescored(self, hits: SearchResult, vectors: Any, options: SearchOptions) -> SearchResult:
        """The k best of candidates by their vectors, each of which the slice that owns it knows."""
        n = len(self.slices)
        arguments = [
            (vectors, np.where(hits.ids % n == number, hits.ids, -1), options.metric) for number in range(n)
        ]
        scores = np.max(await self._each("vector_scores", 0, arguments), axis=0)
        return _by_score(hits.ids, hits.distances, scores, options.k)

    async def _all(self, method: str, min_version: int, *arguments: Any) -> list[Any]:
        return await self._each(method, min_version, [arguments] * len(self.slices))

    async def _each(self, method: str, min_version: int, arguments: list[tuple]) -> list[Any]:
        """One result per slice; with a ``min_version``, of the newest version on disk."""
        fresh = min_version > 0  # what was acknowledged is on disk

        async def one(number: int) -> Any:
            return await self._call(
                number, lambda: self.slices[number].call.remote(method, fresh, *arguments[number])
            )

        return list(await asyncio.gather(*map(one, range(len(self.slices)))))

    async def _call(self, number: int, call: Callable[[], Any]) -> Any:
        """A slice's result; 503 with its number where it does not come back in time."""
        deadline = time.monotonic() + self.timeout_s - BEFORE_THE_LIMIT_S
        try:
            async with asyncio.timeout(self.timeout_s - BEFORE_THE_LIMIT_S):
                while True:
                    try:
                        result = await call()
                        break
                    except LOST:
                        if time.monotonic() > deadline:
                            raise TimeoutError from None
                        await asyncio.sleep(0.1)
        except TimeoutError:
            sentence = f"slice {number} of {len(self.slices)} does not respond, it is being opened again"
            raise ApiError("unavailable", f"{sentence}; try again", 503) from None
        if isinstance(result, HashnetError):
            raise result
        return result


def _merged(parts: list[SearchResponse], k: int | None) -> SearchResult | list[SearchResult]:
    hits: list[Any] = [part.hits for part in parts]
    if k is None:
        return [
            SearchResult(*merge_hits([(one.ids, one.distances) for one in of_query]))
            for of_query in zip(*hits, strict=True)
        ]
    ids = [part.ids for part in hits]
    if hits[0].scores is None:
        return SearchResult(*merge_top_k(ids, [part.distances for part in hits], k))
    joined = (
        np.concatenate([getattr(part, name) for part in hits], axis=1)
        for name in ("ids", "distances", "scores")
    )
    return _by_score(*joined, k)


def _by_score(ids: np.ndarray, distances: np.ndarray, scores: np.ndarray, k: int | None) -> SearchResult:
    """The k best of candidates (q, m) by (score descending, id)."""
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    ids, distances, scores = (np.take_along_axis(a, order, axis=1) for a in (ids, distances, scores))
    return SearchResult(ids, distances, None, scores)


def _without(hits: Any, own: np.ndarray, k: int | None) -> SearchResult | list[SearchResult]:
    """The hits without each query's own id."""
    if isinstance(hits, list):
        return [
            SearchResult(one.ids[one.ids != id_], one.distances[one.ids != id_])
            for one, id_ in zip(hits, own, strict=True)
        ]
    others = hits.ids != own[:, None]
    rows = [np.flatnonzero(row)[:k] for row in others]
    at = np.stack([row if len(row) == k else np.arange(1, (k or 0) + 1) for row in rows])
    pick = np.arange(len(at))[:, None]
    return SearchResult(hits.ids[pick, at], hits.distances[pick, at])


def check_slices(config: ServeConfig, served: ServedRun) -> None:
    """ConfigError where a run cannot be served in slices."""
    if config.slices is not None and served.codes is None:
        raise ConfigError(f"slices={config.slices} are built from a code store; {config.run} has no codes/")
