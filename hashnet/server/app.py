"""The HTTP application: routes, what they take and answer. It knows a Backend, not Ray.

``build_app`` returns an ASGI application; a test runs it in its own process on a backend of its own,
Ray Serve runs it in each HTTP replica on handles to the others.
"""

from __future__ import annotations

import dataclasses
import time
from itertools import islice
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException

import hashnet
from hashnet.client import wire
from hashnet.errors import RequestRejected
from hashnet.results import SearchResult
from hashnet.server import requests
from hashnet.server import schemas as s
from hashnet.server import search_page as page
from hashnet.server.backend import Backend, Call, Found
from hashnet.server.middleware import Guard, error_body, error_headers
from hashnet.server.openapi import ERRORS, answers, body_of, describe
from hashnet.server.settings import Limits, Tokens
from hashnet.server.telemetry import Meter

MAX_ITEMS = 2000  # hits of one answer that can come with uri, labels and code
MAX_JSON_HITS = 200_000  # more are for Arrow: JSON of them would keep a process busy for seconds
ClassId = Annotated[int, Field(ge=0, le=2**31 - 1)]
ItemId = Annotated[int, Path(ge=0, le=2**63 - 1, description="id of an indexed item")]


def build_app(backend: Backend, limits: Limits, tokens: Tokens, local_only: bool, meter: Meter) -> Guard:
    """The guarded application."""
    app = FastAPI(
        title="hashnet",
        version=hashnet.__version__,
        description=describe(),
        docs_url=None,  # Swagger's page loads scripts from elsewhere; the description is at /openapi.json
        redoc_url=None,
    )
    routes = Routes(backend, limits, tokens, meter)
    for path, method, endpoint, options in routes.table():
        app.add_api_route(path, endpoint, methods=[method], **options)
    page.mount(app)
    app.add_exception_handler(RequestRejected, _say)
    app.add_exception_handler(RequestValidationError, _say_validation)
    app.add_exception_handler(HTTPException, _say_http)
    app.add_exception_handler(Exception, _say_failed)
    return Guard(app, limits, tokens, local_only, meter)


