"""LiveIndex: the index inside a process, searched in batches and followed; IndexWriter: its only writer."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from hashnet.errors import HashnetError, IdTaken, IndexMismatch, LineageMismatch, StaleIndex
from hashnet.results import SearchResult
from hashnet.server.errors import ApiError
from hashnet.server.messages import (
    AddItems,
    IndexedItems,
    IndexInfo,
    RemoveItems,
    SearchOptions,
    SearchRequest,
    SearchResponse,
    Written,
)
from hashnet.server.served_run import check_model

log = logging.getLogger(__name__)

RADIUS_BLOCK = 16  # queries of a radius search between two checks of how many hits there are


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
            lineage=index.lineage,
        )

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

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResponse | ApiError]:
        """One response per request, all from the same version; equal options are searched together."""
        index = self.index
        results: list[SearchResponse | ApiError | None] = [None] * len(requests)
        codes: list[np.ndarray] = [np.empty(0)] * len(requests)
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
                groups[request.options].append(i)
            except HashnetError as error:
                results[i] = ApiError.of(error)
        for members in groups.values():
            found = _search_group(index, [requests[i] for i in members], [codes[i] for i in members])
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
        return IndexedItems(index.version, held, codes, index.labels(ids[held]) if with_labels else None)


def _version_behind(version: int, min_version: int) -> ApiError:
    sentence = f"the index is at version {version}, the request needs {min_version}; try again"
    return ApiError("version_behind", sentence, 503)


def _search_group(
    index: Any, requests: list[SearchRequest], codes: list[np.ndarray]
) -> list[SearchResponse | ApiError]:
    """Responses to requests with equal options, from one search; ``codes`` are uint8 (q, bytes) of each."""
    try:
        hits = _hits(index, requests, codes)
    except HashnetError as error:
        return [ApiError.of(error)] * len(requests)
    bounds = np.cumsum([0, *map(len, codes)])
    results: list[SearchResponse | ApiError] = []
    for request, own, start, stop in zip(requests, codes, bounds[:-1], bounds[1:], strict=True):
        part = hits[start:stop] if isinstance(hits, list) else _rows(hits, start, stop)
        if isinstance(part, list) and sum(map(len, part)) > request.max_hits:
            results.append(_too_many(request))
            continue
        hit_codes = index.codes(_used_ids(part)) if request.with_items and len(index) else None
        results.append(SearchResponse(index.version, part, own if request.with_codes else None, hit_codes))
    return results


def _hits(
    index: Any, requests: list[SearchRequest], codes: list[np.ndarray]
) -> SearchResult | list[SearchResult]:
    """The hits of all queries of all requests, in order."""
    options = requests[0].options
    joined = np.concatenate(codes) if len(codes) > 1 else codes[0]
    _check_labels(index, options.labels)
    where = None if options.labels is None else {"labels": list(options.labels)}
    own_ids = np.concatenate([r.queries.values for r in requests]) if options.exclude_self else None
    if options.k is None:
        return _search_radius(index, joined, requests, where, own_ids)
    if len(index) == 0:
        unused = np.full((len(joined), options.k), -1)
        return SearchResult(unused.astype(np.int64), unused.astype(np.int32))
    return index.search(joined, k=options.k, where=where, exclude_self=own_ids)


def _search_radius(
    index: Any,
    codes: np.ndarray,
    requests: list[SearchRequest],
    where: dict[str, list[int]] | None,
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


def _too_many(request: SearchRequest) -> ApiError:
    sentence = (
        f"more than {request.max_hits:,} items lie within {request.options.radius} bits; "
        "use a smaller radius or fewer queries"
    )
    return ApiError("too_many_hits", sentence, 413)


def _rows(hits: SearchResult, start: int, stop: int) -> SearchResult:
    if start == 0 and stop == len(hits.ids):
        return hits
    return replace(hits, ids=hits.ids[start:stop], distances=hits.distances[start:stop])


def _used_ids(hits: SearchResult | list[SearchResult]) -> np.ndarray:
    """Ids of all hits, query after query, without unused slots."""
    if isinstance(hits, list):
        return np.concatenate([hit.ids for hit in hits] or [np.zeros(0, np.int64)])
    return hits.ids[hits.distances >= 0]


ATTEMPTS = 5  # at one change, when another process writes the index too


class IndexWriter:
    """The single writer of an index: when ``write`` returns, the change is on disk as a new version."""

    def __init__(self, uri: str, model_sha256: str | None) -> None:
        from hashnet.index import BinaryIndex

        self.uri, self.model_sha256 = uri, model_sha256
        self.index = BinaryIndex.load(uri)

    def write(self, change: AddItems | RemoveItems) -> Written:
        """The index after the change; ApiError where it cannot be made."""
        try:
            for _ in range(ATTEMPTS):
                with suppress(StaleIndex):  # a job is compacting or building it: nothing was changed yet
                    return self._apply(change)
        except LineageMismatch as error:
            raise ApiError("index_changed", str(error), 409) from error
        except IdTaken as error:
            raise ApiError("id_taken", str(error), 409) from error
        except HashnetError as error:
            raise ApiError.of(error) from error
        raise ApiError(
            "unavailable", "another process keeps writing the index; nothing was changed, try again", 503
        )

    def _apply(self, change: AddItems | RemoveItems) -> Written:
        self.index.refresh()
        check_model(self.index.lineage, self.model_sha256, self.uri)  # it may have been rebuilt with another
        if isinstance(change, AddItems):
            self.index.add(change.codes, change.ids, self._multi_hot(change))
        else:
            self.index.remove(change.ids)
        return Written(self.index.version, len(self.index))

    def _multi_hot(self, change: AddItems) -> np.ndarray | None:
        """uint8 (n, n_classes) of the items' labels."""
        if change.labels is None:
            return None
        n_classes = self.index.n_classes
        if n_classes is None:
            raise ApiError("no_labels", "this index was built without labels; add the items without them")
        multi_hot = np.zeros((len(change.ids), n_classes), dtype=np.uint8)
        for row, labels in enumerate(change.labels):
            if any(label >= n_classes for label in labels):
                raise ApiError(
                    "unknown_label",
                    f"item {int(change.ids[row])} has class {max(labels)}; there are {n_classes}",
                )
            multi_hot[row, labels] = 1
        return multi_hot
