"""The HTTP application over a Backend: the endpoints, errors and the search page, as one ASGI application."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.resources import files
from itertools import islice
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import hashnet
from hashnet.client import wire
from hashnet.errors import HashnetError
from hashnet.server import openapi, parsing
from hashnet.server import schemas as s
from hashnet.server.backend import Backend
from hashnet.server.live_index import SearchRequest, SearchResponse
from hashnet.server.middleware import Access, Handler, RequestMiddleware, RequestRecord, Telemetry
from hashnet.server.schemas import ApiError, error_response, server_failure
from hashnet.server.settings import Limits
from hashnet.server.writer import RemoveItems

ItemId = Annotated[int, Path(ge=0, le=2**63 - 1, description="id of an indexed item")]
MinVersion = Annotated[int, Query(ge=0, le=2**63 - 1, description="of this index version or a newer one")]
TextIds = Annotated[bool, Query(description=s.TEXT_IDS)]
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def build_app(backend: Backend, limits: Limits, access: Access, telemetry: Telemetry) -> RequestMiddleware:
    """The application with its middleware."""
    app = FastAPI(
        title="hashnet",
        version=hashnet.__version__,
        description=openapi.DESCRIPTION,
        docs_url=None,  # Swagger's page loads scripts from elsewhere; the description is at /openapi.json
        redoc_url=None,
    )
    routes = Routes(backend, limits, bool(access.write), telemetry)
    routes.add_to(app)
    _add_page(app)
    app.add_exception_handler(HashnetError, _error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return RequestMiddleware(app, limits, access, telemetry, routes.direct())


class Routes:
    """The endpoints over one backend."""

    def __init__(self, backend: Backend, limits: Limits, writable: bool, telemetry: Telemetry) -> None:
        self.backend, self.limits, self.writable, self.telemetry = backend, limits, writable, telemetry

    def add_to(self, app: FastAPI) -> None:
        """Adds every endpoint with its part of the OpenAPI description."""
        limits, served = self.limits, self.backend.served
        options, errors, write_errors = openapi.route_options, openapi.ERRORS, openapi.WRITE_ERRORS
        search_body = openapi.request_body(s.SearchBody, limits, served, pictures=True)
        encode_body = openapi.request_body(s.EncodeBody, limits, served, pictures=True)
        add_body, remove_body = (
            openapi.request_body(body, limits, served) for body in (s.AddBody, s.RemoveBody)
        )
        arrow = {200: {"content": {wire.ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
        picture: dict[int, Any] = {200: {"content": {kind: {} for kind in ("image/jpeg", "image/png")}}}
        text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        not_json = {"response_class": Response}
        search = options(s.SearchOut, errors, search_body, arrow)
        search["openapi_extra"]["parameters"] = openapi.query_parameters(s.SearchParams)

        direct = self.direct()

        def add(method: str, path: str, endpoint: Any, described: dict[str, Any]) -> None:
            if (method, path) in direct:
                endpoint = _described(endpoint)
            app.add_api_route(path, endpoint, methods=[method], **described)

        add("GET", "/healthz", self.healthz, options(s.StateOut, []))
        add("GET", "/readyz", self.readyz, options(s.StateOut, [503]))
        add("GET", "/v1/info", self.info, options(s.InfoOut, [422]))
        add("POST", "/v1/search", self.search, search)
        encode = options(s.EncodeOut, errors, encode_body, arrow)
        encode["openapi_extra"]["parameters"] = openapi.query_parameters(s.EncodeParams)
        add("POST", "/v1/encode", self.encode, encode)
        add("GET", "/v1/items", self.sample, options(s.ItemsOut, [422]))
        add("POST", "/v1/items", self.add, options(s.WrittenOut, write_errors, add_body))
        add("POST", "/v1/items/remove", self.remove, options(s.WrittenOut, write_errors, remove_body))
        add("GET", "/v1/items/{id}", self.item, options(s.ItemOut, [404, 422]))
        thumbnail = options(None, [304, 404, 422], further=picture) | not_json
        add("GET", "/v1/items/{id}/thumbnail", self.thumbnail, thumbnail)
        add("GET", "/metrics", self.metrics, options(None, [], further=text) | not_json)

    def direct(self) -> dict[tuple[str, str], Handler]:
        """The endpoints that the middleware calls itself."""
        return {
            ("POST", "/v1/search"): self.search,
            ("POST", "/v1/encode"): self.encode,
            ("POST", "/v1/items"): self.add,
            ("POST", "/v1/items/remove"): self.remove,
        }

    async def healthz(self) -> Response:
        """The process responds."""
        return _json({"status": "ok"})

    async def readyz(self) -> Response:
        """Index (and model, where there is one) are loaded and respond."""
        await self.backend.ready()
        return _json({"status": "ready"})

    async def info(self, min_version: MinVersion = 0) -> Response:
        """What is served: code length, size, kind, version, lineage, classes and limits."""
        served = self.backend.served
        limits = asdict(self.limits) | {"max_radius": min(self.limits.max_radius, served.n_bits)}
        del limits["max_inflight"]
        described = s.InfoOut(
            **vars(await self.backend.index.info(min_version)),
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
        params = s.parse_query(s.SearchParams, record.query_string) if record.query_string else s.NO_PARAMS
        parsed = parsing.read_search(record, params, self.limits, self.backend.served)
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

    async def sample(
        self,
        n: Annotated[int, Query(ge=1, le=100)] = 24,
        seed: Annotated[int, Query(ge=0, le=2**32 - 1)] = 0,
        text_ids: TextIds = False,
    ) -> Response:
        """Some indexed items to start from."""
        version, items = await self.backend.sample(n, seed)
        return _json({"version": version, "items": _items(items, text_ids)})

    async def item(self, id: ItemId, min_version: MinVersion = 0, text_ids: TextIds = False) -> Response:
        """One indexed item: uri, labels, code."""
        items = await self.backend.items(np.array([id], dtype=np.int64), min_version)
        return _json(_items(items, text_ids)[0])

    async def thumbnail(self, id: ItemId, request: Request) -> Response:
        """A small picture of an indexed item."""
        picture = await self.backend.thumbnail(id)
        headers = {"etag": picture.etag, "cache-control": "private, max-age=3600"}
        if picture.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
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

    async def metrics(self) -> Response:
        """Counters in the Prometheus text format."""
        text = self.telemetry.text(await self.backend.index.info())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _results(self, response: SearchResponse, request: SearchRequest) -> list[dict[str, Any]]:
        """One HitsOut per query, as plain dicts: models take half as long again to write."""
        rows = response.hits if isinstance(response.hits, list) else response.hits.per_query()
        assert response.query_codes is not None  # every JSON request asks for them
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


def _described(handler: Handler) -> Any:
    """A handler as FastAPI takes it. The middleware calls it directly: this is for the description."""

    async def endpoint(request: Request) -> Response:
        return await handler(_record(request))

    endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__  # type: ignore[attr-defined]
    return endpoint


def _add_page(app: FastAPI) -> None:
    """Adds ``/`` and ``/static/NAME``; they are not in the OpenAPI description."""
    folder = files("hashnet.server") / "page"
    content = {name: (folder / name).read_bytes() for name in MEDIA_TYPES}
    tags = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, data in content.items()}

    def add(path: str, name: str) -> None:
        async def endpoint(request: Request) -> Response:
            headers = {"etag": tags[name], "cache-control": "no-cache"}
            if tags[name] in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(content[name], media_type=MEDIA_TYPES[name], headers=headers)

        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)

    for name in MEDIA_TYPES:
        add("/" if name == "index.html" else f"/static/{name}", name)


def _record(request: Request) -> RequestRecord:
    return request.scope["hashnet"]


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type=parsing.JSON)


def _items(items: Iterable[s.ItemOut], text_ids: bool) -> list[dict[str, Any]]:
    listed = [item.model_dump() for item in items]
    return [item | {"id": str(item["id"])} for item in listed] if text_ids else listed


def _error(request: Request, error: Exception) -> Response:
    return _record(request).response_to(error)


def _unexpected_error(request: Request, error: Exception) -> Response:
    """The response alone; the middleware, which Starlette passes the error to, logs it."""
    return error_response(server_failure(_record(request).request_id), _record(request).request_id)


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _error(request, ApiError("invalid_request", f"{first['loc'][-1]}: {first['msg']}"))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    response = _error(request, ApiError(code, str(error.detail), error.status_code))
    response.headers.update(error.headers or {})
    return response