class Routes:
    """The endpoints."""

    def __init__(self, backend: Backend, limits: Limits, tokens: Tokens, meter: Meter) -> None:
        self.backend, self.limits, self.tokens, self.meter = backend, limits, tokens, meter

    def table(self) -> list[tuple[str, str, Any, dict[str, Any]]]:
        """(path, method, endpoint, what the description says of it)."""
        this = self.limits, self.backend.fixed
        search_body = body_of(s.SearchBody, *this, pictures=True)
        encode_body = body_of(s.EncodeBody, *this, pictures=True)
        arrow_too = {200: {"content": {wire.ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
        thumbnail: dict[int, Any] = {200: {"content": {kind: {} for kind in ("image/jpeg", "image/png")}}}
        text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        return [
            ("/healthz", "GET", self.healthz, answers(s.StateOut, [])),
            ("/readyz", "GET", self.readyz, answers(s.StateOut, [503])),
            ("/v1/info", "GET", self.info, answers(s.InfoOut, [])),
            ("/v1/search", "POST", self.search, answers(s.SearchOut, ERRORS, search_body, arrow_too)),
            ("/v1/encode", "POST", self.encode, answers(s.EncodeOut, ERRORS, encode_body, arrow_too)),
            ("/v1/items", "GET", self.sample, answers(s.ItemsOut, [422])),
            (
                "/v1/items",
                "POST",
                self.add,
                answers(s.WrittenOut, [*ERRORS, 403, 409, 504], body_of(s.AddBody, *this)),
            ),
            (
                "/v1/items/remove",
                "POST",
                self.remove,
                answers(s.WrittenOut, [*ERRORS, 403, 409, 504], body_of(s.RemoveBody, *this)),
            ),
            ("/v1/items/{id}", "GET", self.item, answers(s.ItemOut, [404, 422])),
            (
                "/v1/items/{id}/thumbnail",
                "GET",
                self.thumbnail,
                answers(None, [304, 404, 422], more=thumbnail) | {"response_class": Response},
            ),
            ("/metrics", "GET", self.metrics, answers(None, [], more=text) | {"response_class": Response}),
        ]

    async def healthz(self) -> Response:
        """The process answers."""
        return requests.json_response({"status": "ok"})

    async def readyz(self) -> Response:
        """Index (and model, where there is one) are loaded and answer."""
        await self.backend.ready()
        return requests.json_response({"status": "ready"})

    async def info(self) -> Response:
        """What is served: code length, size, kind, version, lineage, classes and limits."""
        about = await self.backend.info()
        limits = {name: value for name, value in vars(self.limits).items() if name != "max_inflight"}
        limits["max_radius"] = min(self.limits.max_radius, about["n_bits"])
        more = {"limits": limits, "writable": bool(self.tokens.write), "hashnet": hashnet.__version__}
        return requests.json_response(about | more)

    async def search(
        self,
        request: Request,
        k: Annotated[int | None, Query(ge=1)] = None,
        radius: Annotated[int | None, Query(ge=0)] = None,
        labels: Annotated[list[str] | None, Query(description="class names, or ids that are no name")] = None,
        label_ids: Annotated[list[ClassId] | None, Query(description="class ids alone")] = None,
        exclude_self: bool | None = None,
        items: bool | None = None,
        min_version: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    ) -> Response:
        """The nearest items of each query. Options go into the query string or, with JSON, into the body."""
        started = time.perf_counter()
        given = {
            "k": k,
            "radius": radius,
            "labels": [*(labels or ()), *(label_ids or ())] or None,
            "exclude_self": exclude_self,
            "items": items,
            "min_version": min_version,
        }
        given = {name: value for name, value in given.items() if value is not None}
        queries, options = await requests.search_request(request, given, self.limits)
        about = self.backend.about()
        wants_arrow = wire.ARROW in request.headers.get("accept", "")
        options = requests.check_search(queries, options, about, self.limits)
        request.scope["hashnet"] |= {"queries": len(queries), "kind": queries.kind}
        call = Call(**options, want_codes=not wants_arrow)
        if not wants_arrow:
            call = _bounded_json(call, len(queries))
        found = await self.backend.search(queries, call)
        request.scope["hashnet"]["version"] = found.version
        if wants_arrow:
            return Response(wire.write_hits(found.hits, found.version), media_type=wire.ARROW)
        results = await self._results(found, call.want_items)
        took_ms = round((time.perf_counter() - started) * 1000, 2)
        return requests.json_response({"version": found.version, "took_ms": took_ms, "results": results})

    async def encode(self, request: Request) -> Response:
        """The packed codes of pictures or features."""
        queries = await requests.encode_request(request, self.limits)
        requests.check_queries(queries, self.backend.about(), self.limits)
        request.scope["hashnet"] |= {"queries": len(queries), "kind": queries.kind}
        codes = await self.backend.encode(queries)
        if wire.ARROW in request.headers.get("accept", ""):
            return Response(wire.write_codes(codes), media_type=wire.ARROW)
        return requests.json_response(
            {"n_bits": codes.shape[1] * 8, "codes": [row.tobytes().hex() for row in codes]}
        )

    async def sample(
        self, n: Annotated[int, Query(ge=1, le=100)] = 24, seed: Annotated[int, Query(ge=0, le=2**32 - 1)] = 0
    ) -> Response:
        """Some indexed items, to begin with."""
        version, items = await self.backend.sample(n, seed)
        return requests.json_response({"version": version, "items": items})

    async def item(self, id: ItemId) -> Response:
        """One indexed item: uri, labels, code."""
        _, items = await self.backend.items(np.array([id], dtype=np.int64))
        return requests.json_response(items[0])

    async def thumbnail(self, id: ItemId, request: Request) -> Response:
        """A small picture of an indexed item."""
        picture, kind, tag = await self.backend.thumbnail(id)
        headers = {"etag": f'"{tag}"', "cache-control": "private, max-age=3600"}
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(picture, media_type=kind, headers=headers)

    async def add(self, request: Request) -> Response:
        """Adds items under new ids. Needs the write token; every answer from the new version on has them."""
        queries, ids, labels = await requests.add_request(request, self.limits)
        requests.check_queries(queries, self.backend.about(), self.limits)
        request.scope["hashnet"] |= {"queries": len(queries), "kind": queries.kind}
        version, size = await self.backend.add(queries, ids, labels)
        return requests.json_response({"version": version, "size": size})

    async def remove(self, request: Request) -> Response:
        """Removes items by id. Needs the write token."""
        ids = await requests.remove_request(request, self.limits)
        request.scope["hashnet"] |= {"queries": len(ids), "kind": "ids"}
        version, size = await self.backend.remove(ids)
        return requests.json_response({"version": version, "size": size})

    async def metrics(self) -> Response:
        """Counters in the Prometheus text format, of all HTTP processes together."""
        return Response(await self.backend.metrics(self.meter), media_type="text/plain; version=0.0.4")

    async def _results(self, found: Found, want_items: bool) -> list[dict[str, Any]]:
        hits = found.hits
        rows = hits if isinstance(hits, list) else _rows(hits)
        assert found.codes is not None  # JSON answers always ask for them
        results = [
            {
                "code": found.codes[i].tobytes().hex(),
                "ids": hit.ids.tolist(),
                "distances": hit.distances.tolist(),
            }
            for i, hit in enumerate(rows)
        ]
        if want_items:
            ids = np.concatenate([hit.ids for hit in rows])
            codes = np.zeros((0, 0), np.uint8) if found.hit_codes is None else found.hit_codes
            items = iter(await self.backend.describe(ids, codes))
            for result, hit in zip(results, rows, strict=True):
                result["items"] = list(islice(items, len(hit)))
        return results


def _bounded_json(call: Call, n_queries: int) -> Call:
    """The call with the bounds of a JSON answer."""
    most = MAX_ITEMS if call.want_items else MAX_JSON_HITS
    asked = (call.k or 0) * n_queries
    if call.want_items and asked > MAX_ITEMS:
        raise wire.bad("too_many_items", f"items=true answers at most {MAX_ITEMS} hits, asked {asked}", 422)
    if asked > MAX_JSON_HITS:
        raise wire.bad(
            "too_many_hits", f"JSON answers at most {MAX_JSON_HITS:,} hits, asked {asked:,}; use Arrow", 413
        )
    return dataclasses.replace(call, max_hits=min(call.max_hits, most))  # for a radius: the index keeps it


def _rows(hits: SearchResult) -> list[SearchResult]:
    """A (q, k) result as one result a query, without unused slots."""
    used = hits.distances >= 0
    return [SearchResult(hits.ids[i][used[i]], hits.distances[i][used[i]]) for i in range(len(hits.ids))]


def _say(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    about = request.scope.get("hashnet", {"request_id": ""})
    about["code"] = error.code
    body = error_body(error, about["request_id"])
    return requests.json_response(body, error.status or 400, error_headers(error))


def _say_failed(request: Request, error: Exception) -> Response:
    """What a client is told of a mistake of ours; the guard writes the stack trace into the log."""
    about = request.scope.get("hashnet", {"request_id": ""})
    sentence = f"the server failed; its log has the details of request {about['request_id']}"
    return _say(request, wire.bad("internal", sentence, 500))


def _say_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    code = f"{name}_out_of_range" if name in ("k", "radius") else "invalid_request"
    return _say(request, wire.bad(code, f"{name}: {first['msg']}", 422))


def _say_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    response = _say(request, wire.bad(code, str(error.detail), error.status_code))
    response.headers.update(error.headers or {})
    return response
