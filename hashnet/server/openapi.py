"""The OpenAPI description of a server, made of the schemas: bodies in several media types, errors, limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from hashnet import __version__
from hashnet.client import wire
from hashnet.server import schemas as s
from hashnet.server.settings import Limits, ServedRun

ERRORS = [400, 404, 408, 413, 415, 422]
WRITE_ERRORS = [*ERRORS, 403, 409, 504, 507]
_MEANING = {
    304: "not changed",
    400: "the body cannot be parsed (invalid_json, bad_arrow)",
    401: "a token is needed (unauthorized, write_token_needed)",
    403: "not allowed with this token, or writing is off (write_token_needed, writes_off)",
    404: "no such item or path (unknown_id, unknown_key, no_picture, not_found)",
    409: "an id is taken (id_taken), or index, vectors and model do not belong together (lineage_mismatch, "
    "index_changed)",
    408: "the body did not arrive in time (timeout)",
    413: "too much (too_large, too_many, too_many_hits, image_too_large)",
    415: "wrong content type (wrong_content_type)",
    421: "this server responds only to its local name (wrong_host)",
    422: "understood and refused (invalid_request, wrong_width, not_finite, k_out_of_range, not_an_image, …)",
    429: "too many requests are in flight (overloaded); try again after Retry-After seconds",
    503: "not now (unavailable, timeout, version_behind); try again after Retry-After seconds",
    504: "no response in time; whether the change was made is not known (timeout)",
    507: "the server's disk is full; nothing was changed or, in slices, the message says what (disk_full)",
}
_EVERYWHERE = (401, 421, 429, 503)
_REFERENCE = "#/components/schemas/{model}"


DESCRIPTION = (
    "Search learned binary codes by Hamming distance. Requests and responses are JSON or, for bulk, Arrow "
    f"IPC streams ({wire.ARROW}; in responses when the Accept header names it). An Arrow request has one "
    "column: code (fixed-size binary), image (binary), feature (list of float), id (int64) or key (text). An "
    "Arrow response has the columns ids and distances, one row per query with -1 in unused slots, and "
    "`version` in the schema's metadata. Errors are JSON with a stable `code` and a sentence. A server "
    "with a token expects it as Authorization: Bearer TOKEN."
)


@dataclass(frozen=True)
class Route:
    """What an endpoint takes and returns."""

    response: type[BaseModel] | dict[str, Any]  # the JSON response, or the content by media type
    errors: list[int] = field(default_factory=list)
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    also: str = ""  # a media type that bulk responses have


_PICTURE: dict[str, Any] = {"image/jpeg": {}, "image/png": {}}
_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
ROUTES = {
    ("GET", "/healthz"): Route(s.StateOut),
    ("GET", "/readyz"): Route(s.StateOut),
    ("GET", "/v1/info"): Route(s.InfoOut, [422], query=s.InfoParams),
    ("POST", "/v1/search"): Route(s.SearchOut, [*ERRORS, 409], s.SearchBody, s.SearchParams, wire.ARROW),
    ("POST", "/v1/encode"): Route(s.EncodeOut, ERRORS, s.EncodeBody, s.EncodeParams, wire.ARROW),
    ("GET", "/v1/items"): Route(s.ItemsOut, [422], query=s.SampleParams),
    ("POST", "/v1/items"): Route(s.WrittenOut, WRITE_ERRORS, s.AddBody),
    ("POST", "/v1/items/remove"): Route(s.WrittenOut, WRITE_ERRORS, s.RemoveBody),
    ("GET", "/v1/items/{id}"): Route(s.ItemOut, [404, 422], query=s.ItemParams),
    ("GET", "/v1/items/{id}/thumbnail"): Route(_PICTURE, [304, 404, 422]),
    ("GET", "/metrics"): Route(_TEXT),
}
WITH_PICTURES = ("/v1/search", "/v1/encode")  # one picture file may be the body


def describe(routes: Iterable[tuple[str, str, Any]], limits: Limits, served: ServedRun) -> dict[str, Any]:
    """The OpenAPI description of (method, path, handler); a handler's docstring describes it."""
    paths: dict[str, dict[str, Any]] = {}
    models = {route.response for route in ROUTES.values() if isinstance(route.response, type)}
    for method, path, handler in routes:
        route = ROUTES[method, path]
        operation: dict[str, Any] = {
            "summary": handler.__name__.capitalize(),
            "description": handler.__doc__,
            "operationId": f"{handler.__name__}_{method.lower()}",
        }
        parameters = _parameters(s.ItemPath, "path") if "{id}" in path else []
        parameters += _parameters(route.query, "query") if route.query is not None else []
        if parameters:
            operation["parameters"] = parameters
        if route.body is not None:
            operation["requestBody"] = _request_body(route.body, limits, served, path in WITH_PICTURES)
        operation["responses"] = _responses(route)
        paths.setdefault(path, {})[method.lower()] = operation
    listed: list[Any] = [(model, "serialization") for model in sorted({*models, s.ErrorOut}, key=str)]
    _, schemas = models_json_schema(listed, ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hashnet", "description": DESCRIPTION, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _responses(route: Route) -> dict[str, Any]:
    """The good response and the errors of a route."""
    content = route.response
    if isinstance(content, type):
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=content.__name__)}}}
    if route.also:
        content = content | {route.also: _BINARY}
    responses: dict[str, Any] = {"200": {"description": "Successful Response", "content": content}}
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=s.ErrorOut.__name__)}}}
    for status in sorted({*route.errors, *_EVERYWHERE}):
        described: dict[str, Any] = {"description": _MEANING[status]}
        if status != 304:
            described["content"] = error
        if status in (429, 503):
            described["headers"] = {"Retry-After": {"schema": {"type": "string"}, "required": True}}
        responses[str(status)] = described
    return responses


