"""LiveIndex: the index inside a process, searched and followed. IndexService: the same for asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.client import Queries
from hashnet.errors import HashnetError, IndexMismatch
from hashnet.results import SearchResult
from hashnet.server.batching import Batcher
from hashnet.server.schemas import ApiError
from hashnet.server.settings import check_model

if TYPE_CHECKING:
    import pyarrow as pa

    from hashnet.server.http_server import Telemetry

log = logging.getLogger(__name__)

RADIUS_BLOCK = 16  # queries of a radius search between two checks of how many hits there are
BULK = 64  # requests with at least this many queries are searched apart: small ones would wait for them
MAX_TOGETHER = 256  # queries of small requests searched together
INLINE_S = 0.002  # a search shorter than this runs on the event loop
WAIT_FOR_VERSION_S = 2.0


@dataclass(frozen=True)
class SearchOptions:
    """How to search: either ``k`` or ``radius``. Requests with equal options are searched together."""

    k: int | None = None
    radius: int | None = None
    labels: tuple[int, ...] | None = None  # only items with one of these class ids
    exclude_self: bool = False  # leave a queried id out of its own hits
    asymmetric: bool = False  # rank by logits against codes, not by Hamming distance
    where: str | None = None  # a condition on the items' columns
    columns: tuple[str, ...] | None = None  # of the items, to return with the hits
    rescore: bool = False  # order the first k x oversample by the vectors of items and queries
    oversample: float | None = None  # None: the index's choice
    metric: str = "cosine"  # of the vectors: cosine | inner_product


@dataclass(frozen=True)
class SearchRequest:
    """One checked search, from the parsed request to the index."""

    queries: Queries  # codes or ids by the time it reaches the index
    options: SearchOptions
    max_hits: int
    logits: np.ndarray | None = None  # float32 (q, n_bits), of asymmetric ranking
    min_version: int = 0
    with_items: bool = False  # describe the hits: the response needs their codes
    text_ids: bool = False  # write ids as text, for clients whose numbers are not exact
    deadline: float = float("inf")  # as time.time()

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class SearchResponse:
    """The hits of one request: one (q, k) SearchResult, or a list of q 1-D ones after a radius search."""

    version: int
    hits: SearchResult | list[SearchResult]
    query_codes: np.ndarray  # uint8 (q, bytes)
    hit_codes: np.ndarray | None = None  # uint8, of all used hits, query after query, where requested
    columns: pa.Table | None = None  # of the same, where requested


@dataclass(frozen=True)
class IndexInfo:
    """What is served at the moment."""

    n_bits: int
    size: int
    kind: str
    engine: str
    version: int
    n_classes: int | None
    n_vector: int | None  # values of the vectors to rescore by
    oversample: float | None  # candidates per hit that are rescored unless requested
    lineage: dict[str, Any]


@dataclass(frozen=True)
class IndexedItems:
    """Items looked up by id in one version of the index."""

    version: int
    held: np.ndarray  # bool (n,): whether each id is indexed
    codes: np.ndarray  # uint8 (n, bytes); 0 where it is not
    labels: list[list[int]] | None  # of the indexed ones; None where not requested or not stored
    columns: list[dict[str, Any]] | None = None  # the same, keys among them


class IndexService:
    """A LiveIndex for the HTTP application: concurrent searches run together, new versions are followed.

    Requests of many queries have a thread of their own, so that small ones do not wait for them.
    """

    def __init__(self, index: LiveIndex, follow_s: float, telemetry: Telemetry) -> None:
        self.index, self.follow_s, self.telemetry = index, follow_s, telemetry
        self._small: Batcher = Batcher(self._search, max_rows=MAX_TOGETHER, inline_s=INLINE_S, name="search")
        self._bulk: Batcher = Batcher(self._search, max_rows=1, name="bulk")
        # Reads rows of a file that may be larger than memory: never on the event loop.
        self._rescored: Batcher = Batcher(self._search, max_rows=MAX_TOGETHER, name="rescore")
        self._following = asyncio.Lock()
        self._follower: asyncio.Task | None = None

    async def search(self, request: SearchRequest) -> SearchResponse:
        """The response to one request, from its ``min_version`` or a newer one."""
        await self._reach(request.min_version)
        batcher = self._bulk if len(request) >= BULK else self._small
        return await (self._rescored if request.options.rescore else batcher).submit(request)

    async def lookup(self, ids: np.ndarray, with_labels: bool = False, min_version: int = 0) -> IndexedItems:
        """As LiveIndex.lookup."""
        await self._reach(min_version)
        return await asyncio.to_thread(self.index.lookup, ids, with_labels)

    async def find_keys(self, keys: Sequence[str], min_version: int = 0) -> np.ndarray:
        """The id of each key, int64 (n,); -1 where no item has it."""
        await self._reach(min_version)
        return await asyncio.to_thread(self.index.index.find_keys, keys)

    async def info(self, min_version: int = 0) -> IndexInfo:
        """As LiveIndex.info."""
        await self._reach(min_version)
        return self.index.info()

    async def check_vectors(self, model_sha256: str | None, min_version: int = 0) -> None:
        """As LiveIndex.check_vectors."""
        await self._reach(min_version)
        await asyncio.to_thread(self.index.check_vectors, model_sha256)

    async def columns(self, ids: np.ndarray, names: Sequence[str]) -> pa.Table:
        """These columns of indexed items."""
        return await asyncio.to_thread(self.index.index.columns, ids, names)

    async def vectors(self, ids: np.ndarray) -> np.ndarray:
        """The vectors of indexed items, float32 (n, width)."""
        return await asyncio.to_thread(self.index.index.features, ids)

    async def vector_scores(self, vectors: np.ndarray, ids: np.ndarray, metric: str) -> np.ndarray:
        """float32 (q, m) of vectors (q, width) and the items with ids (q, m); -inf for id -1."""
        return await asyncio.to_thread(self.index.index.feature_scores, vectors, ids, metric)

    async def follow(self) -> None:
        """Checks for a new version once; if storage cannot be read, the current version stays."""
        try:
            async with self._following:
                if await asyncio.to_thread(self.index.follow):
                    self.telemetry.index(self.index.version, len(self.index.index))
        except Exception as error:
            log.warning("cannot look for a new index version: %s", error)

    async def _reach(self, version: int) -> None:
        """Returns when this version is served here; 503 when it does not come in time."""
        if self._follower is None:  # the first call: an event loop is running now
            await self.follow()  # no check was made since it was loaded, however long ago
            self._follower = self._follower or asyncio.create_task(self._follow_forever())
        if self.index.version >= version:
            return
        until = time.monotonic() + WAIT_FOR_VERSION_S
        await self.follow()
        while self.index.version < version:
            if time.monotonic() > until:
                raise _version_behind(self.index.version, version)
            await asyncio.sleep(0.02)
            await self.follow()

    async def _follow_forever(self) -> None:
        while True:
            await asyncio.sleep(self.follow_s)
            await self.follow()

    def _search(self, requests: Sequence[SearchRequest]) -> list[SearchResponse | HashnetError]:
        started = time.perf_counter()
        results = self.index.search(requests)
        refused = sum(
            len(request)
            for request, result in zip(requests, results, strict=True)
            if isinstance(result, HashnetError)
        )
        seconds = time.perf_counter() - started
        self.telemetry.search(self.index.index.kind, seconds, sum(map(len, requests)), refused)
        return results


class LiveIndex:
    """An index that can be replaced by a newer version while it is searched.

    All requests of one batch are searched in the same version.
    """

    def __init__(
        self, uri: str, engine: str = "auto", device: str = "cpu", model_sha256: str | None = None
    ) -> None:
        from hashnet.index import BinaryIndex

        self.uri, self.model_sha256 = uri, model_sha256
        self.index = BinaryIndex.load(uri, engine=engine, device=device)
        check_model(self.index.lineage, model_sha256, uri)
        self.refused: str | None = None  # the seal of the version on disk that does not fit the model

    @property
    def version(self) -> int:
        return self.index.version

    def info(self) -> IndexInfo:
        """What is served at the moment."""
        index = self.index
        return IndexInfo(
            n_bits=index.n_bits,
            size=len(index),
            kind=index.kind,
            engine=index.describe()["engine"],
            version=index.version,
            n_classes=index.n_classes,
            n_vector=index.n_features,
            oversample=index.oversample,
            lineage=index.lineage,
        )

    def key_of(self, id_: int) -> str | None:
        """The key of an item; None where it has none, or is not indexed."""
        index = self.index
        if index.schema is None or "key" not in index.schema.names or not index.contains([id_])[0]:
            return None
        return index.columns([id_], ["key"])["key"][0].as_py()

    def follow(self) -> bool:
        """Switches to a new version on disk while searches go on; True when it did.

        A version made with another model or code length is refused: the old one stays. An index that was
        deleted and rebuilt starts with version 1 again and is followed, too.
        """
        from hashnet.index import IndexArtefact

        seal = IndexArtefact(self.uri).sha256()
        if seal in (None, self.refused):
            return False
        newest = self.index.newest()
        if newest is self.index:
            return False
        try:
            if newest.n_bits != self.index.n_bits:
                raise IndexMismatch(f"it has {newest.n_bits} bits, the served one has {self.index.n_bits}")
            check_model(newest.lineage, self.model_sha256, self.uri)
        except HashnetError as error:
            self.refused = seal
            log.error("index version %d is not served: %s", newest.version, error)
            return False
        self.index = newest
        return True

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResponse | HashnetError]:
        """One response per request, all from the same version; equal options are searched together."""
        index = self.index
        results: list[SearchResponse | HashnetError | None] = [None] * len(requests)
        codes: list[np.ndarray] = [np.empty(0)] * len(requests)
        vectors: list[Any] = [None] * len(requests)
        groups: dict[SearchOptions, list[int]] = defaultdict(list)
        now = time.time()
        for i, request in enumerate(requests):
            try:
                if request.deadline < now:  # its client has given up
                    raise ApiError("timeout", "the request waited too long; try again", 503)
                if request.min_version > index.version:
                    raise _version_behind(index.version, request.min_version)
                queries = request.queries
                codes[i] = index.codes(queries.values) if queries.kind == "ids" else queries.values
                vectors[i] = _vectors(index, request)
                groups[request.options].append(i)
            except HashnetError as error:
                results[i] = ApiError.of(error) or error
        for members in groups.values():
            group = [requests[i] for i in members]
            found = _search_group(index, group, [codes[i] for i in members], [vectors[i] for i in members])
            for i, result in zip(members, found, strict=True):
                results[i] = result
        return results  # type: ignore[return-value] # every place was filled

    def lookup(self, ids: np.ndarray, with_labels: bool = False) -> IndexedItems:
        """Which ids are indexed, their codes and, with ``with_labels``, their labels."""
        index = self.index
        held = index.contains(ids)
        codes = np.zeros((len(ids), index.n_bits // 8), dtype=np.uint8)
        if held.any():
            codes[held] = index.codes(ids[held])
        labels = columns = None
        if with_labels:
            labels = index.labels(ids[held])
            columns = None if index.schema is None else index.columns(ids[held]).to_pylist()
        return IndexedItems(index.version, held, codes, labels, columns)

    def check_vectors(self, model_sha256: str | None) -> None:
        """Refuses to rescore by vectors of this model where the index has none, or those of another."""
        index = self.index
        check_width(index.n_features, None)
        made_with = index.features_model
        if made_with is None or made_with != model_sha256:
            theirs = f"of model {made_with[:12]}…" if made_with else "not of a model"
            sentence = f"the vectors of this index are {theirs}, the server's model is {model_sha256}"
            raise ApiError("lineage_mismatch", f"{sentence}; search by codes with their own vectors", 409)


def _vectors(index: Any, request: SearchRequest) -> np.ndarray | None:
    """The vectors that a request's hits are rescored by, float32 (q, width); None where they are not."""
    if not request.options.rescore:
        return None
    queries = request.queries
    check_width(index.n_features, queries.vectors)
    return index.features(queries.values) if queries.kind == "ids" else queries.vectors


