"""The HTTP application: the endpoints and the search page, over a Backend.

A Backend is a served run as the endpoints see it: it holds the items and reaches index, model and writer. The
index is in this process (``IndexService``) or in slices on others. The model and, on a cluster, the writer
are elsewhere, because torch and faiss never share a process and an index has one writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import islice
from typing import Any, Protocol

import numpy as np
import orjson

import hashnet
from hashnet.client import Queries, wire
from hashnet.codes import pack_signs
from hashnet.errors import BadImage, HashnetError
from hashnet.server import parsing
from hashnet.server import schemas as s
from hashnet.server.encoder import EncodeRequest
from hashnet.server.http_server import Handler, RequestMiddleware, RequestRecord, Router, Telemetry
from hashnet.server.live_index import IndexedItems, IndexInfo, SearchRequest, SearchResponse
from hashnet.server.schemas import ApiError, ItemOut, Response
from hashnet.server.settings import Access, Limits, ServedRun
from hashnet.server.writer import AddItems, Change, Written
from hashnet.store import StoredItem

log = logging.getLogger(__name__)

REOPEN_S = 5.0  # between two checks whether the code store has grown
MAX_DECODING = 4  # thumbnails decoded at the same time: a large picture is 150 MB of pixels
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def build_app(backend: Backend, limits: Limits, access: Access, telemetry: Telemetry) -> RequestMiddleware:
    """The application."""
    endpoints = Endpoints(backend, limits, bool(access.write), telemetry)
    return RequestMiddleware(Router([*endpoints.routes(), *_page()]), limits, access, telemetry)


class Endpoints:
    """The endpoints over one backend."""

    def __init__(self, backend: Backend, limits: Limits, writable: bool, telemetry: Telemetry) -> None:
        self.backend, self.limits, self.writable, self.telemetry = backend, limits, writable, telemetry
        self._description = b""

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler) of every endpoint."""
        return [
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
            ("GET", "/openapi.json", self.description),
            ("GET", "/v1/info", self.info),
            ("POST", "/v1/search", self.search),
            ("POST", "/v1/encode", self.encode),
            ("GET", "/v1/items", self.sample),
            ("POST", "/v1/items", self.add),
            ("POST", "/v1/items/remove", self.remove),
            ("GET", "/v1/items/{id}", self.item),
            ("GET", "/v1/items/{id}/thumbnail", self.thumbnail),
            ("GET", "/metrics", self.metrics),
        ]

    async def description(self, record: RequestRecord) -> Response:
        """The OpenAPI description of this server."""
        if not self._description:
            from hashnet.server import openapi  # only now: it takes longer than most servers need it

            routes = [route for route in self.routes() if route[1] != record.path]
            self._description = orjson.dumps(openapi.describe(routes, self.limits, self.backend.served))
        return Response(self._description)

    async def healthz(self, record: RequestRecord) -> Response:
        """The process responds."""
        return _json({"status": "ok"})

    async def readyz(self, record: RequestRecord) -> Response:
        """Index (and model, where there is one) are loaded and respond."""
        await self.backend.ready()
        return _json({"status": "ready"})

    async def info(self, record: RequestRecord) -> Response:
        """What is served: code length, size, kind, version, lineage, classes and limits."""
        params, served = s.parse_query(s.InfoParams, record.query_string), self.backend.served
        limits = asdict(self.limits) | {"max_radius": min(self.limits.max_radius, served.n_bits)}
        del limits["max_inflight"]
        described = s.InfoOut(
            **vars(await self.backend.index.info(params.min_version)),
            modality=served.modality,
            accepts=served.accepts,
            n_features=served.n_features,
            class_names=served.class_names,
            pictures=served.pictures,
            writable=self.writable,
            limits=limits,
            hashnet=hashnet.__version__,
        )
        return _json(described.model_dump())

    async def search(self, record: RequestRecord) -> Response:
        """The nearest items of each query. Options go into the query string or, with JSON, into the body."""
        started = time.perf_counter()
        given = s.parse_query(s.SearchParams, record.query_string).given() if record.query_string else {}
        parsed = parsing.read_search(record, given, self.limits, self.backend.served)
        record.queries, record.kind = len(parsed.queries), parsed.queries.kind
        response = await self.backend.search(parsed)
        record.version = response.version
        if parsing.accepts_arrow(record):
            body = wire.write_hits(response.hits, response.version, response.columns)
            return Response(body, media_type=wire.ARROW)
        results = await self._results(response, parsed)
        took_ms = round((time.perf_counter() - started) * 1000, 2)
        return _json({"version": response.version, "took_ms": took_ms, "results": results})

    async def encode(self, record: RequestRecord) -> Response:
        """The packed codes of pictures or features."""
        queries = parsing.read_encode(record, self.limits, self.backend.served)
        record.queries, record.kind = len(queries), queries.kind
        params = s.parse_query(s.EncodeParams, record.query_string)
        encoded = await self.backend.encode(queries, bool(params.vectors))
        if parsing.accepts_arrow(record):
            return Response(wire.write_queries(encoded), media_type=wire.ARROW)
        codes, vectors = encoded.values, encoded.vectors
        response = {"n_bits": codes.shape[1] * 8, "codes": [row.tobytes().hex() for row in codes]}
        further = {} if vectors is None else {"vectors": np.ascontiguousarray(vectors)}
        return _json(response | further)

    async def sample(self, record: RequestRecord) -> Response:
        """Some indexed items to start from, or those with the given keys."""
        params = s.parse_query(s.SampleParams, record.query_string)
        if params.key is None:
            version, items = await self.backend.sample(params.n, params.seed)
        else:
            ids = await self.backend.find_keys(params.key, params.min_version)
            version, items = await self.backend.items(ids, params.min_version)
        return _json({"version": version, "items": _items(items, params.text_ids)})

    async def item(self, record: RequestRecord) -> Response:
        """One indexed item: uri, labels, code."""
        params = s.parse_query(s.ItemParams, record.query_string)
        _, items = await self.backend.items(np.array([_id(record)], dtype=np.int64), params.min_version)
        return _json(_items(items, params.text_ids)[0])

    async def thumbnail(self, record: RequestRecord) -> Response:
        """A small picture of an indexed item."""
        content, media_type = await self.backend.thumbnail(_id(record))
        return _cached(record, content, _tag(content), media_type, "private, max-age=3600")

    async def add(self, record: RequestRecord) -> Response:
        """Adds items under new ids; searches see them from the returned version on. Needs the write token."""
        queries, change = parsing.read_add(record, self.limits, self.backend.served)
        record.queries, record.kind = len(queries), queries.kind
        return _json(asdict(await self.backend.add(queries, change)))

    async def remove(self, record: RequestRecord) -> Response:
        """Removes items by id or key. Needs the write token."""
        change = parsing.read_remove(record, self.limits)
        record.queries, record.kind = len(change), "keys" if change.ids is None else "ids"
        return _json(asdict(await self.backend.write(change)))

    async def metrics(self, record: RequestRecord) -> Response:
        """Counters in the Prometheus text format."""
        text = self.telemetry.text(await self.backend.index.info())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _results(self, response: SearchResponse, request: SearchRequest) -> list[dict[str, Any]]:
        """One HitsOut per query, as plain dicts: models take half as long again to write."""
        rows = response.hits if isinstance(response.hits, list) else response.hits.per_query()
        results: list[dict[str, Any]] = [
            {
                "code": code.tobytes().hex(),
                "ids": [str(id_) for id_ in hits.ids.tolist()] if request.text_ids else hits.ids,
                "distances": hits.distances,
            }
            for code, hits in zip(response.query_codes, rows, strict=True)
        ]
        if request.options.asymmetric or request.options.rescore:
            for result, hits in zip(results, rows, strict=True):
                result["scores"] = hits.scores
        if response.columns is not None:
            columns = iter(response.columns.to_pylist())
            for result, hits in zip(results, rows, strict=True):
                result["columns"] = list(islice(columns, len(hits)))
        if request.with_items:
            ids = np.concatenate([hits.ids for hits in rows])
            codes = np.zeros((0, 0), np.uint8) if response.hit_codes is None else response.hit_codes
            items = iter(_items(await self.backend.hits(ids, codes), request.text_ids))
            for result, hits in zip(results, rows, strict=True):
                result["items"] = list(islice(items, len(hits)))
        return results