def _parameters(model: type[BaseModel], place: str) -> list[dict[str, Any]]:
    """The fields of a model as parameters in the path or the query string."""
    listed = []
    for name, schema in model.model_json_schema()["properties"].items():
        if "anyOf" in schema:  # None is for "not given"
            (variant,) = (variant for variant in schema["anyOf"] if variant != {"type": "null"})
            schema = variant | {key: value for key, value in schema.items() if key == "description"}
        described = {"description": schema["description"]} if "description" in schema else {}
        of_name = {"name": name, "in": place, "required": place == "path"}
        listed.append({**of_name, "schema": schema, **described})
    return listed


def _request_body(
    model: type[BaseModel], limits: Limits, served: ServedRun, pictures: bool
) -> dict[str, Any]:
    """The request body: JSON by its schema, an Arrow stream or, with ``pictures``, one picture file."""
    content: dict[str, Any] = {
        "application/json": {"schema": _inline(model, limits, served)},
        wire.ARROW: _BINARY,
    }
    if pictures and served.modality == "image":
        content |= dict.fromkeys(("image/jpeg", "image/png", "image/webp"), _BINARY)
    return {"required": True, "content": content}


def _inline(model: type[BaseModel], limits: Limits, served: ServedRun) -> dict[str, Any]:
    """The model's schema with the limits, widths and kinds of queries of this server, and without nulls."""
    schema = model.model_json_schema()
    assert "$defs" not in schema, "request bodies are flat; nested models would need components"
    fields = schema["properties"]
    for name, modality in (("images", "image"), ("features", "features")):
        if served.modality != modality and name in fields:
            del fields[name]
            schema["oneOf"] = [choice for choice in schema["oneOf"] if choice["required"] != [name]]
    for name, described in fields.items():
        for variant in described.pop("anyOf", []):
            if variant != {"type": "null"}:
                described |= variant
        if described.get("default", 0) is None:
            del described["default"]
        whole = model in (s.AddBody, s.RemoveBody) and name not in (
            "images",
            "features",
        )  # any number at once
        if described.get("type") == "array" and name != "labels" and not whole:
            described["maxItems"] = limits.max_batch
        if name in ("k", "radius"):
            described["maximum"] = limits.max_k if name == "k" else min(limits.max_radius, served.n_bits)
        if name == "codes":
            described["items"]["pattern"] = f"^[0-9a-fA-F]{{{served.n_bits // 4}}}$"
        if name == "features":
            described["items"] |= {"minItems": served.n_features, "maxItems": served.n_features}
    return schema