def check_width(n_vector: int | None, vectors: np.ndarray | None) -> None:
    """Refuses to rescore by an index without vectors, or by vectors of another width than its own."""
    if n_vector is None:
        sentence = "this index has no vectors to rescore by"
        raise ApiError("no_vectors", f"{sentence}; encode with output=codes,features and build it again")
    if vectors is not None and vectors.shape[1] != n_vector:
        sentence = f"the index has vectors of {n_vector} values, got {vectors.shape[1]}"
        raise ApiError("wrong_width", sentence)


def _version_behind(version: int, min_version: int) -> ApiError:
    sentence = f"the index is at version {version}, the request needs {min_version}; try again"
    return ApiError("version_behind", sentence, 503)


def _search_group(
    index: Any, requests: list[SearchRequest], codes: list[np.ndarray], vectors: list[np.ndarray]
) -> list[SearchResponse | HashnetError]:
    """Responses to requests with equal options, from one search.

    ``codes`` are uint8 (q, bytes) of each, ``vectors`` float32 (q, width) where they are rescored.
    """
    names = requests[0].options.columns
    try:
        if names is not None:
            index.columns([], names)  # one that is not there spoils no other request
        hits = _hits(index, requests, codes, vectors)
    except HashnetError as error:
        return [ApiError.of(error) or error] * len(requests)
    bounds = np.cumsum([0, *map(len, codes)])
    results: list[SearchResponse | HashnetError] = []
    for request, own, start, stop in zip(requests, codes, bounds[:-1], bounds[1:], strict=True):
        part = hits[start:stop] if isinstance(hits, list) else _rows(hits, start, stop)
        if isinstance(part, list) and sum(map(len, part)) > request.max_hits:
            results.append(too_many_hits(request))
            continue
        ids = used_ids(part)
        hit_codes = index.codes(ids) if request.with_items and len(index) else None
        columns = None if names is None else index.columns(ids, names)
        results.append(SearchResponse(index.version, part, own, hit_codes, columns))
    return results