def _page() -> list[tuple[str, str, Handler]]:
    """The search page, ``/``, and its parts, ``/static/NAME``."""
    folder = files("hashnet.server") / "page"

    def handler(name: str) -> Handler:
        content = (folder / name).read_bytes()
        tag = _tag(content)

        async def respond(record: RequestRecord) -> Response:
            return _cached(record, content, tag, MEDIA_TYPES[name], "no-cache")

        return respond

    paths = {name: "/" if name == "index.html" else f"/static/{name}" for name in MEDIA_TYPES}
    return [("GET", path, handler(name)) for name, path in paths.items()]


def _tag(content: bytes) -> str:
    """The entity tag of a content."""
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _cached(record: RequestRecord, content: bytes, tag: str, media_type: str, cache_control: str) -> Response:
    """The content, or 304 where the client has it."""
    headers = {"etag": tag, "cache-control": cache_control}
    if tag in record.header(b"if-none-match"):
        return Response(status=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


def _id(record: RequestRecord) -> int:
    """The id in the path of an item."""
    return s.validate(s.ItemPath, {"id": record.path_id}).id


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, default=_as_text, option=orjson.OPT_SERIALIZE_NUMPY))


def _as_text(value: Any) -> str:
    """A column's value of a type that JSON lacks: bytes in hex; decimals, durations and others as printed."""
    return value.hex() if isinstance(value, bytes) else str(value)


