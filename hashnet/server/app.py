"""The HTTP application over a Backend: the endpoints and the search page, as one ASGI application."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.resources import files
from itertools import islice
from typing import Any

import numpy as np
import orjson

import hashnet
from hashnet.client import wire
from hashnet.server import parsing
from hashnet.server import schemas as s
from hashnet.server.backend import Backend
from hashnet.server.live_index import SearchRequest, SearchResponse
from hashnet.server.middleware import Handler, RequestMiddleware, RequestRecord, Router, Telemetry
from hashnet.server.schemas import Response
from hashnet.server.settings import Access, Limits
from hashnet.server.writer import RemoveItems

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
            return Response(wire.write_hits(response.hits, response.version), media_type=wire.ARROW)
        results = await self._results(response, parsed)
        took_ms = round((time.perf_counter() - started) * 1000, 2)
        return _json({"version": response.version, "took_ms": took_ms, "results": results})

    async def encode(self, record: RequestRecord) -> Response:
        """The packed codes of pictures or features."""
        queries = parsing.read_encode(record, self.limits, self.backend.served)
        record.queries, record.kind = len(queries), queries.kind
        params = s.parse_query(s.EncodeParams, record.query_string)
        encoded = await self.backend.encode(queries, bool(params.vectors))
        codes, vectors = encoded.values, encoded.vectors
        if parsing.accepts_arrow(record):
            return Response(wire.write_codes(codes, vectors), media_type=wire.ARROW)
        response = {"n_bits": codes.shape[1] * 8, "codes": [row.tobytes().hex() for row in codes]}
        further = {} if vectors is None else {"vectors": np.ascontiguousarray(vectors)}
        return _json(response | further)

    async def sample(self, record: RequestRecord) -> Response:
        """Some indexed items to start from."""
        params = s.parse_query(s.SampleParams, record.query_string)
        version, items = await self.backend.sample(params.n, params.seed)
        return _json({"version": version, "items": _items(items, params.text_ids)})

    async def item(self, record: RequestRecord) -> Response:
        """One indexed item: uri, labels, code."""
        params = s.parse_query(s.ItemParams, record.query_string)
        items = await self.backend.items(np.array([_id(record)], dtype=np.int64), params.min_version)
        return _json(_items(items, params.text_ids)[0])

    async def thumbnail(self, record: RequestRecord) -> Response:
        """A small picture of an indexed item."""
        picture = await self.backend.thumbnail(_id(record))
        headers = {"etag": picture.etag, "cache-control": "private, max-age=3600"}
        if picture.etag in record.header(b"if-none-match"):
            return Response(status=304, headers=headers)
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    async def add(self, record: RequestRecord) -> Response:
        """Adds items under new ids; searches see them from the returned version on. Needs the write token."""
        queries, change = parsing.read_add(record, self.limits, self.backend.served)
        record.queries, record.kind = len(queries), queries.kind
        return _json(asdict(await self.backend.add(queries, change)))

    async def remove(self, record: RequestRecord) -> Response:
        """Removes items by id. Needs the write token."""
        ids = parsing.read_remove(record, self.limits)
        record.queries, record.kind = len(ids), "ids"
        return _json(asdict(await self.backend.write(RemoveItems(ids))))

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
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

        async def respond(record: RequestRecord) -> Response:
            headers = {"etag": tag, "cache-control": "no-cache"}
            if tag in record.header(b"if-none-match"):
                return Response(status=304, headers=headers)
            return Response(content, media_type=MEDIA_TYPES[name], headers=headers)

        return respond

    paths = {name: "/" if name == "index.html" else f"/static/{name}" for name in MEDIA_TYPES}
    return [("GET", path, handler(name)) for name, path in paths.items()]


def _id(record: RequestRecord) -> int:
    """The id in the path of an item."""
    return s.validate(s.ItemPath, {"id": record.path_id}).id


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def _items(items: Iterable[s.ItemOut], text_ids: bool) -> list[dict[str, Any]]:
    listed = [item.model_dump() for item in items]
    return [item | {"id": str(item["id"])} for item in listed] if text_ids else listed