def _hits(
    index: Any, requests: list[SearchRequest], codes: list[np.ndarray], vectors: list[np.ndarray]
) -> SearchResult | list[SearchResult]:
    """The hits of all queries of all requests, in order."""
    options = requests[0].options
    joined = np.concatenate(codes) if len(codes) > 1 else codes[0]
    _check_labels(index, options.labels)
    where: dict[str, Any] = {} if options.labels is None else {"labels": list(options.labels)}
    if options.where is not None:
        where["condition"] = options.where
    own_ids = np.concatenate([r.queries.values for r in requests]) if options.exclude_self else None
    if options.k is None:
        return _search_radius(index, joined, requests, where or None, own_ids)
    if len(index) == 0:
        unused = np.full((len(joined), options.k), -1)
        scored = options.asymmetric or options.rescore
        scores = np.full(unused.shape, -np.inf, np.float32) if scored else None
        return SearchResult(unused.astype(np.int64), unused.astype(np.int32), index.version, scores)
    how: dict[str, Any] = {"k": options.k, "where": where or None, "exclude_self": own_ids}
    if options.rescore:
        how |= {"rescore": "features", "features": np.concatenate(vectors)}
        how |= {"oversample": options.oversample, "metric": options.metric}
    if options.asymmetric:
        how["oversample"] = options.oversample
        return index.search(logits=np.concatenate([request.logits for request in requests]), **how)
    return index.search(joined, **how)