def _items(items: Iterable[s.ItemOut], text_ids: bool) -> list[dict[str, Any]]:
    listed = [item.model_dump() for item in items]
    return [item | {"id": str(item["id"])} for item in listed] if text_ids else listed


# ---------------------------------------------------------------- the served run


class Index(Protocol):
    """The index, here or in slices on other processes. ``min_version``: that version or a newer one."""

    async def search(self, request: SearchRequest) -> SearchResponse: ...

    async def lookup(
        self, ids: np.ndarray, with_labels: bool = False, min_version: int = 0
    ) -> IndexedItems: ...

    async def find_keys(self, keys: Sequence[str], min_version: int = 0) -> np.ndarray: ...

    async def info(self, min_version: int = 0) -> IndexInfo: ...

    async def check_vectors(self, model_sha256: str | None, min_version: int = 0) -> None: ...


class Model(Protocol):
    """The process that holds the model."""

    async def encode(self, request: EncodeRequest) -> np.ndarray: ...

    async def ready(self) -> None: ...


class Backend:
    """The parts of a served run behind the HTTP routes."""

    def __init__(
        self,
        served: ServedRun,
        index: Index,
        model: Model | None,
        write: Callable[[Change], Awaitable[Written]],
        timeout_s: float,
    ) -> None:
        self.served, self.index, self.model = served, index, model
        self.write, self.timeout_s = write, timeout_s
        self.stored = served.open_items()
        self._decoding = ThreadPoolExecutor(MAX_DECODING, thread_name_prefix="thumbnail")
        self._reopened = 0.0

    async def ready(self) -> None:
        """Returns once everything is loaded; ApiError (503) as long as it is not."""
        await self.index.info()
        if self.model is not None:
            await self.model.ready()

    async def logits(self, queries: Queries, vectors: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """(logits float32 (n, n_bits), if requested the vectors to rescore by) of pictures or features."""
        assert self.model is not None  # what cannot be encoded was refused by the parser
        request = EncodeRequest(queries, time.time() + self.timeout_s, vectors)
        found, n_bits = await self.model.encode(request), self.served.n_bits
        return found[:, :n_bits], found[:, n_bits:] if vectors else None

    async def encode(self, queries: Queries, vectors: bool = False) -> Queries:
        """Pictures or features as codes; with ``vectors`` where the index has any of this model."""
        if vectors:
            try:
                await self.index.check_vectors(self.served.model_sha256)
            except ApiError:
                vectors = False
        logits, found = await self.logits(queries, vectors)
        return Queries("codes", pack_signs(logits), found)

    async def search(self, request: SearchRequest) -> SearchResponse:
        """Encodes the queries where needed, then searches."""
        if request.queries.kind == "keys":
            ids = await self.find_keys(request.queries.values, request.min_version)
            request = replace(request, queries=Queries("ids", ids))
        if request.queries.kind in ("codes", "ids"):
            return await self.index.search(request)
        rescore, asymmetric = request.options.rescore, request.options.asymmetric
        if rescore:
            await self.index.check_vectors(self.served.model_sha256, request.min_version)
        logits, vectors = await self.logits(request.queries, rescore)
        queries = Queries("codes", pack_signs(logits), vectors)
        return await self.index.search(
            replace(request, queries=queries, logits=logits if asymmetric else None)
        )

    async def add(self, queries: Queries, change: AddItems) -> Written:
        """Adds items, encoding them where needed."""
        items = queries if queries.kind == "codes" else await self.encode(queries, vectors=True)
        return await self.write(replace(change, codes=items.values, vectors=items.vectors))

    async def find_keys(self, keys: Sequence[str], min_version: int = 0) -> np.ndarray:
        """The ids of the items with these keys; ApiError (unknown_key) where there is none."""
        ids = await self.index.find_keys(keys, min_version)
        if (ids < 0).any():
            unknown = keys[int((ids < 0).argmax())]
            raise ApiError("unknown_key", f"the index holds no key {unknown[:100]!r}", 404)
        return ids

    async def items(self, ids: np.ndarray, min_version: int = 0) -> tuple[int, list[ItemOut]]:
        """(version, the items with these ids); ApiError (unknown_id) where one is not indexed."""
        found = await self.index.lookup(ids, with_labels=True, min_version=min_version)
        if not found.held.all():
            raise ApiError("unknown_id", f"the index holds no item {int(ids[~found.held][0])}", 404)
        return found.version, await self._describe(ids, found)

    async def hits(self, ids: np.ndarray, codes: np.ndarray) -> list[ItemOut]:
        """Hits, described; their codes were found with them. One removed since then has no labels."""
        found = await self.index.lookup(ids, with_labels=True)
        labels, columns = (_spread(values, found.held) for values in (found.labels, found.columns))
        return await self._describe(ids, replace(found, codes=codes, labels=labels, columns=columns))

    async def sample(self, n: int, seed: int) -> tuple[int, list[ItemOut]]:
        """(version, up to ``n`` random indexed items)."""
        if self.stored is None:
            return (await self.index.info()).version, []
        ids = np.array(await asyncio.to_thread(self.stored.sample, n, seed), dtype=np.int64)
        found = await self.index.lookup(ids, with_labels=True)
        held = replace(found, codes=found.codes[found.held])
        return found.version, await self._describe(ids[found.held], held)

    async def thumbnail(self, id_: int) -> tuple[bytes, str]:
        """(a small picture of an indexed item, its media type)."""
        _, (item,) = await self.items(np.array([id_], dtype=np.int64))
        small = None
        if self.stored is not None and item.thumbnail is not None:
            try:
                loop = asyncio.get_running_loop()
                small = await loop.run_in_executor(self._decoding, self.stored.thumbnail, id_)
            except BadImage as error:
                sentence = f"the picture of item {id_} cannot be shown: {error.reason}"
                raise ApiError("no_picture", sentence, 404) from error
        if small is None:
            raise ApiError("no_picture", f"item {id_} has no picture", 404)
        return small

    async def _describe(self, ids: np.ndarray, found: IndexedItems) -> list[ItemOut]:
        """Uri, labels, code and thumbnail of indexed items.

        Labels are the index's, which may be newer than the code store's; those of an index without labels
        come from there.
        """
        records: list[StoredItem | None] = [None] * len(ids)
        if self.stored is not None and len(ids):
            records = await asyncio.to_thread(self._look_up_fresh, ids.tolist())
        unknown = [None] * len(ids)
        rows = zip(
            ids.tolist(),
            found.codes,
            records,
            found.labels or unknown,
            found.columns or unknown,
            strict=True,
        )
        return [
            self._item(id_, code.tobytes().hex(), record, labels, columns)
            for id_, code, record, labels, columns in rows
        ]

    def _look_up_fresh(self, ids: list[int]) -> list[StoredItem | None]:
        """Items of the code store; a missing one may have been encoded since the store was opened."""
        found = self._look_up(ids)
        if None in found and time.monotonic() - self._reopened > REOPEN_S:
            self._reopened = time.monotonic()
            assert self.stored is not None
            with contextlib.suppress(HashnetError):  # being written: until then, what is known is served
                if self.stored.refresh():
                    found = self._look_up(ids)
        return found

    def _look_up(self, ids: list[int]) -> list[StoredItem | None]:
        assert self.stored is not None
        try:
            return self.stored.items(ids)
        except HashnetError as error:  # a store that was rewritten, or cannot be read: hits are served anyway
            log.warning("items cannot be looked up: %s", error)
            return [None] * len(ids)

    def _item(
        self,
        id_: int,
        code: str,
        record: StoredItem | None,
        labels: list[int] | None,
        columns: dict[str, Any] | None,
    ) -> ItemOut:
        """One item; ``record`` is what the code store has under its id."""
        given_uri = (columns or {}).get("uri")
        if record is not None and (record.code != code or given_uri not in (None, record.uri)):
            record = None  # the id was given to another item
        if labels is None and record is not None:
            labels = record.labels
        return ItemOut(
            id=id_,
            uri=given_uri if record is None else record.uri,
            labels=labels,
            label_names=self._names(labels),
            code=code,
            thumbnail=f"/v1/items/{id_}/thumbnail" if record is not None and self.served.pictures else None,
            columns=columns,
        )

    def _names(self, labels: list[int] | None) -> list[str] | None:
        names = self.served.class_names
        if names is None or labels is None:
            return None
        return [names[label] if label < len(names) else f"class {label}" for label in labels]


def _spread(values: list[Any] | None, held: np.ndarray) -> list[Any] | None:
    """Values of the items that are held, with None in the places of the others."""
    if values is None:
        return None
    of_held = iter(values)
    return [next(of_held) if one else None for one in held]
