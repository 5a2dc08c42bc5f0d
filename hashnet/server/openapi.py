"""The parts of the OpenAPI description that the schemas do not say: bodies in several media types, errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from hashnet.client import wire
from hashnet.server.schemas import ErrorOut
from hashnet.server.settings import Limits, ServedRun

ERRORS = [400, 404, 408, 413, 415, 422]
WRITE_ERRORS = [*ERRORS, 403, 409, 504, 507]
_MEANING = {
    304: "not changed",
    400: "the body cannot be parsed (invalid_json, bad_arrow)",
    401: "a token is needed (unauthorized, write_token_needed)",
    403: "not allowed with this token, or writing is off (write_token_needed, writes_off)",
    404: "no such item or path (unknown_id, no_picture, not_found)",
    409: "an id is taken (id_taken), or the index on disk was made with another model (index_changed)",
    408: "the body did not arrive in time (timeout)",
    413: "too much (too_large, too_many, too_many_hits, image_too_large)",
    415: "wrong content type (wrong_content_type)",
    421: "this server responds only to its local name (wrong_host)",
    422: "understood and refused (invalid_request, wrong_width, not_finite, k_out_of_range, not_an_image, …)",
    429: "too many requests are in flight (overloaded); try again after Retry-After seconds",
    503: "not now (unavailable, timeout, version_behind); try again after Retry-After seconds",
    504: "no response in time; whether the change was made is not known (timeout)",
    507: "the server's disk is full; nothing was changed (disk_full)",
}
_EVERYWHERE = (401, 421, 429, 503)


DESCRIPTION = (
    "Search learned binary codes by Hamming distance. Requests and responses are JSON or, for bulk, Arrow "
    f"IPC streams ({wire.ARROW}; in responses when the Accept header names it). An Arrow request has one "
    "column: code (fixed-size binary), image (binary), feature (list of float) or id (int64). An Arrow "
    "response has the columns ids and distances, one row per query with -1 in unused slots, and `version` in "
    "the schema's metadata. Errors are JSON with a stable `code` and a sentence. A server with a token "
    "expects it as Authorization: Bearer TOKEN."
)


def route_options(
    model: type[BaseModel] | None,
    errors: list[int],
    body: dict[str, Any] | None = None,
    further: dict[int, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Arguments of ``add_api_route``: the response, the errors and the request body of a route."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*errors, *_EVERYWHERE}):
        responses[status] = {"description": _MEANING[status]}
        if status != 304:
            responses[status]["model"] = ErrorOut
        if status in (429, 503):
            responses[status]["headers"] = {"Retry-After": {"schema": {"type": "string"}, "required": True}}
    for status, content in (further or {}).items():
        responses[status] = responses.get(status, {}) | content
    options: dict[str, Any] = {"responses": responses}
    if model is not None:
        options["response_model"] = model
    if body is not None:
        options["openapi_extra"] = {"requestBody": body}
    return options


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The fields of a model as optional parameters of the query string."""
    listed = []
    for name, field in model.model_json_schema()["properties"].items():
        (schema,) = (variant for variant in field["anyOf"] if variant != {"type": "null"})
        described = {"description": field["description"]} if "description" in field else {}
        listed.append({"name": name, "in": "query", "required": False, "schema": schema, **described})
    return listed


def request_body(
    model: type[BaseModel], limits: Limits, served: ServedRun, pictures: bool = False
) -> dict[str, Any]:
    """The request body: JSON by its schema, an Arrow stream or, with ``pictures``, one picture file."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {
        "application/json": {"schema": _inline(model, limits, served)},
        wire.ARROW: binary,
    }
    if pictures and served.modality == "image":
        content |= dict.fromkeys(("image/jpeg", "image/png", "image/webp"), binary)
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
    for name, field in fields.items():
        for variant in field.pop("anyOf", []):
            if variant != {"type": "null"}:
                field |= variant
        if field.get("default", 0) is None:
            del field["default"]
        if field.get("type") == "array" and name != "labels":
            field["maxItems"] = limits.max_batch
        if name in ("k", "radius"):
            field["maximum"] = limits.max_k if name == "k" else min(limits.max_radius, served.n_bits)
        if name == "codes":
            field["items"]["pattern"] = f"^[0-9a-fA-F]{{{served.n_bits // 4}}}$"
        if name == "features":
            field["items"] |= {"minItems": served.n_features, "maxItems": served.n_features}
    return schema