def _search_radius(
    index: Any,
    codes: np.ndarray,
    requests: list[SearchRequest],
    where: dict[str, Any] | None,
    own_ids: np.ndarray | None,
) -> list[SearchResult]:
    """A radius search that stops searching for a request once it has more hits than it may return."""
    found = [SearchResult(np.zeros(0, np.int64), np.zeros(0, np.int32)) for _ in range(len(codes))]
    if len(index) == 0:
        return found
    request_of = np.repeat(np.arange(len(requests)), [len(request) for request in requests])  # (q,)
    max_hits = np.array([request.max_hits for request in requests])
    totals = np.zeros(len(requests), dtype=np.int64)
    for start in range(0, len(codes), RADIUS_BLOCK):
        rows = np.arange(start, min(start + RADIUS_BLOCK, len(codes)))
        rows = rows[(totals <= max_hits)[request_of[rows]]]
        if not len(rows):
            continue
        own = None if own_ids is None else own_ids[rows]
        radius = requests[0].options.radius
        block = index.search_radius(codes[rows], radius=radius, where=where, exclude_self=own)
        for row, hits in zip(rows, block, strict=True):
            found[row] = hits
            totals[request_of[row]] += len(hits)
    return found


def _check_labels(index: Any, labels: tuple[int, ...] | None) -> None:
    """Refuses a filter by classes that this version does not have."""
    if labels is None:
        return
    if index.n_classes is None:
        raise ApiError("no_labels", "the items of this index have no labels to filter by")
    if max(labels, default=0) >= index.n_classes:
        raise ApiError(
            "unknown_label", f"there is no class {max(labels)}; classes are 0 to {index.n_classes - 1}"
        )


def too_many_hits(request: SearchRequest) -> ApiError:
    """The error of a radius search with more hits than its response may have."""
    sentence = (
        f"more than {request.max_hits:,} items lie within {request.options.radius} bits; "
        "use a smaller radius or fewer queries"
    )
    return ApiError("too_many_hits", sentence, 413)


def _rows(hits: SearchResult, start: int, stop: int) -> SearchResult:
    if start == 0 and stop == len(hits.ids):
        return hits
    scores = None if hits.scores is None else hits.scores[start:stop]
    return replace(hits, ids=hits.ids[start:stop], distances=hits.distances[start:stop], scores=scores)


def used_ids(hits: SearchResult | list[SearchResult]) -> np.ndarray:
    """Ids of all hits, query after query, without unused slots."""
    if isinstance(hits, list):
        return np.concatenate([hit.ids for hit in hits] or [np.zeros(0, np.int64)])
    return hits.ids[hits.distances >= 0]
