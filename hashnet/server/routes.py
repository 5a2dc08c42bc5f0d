"""The endpoints of the API."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Path, Query, Request, Response
from pydantic_core import to_json

import hashnet
from hashnet.client import Queries, wire
from hashnet.server import parsing
from hashnet.server import schemas as s
from hashnet.server.backend import Backend
from hashnet.server.messages import RemoveItems, SearchResponse
from hashnet.server.middleware import Telemetry
from hashnet.server.openapi import ERRORS, request_body, route_options
from hashnet.server.settings import Limits

ItemId = Annotated[int, Path(ge=0, le=2**63 - 1, description="id of an indexed item")]
WRITE_ERRORS = [*ERRORS, 403, 409, 504]


class Routes:
    """The endpoints over one backend."""

    def __init__(self, backend: Backend, limits: Limits, writable: bool, telemetry: Telemetry) -> None:
        self.backend, self.limits, self.writable, self.telemetry = backend, limits, writable, telemetry

    def add_to(self, app: FastAPI) -> None:
        """Adds every endpoint with its part of the OpenAPI description."""
        limits, served = self.limits, self.backend.served
        search_body = request_body(s.SearchBody, limits, served, pictures=True)
        encode_body = request_body(s.EncodeBody, limits, served, pictures=True)
        add_body, remove_body = (request_body(body, limits, served) for body in (s.AddBody, s.RemoveBody))
        arrow = {200: {"content": {wire.ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
        picture: dict[int, Any] = {200: {"content": {kind: {} for kind in ("image/jpeg", "image/png")}}}
        text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        not_json = {"response_class": Response}

        def add(method: str, path: str, endpoint: Any, options: dict[str, Any]) -> None:
            app.add_api_route(path, endpoint, methods=[method], **options)

        add("GET", "/healthz", self.healthz, route_options(s.StateOut, []))
        add("GET", "/readyz", self.readyz, route_options(s.StateOut, [503]))
        add("GET", "/v1/info", self.info, route_options(s.InfoOut, []))
        add("POST", "/v1/search", self.search, route_options(s.SearchOut, ERRORS, search_body, arrow))
        add("POST", "/v1/encode", self.encode, route_options(s.EncodeOut, ERRORS, encode_body, arrow))
        add("GET", "/v1/items", self.sample, route_options(s.ItemsOut, [422]))
        add("POST", "/v1/items", self.add, route_options(s.WrittenOut, WRITE_ERRORS, add_body))
        add("POST", "/v1/items/remove", self.remove, route_options(s.WrittenOut, WRITE_ERRORS, remove_body))
        add("GET", "/v1/items/{id}", self.item, route_options(s.ItemOut, [404, 422]))
        thumbnail = route_options(None, [304, 404, 422], further=picture) | not_json
        add("GET", "/v1/items/{id}/thumbnail", self.thumbnail, thumbnail)
        add("GET", "/metrics", self.metrics, route_options(None, [], further=text) | not_json)

    async def healthz(self) -> Response:
        """The process responds."""
        return _json(s.StateOut(status="ok"))

    async def readyz(self) -> Response:
        """Index (and model, where there is one) are loaded and respond."""
        await self.backend.ready()
        return _json(s.StateOut(status="ready"))

    async def info(self) -> Response:
        """What is served: code length, size, kind, version, lineage, classes and limits."""
        served = self.backend.served
        limits = asdict(self.limits) | {"max_radius": min(self.limits.max_radius, served.n_bits)}
        del limits["max_inflight"]
        return _json(
            s.InfoOut(
                **vars(await self.backend.index_info()),
                modality=served.modality,
                accepts=served.accepts,
                n_features=served.n_features,
                class_names=served.class_names,
                pictures=served.pictures,
                writable=self.writable,
                limits=limits,
                hashnet=hashnet.__version__,
            )
        )

    async def search(self, request: Request, params: Annotated[s.SearchParams, Query()]) -> Response:
        """The nearest items of each query. Options go into the query string or, with JSON, into the body."""
        started = time.perf_counter()
        parsed = await parsing.read_search(request, params, self.limits, self.backend.served)
        _record(request, parsed.queries)
        response = await self.backend.search(parsed)
        request.scope["hashnet"].version = response.version
        if parsing.accepts_arrow(request):
            return Response(wire.write_hits(response.hits, response.version), media_type=wire.ARROW)
        results = await self._results(response, parsed.with_items)
        took_ms = round((time.perf_counter() - started) * 1000, 2)
        return _json({"version": response.version, "took_ms": took_ms, "results": results})

    async def encode(self, request: Request) -> Response:
        """The packed codes of pictures or features."""
        queries = await parsing.read_encode(request, self.limits, self.backend.served)
        _record(request, queries)
        codes = await self.backend.encode(queries)
        if parsing.accepts_arrow(request):
            return Response(wire.write_codes(codes), media_type=wire.ARROW)
        return _json(s.EncodeOut(n_bits=codes.shape[1] * 8, codes=[row.tobytes().hex() for row in codes]))

    async def sample(
        self, n: Annotated[int, Query(ge=1, le=100)] = 24, seed: Annotated[int, Query(ge=0, le=2**32 - 1)] = 0
    ) -> Response:
        """Some indexed items to start from."""
        version, items = await self.backend.sample(n, seed)
        return _json(s.ItemsOut(version=version, items=items))

    async def item(self, id: ItemId) -> Response:
        """One indexed item: uri, labels, code."""
        (item,) = await self.backend.items(np.array([id], dtype=np.int64))
        return _json(item)

    async def thumbnail(self, id: ItemId, request: Request) -> Response:
        """A small picture of an indexed item."""
        picture = await self.backend.thumbnail(id)
        headers = {"etag": picture.etag, "cache-control": "private, max-age=3600"}
        if picture.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    async def add(self, request: Request) -> Response:
        """Adds items under new ids; searches see them from the returned version on. Needs the write token."""
        queries, ids, labels = await parsing.read_add(request, self.limits, self.backend.served)
        _record(request, queries)
        written = await self.backend.add(queries, ids, labels)
        return _json(s.WrittenOut(version=written.version, size=written.size))

    async def remove(self, request: Request) -> Response:
        """Removes items by id. Needs the write token."""
        ids = await parsing.read_remove(request, self.limits)
        _record(request, Queries("ids", ids))
        written = await self.backend.write(RemoveItems(ids))
        return _json(s.WrittenOut(version=written.version, size=written.size))

    async def metrics(self) -> Response:
        """Counters of the process that responds, in the Prometheus text format."""
        text = self.telemetry.text(await self.backend.index_info())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _results(self, response: SearchResponse, with_items: bool) -> list[dict[str, Any]]:
        """One HitsOut per query, as plain dicts: 200,000 hits in models take 1.5 times as long to write."""
        rows = response.hits if isinstance(response.hits, list) else response.hits.per_query()
        assert response.query_codes is not None  # every JSON request asks for them
        results = [
            {
                "code": code.tobytes().hex(),
                "ids": hits.ids.tolist(),
                "distances": hits.distances.tolist(),
            }
            for code, hits in zip(response.query_codes, rows, strict=True)
        ]
        if with_items:
            ids = np.concatenate([hits.ids for hits in rows])
            codes = np.zeros((0, 0), np.uint8) if response.hit_codes is None else response.hit_codes
            items = iter(await self.backend.describe(ids, codes))
            for result, hits in zip(results, rows, strict=True):
                result["items"] = list(islice(items, len(hits)))
        return results


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type=parsing.JSON)


def _record(request: Request, queries: Queries) -> None:
    """Notes for the request log and the metrics how many queries of which kind there are."""
    record = request.scope["hashnet"]
    record.queries, record.kind = len(queries), queries.kind
