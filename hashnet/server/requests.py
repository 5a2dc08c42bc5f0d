"""Bytes of a request → queries and options within bounds, or a sentence that says what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import Request, Response
from pydantic_core import to_json

from hashnet.client import Queries, bad, wire
from hashnet.server import schemas as s
from hashnet.server.settings import Limits

JSON = "application/json"
MAX_JSON_VALUES = 1_000_000  # more are for Arrow: JSON of them takes seconds and a gigabyte to parse


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type=JSON)


async def search_request(
    request: Request, given: dict[str, Any], limits: Limits
) -> tuple[Queries, dict[str, Any]]:
    """The queries and the options, from the query string or from inside a JSON body."""
    kind, body = await _body(request, limits)
    if kind == JSON:
        asked = _parsed(s.SearchBody, body, limits)
        inside = asked.model_dump(include=_OPTIONS, exclude_unset=True)
        if twice := sorted(inside.keys() & given):
            raise bad(
                "invalid_request", f"{', '.join(twice)}: in the body and in the address; say it once", 422
            )
        return s.queries_of(asked), given | inside
    if kind == wire.ARROW:
        return wire.read_queries(_table(body, limits)), given
    if kind.startswith("image/"):
        return Queries("images", [body]), given
    raise _wrong_type(kind, f"{JSON}, {wire.ARROW} or image/*")


_OPTIONS = {"k", "radius", "labels", "exclude_self", "items", "min_version"}


async def encode_request(request: Request, limits: Limits) -> Queries:
    """What is to be encoded."""
    kind, body = await _body(request, limits)
    if kind == JSON:
        return s.queries_of(_parsed(s.EncodeBody, body, limits))
    if kind == wire.ARROW:
        queries = wire.read_queries(_table(body, limits))
        if queries.kind not in ("images", "features"):
            raise bad("invalid_request", f"pictures and features can be encoded, {queries.kind} cannot", 422)
        return queries
    if kind.startswith("image/"):
        return Queries("images", [body])
    raise _wrong_type(kind, f"{JSON}, {wire.ARROW} or image/*")


async def add_request(request: Request, limits: Limits) -> tuple[Queries, np.ndarray, list[list[int]] | None]:
    """(codes, pictures or features; ids int64 (n,); class ids of each item or None)."""
    kind, body = await _body(request, limits)
    if kind == JSON:
        asked = _parsed(s.AddBody, body, limits)
        queries, ids, labels = s.queries_of(asked), np.asarray(asked.item_ids, dtype=np.int64), asked.labels
    elif kind == wire.ARROW:
        table = _table(body, limits)
        queries = wire.read_queries(table, also=("id", "labels"))
        ids, labels = _ids(table), _labels(table)
    else:
        raise _wrong_type(kind, f"{JSON} or {wire.ARROW}")
    if len(ids) != len(queries):
        raise bad("invalid_request", f"{len(queries)} items came with {len(ids)} ids", 422)
    if labels is not None and len(labels) != len(queries):
        raise bad("invalid_request", f"{len(queries)} items came with {len(labels)} lists of labels", 422)
    if len(np.unique(ids)) != len(ids) or (ids < 0).any():
        raise bad("invalid_request", "ids must be different from each other and not negative", 422)
    return queries, ids, labels


async def remove_request(request: Request, limits: Limits) -> np.ndarray:
    """The ids to remove."""
    kind, body = await _body(request, limits)
    if kind == JSON:
        ids = np.asarray(_parsed(s.RemoveBody, body, limits).ids, dtype=np.int64)
    elif kind == wire.ARROW:
        ids = _ids(_table(body, limits))
    else:
        raise _wrong_type(kind, f"{JSON} or {wire.ARROW}")
    _check_rows(len(ids), limits)
    return np.unique(ids)


def check_search(
    queries: Queries, options: dict[str, Any], about: dict[str, Any], limits: Limits
) -> dict[str, Any]:
    """The options that a Call takes, within bounds."""
    check_queries(queries, about, limits)
    k, radius = options.get("k"), options.get("radius")
    if k is not None and radius is not None:
        raise bad("invalid_request", "give either k or radius, not both", 422)
    if radius is None:
        k = min(10, limits.max_k) if k is None else k
        if k > limits.max_k:
            raise bad("k_out_of_range", f"k must be from 1 to {limits.max_k}, got {k}", 422)
        if k * len(queries) > limits.max_hits:
            raise bad(
                "too_many_hits", f"{len(queries)} queries x k = {k} is more than {limits.max_hits} hits", 413
            )
    elif radius > min(limits.max_radius, about["n_bits"]):
        most = min(limits.max_radius, about["n_bits"])
        raise bad("radius_out_of_range", f"radius must be from 0 to {most}, got {radius}", 422)
    exclude_self = bool(options.get("exclude_self"))
    if exclude_self and queries.kind != "ids":
        raise bad("invalid_request", "exclude_self is for queries by ids", 422)
    return {
        "k": k,
        "radius": radius,
        "labels": _class_ids(options.get("labels"), about["class_names"] or []),
        "exclude_self": exclude_self,
        "want_items": bool(options.get("items")),
        "min_version": options.get("min_version") or 0,
        "max_hits": limits.max_hits,
    }


def check_queries(queries: Queries, about: dict[str, Any], limits: Limits) -> None:
    """Refuses what this index and this model cannot take."""
    _check_rows(len(queries), limits)
    if queries.kind not in about["accepts"]:
        raise bad("not_accepted", f"this server takes {', '.join(about['accepts'])}, not {queries.kind}", 422)
    if queries.kind == "codes" and queries.values.shape[1] * 8 != about["n_bits"]:
        raise bad(
            "wrong_width",
            f"the index has {about['n_bits']} bits, the codes have {queries.values.shape[1] * 8}",
            422,
        )
    if queries.kind == "features":
        if queries.values.shape[1] != about["n_features"]:
            raise bad(
                "wrong_width",
                f"the model takes {about['n_features']} features, the rows have {queries.values.shape[1]}",
                422,
            )
        if not np.isfinite(queries.values).all():
            row = int((~np.isfinite(queries.values)).any(axis=1).argmax())
            raise bad("not_finite", f"features row {row} holds NaN or infinity", 422)


def _class_ids(labels: list[int | str] | None, class_names: list[str]) -> list[int] | None:
    """Class ids of a label filter given as ids or names; a name that is a number is a name first.

    Whether there are such classes is for the index to say, since each version has its own.
    """
    if labels is None:
        return None
    names = {name: i for i, name in enumerate(class_names)}
    found = []
    for label in labels:
        number = label if isinstance(label, int) else names.get(label)
        if number is None and str(label).isascii() and str(label).isdigit() and len(str(label)) < 10:
            number = int(label)
        if number is None:
            some = ", ".join(list(names)[:8]) or "no names, give class ids"
            raise bad("unknown_label", f"no class {str(label)[:40]!r} here; there are {some}", 422)
        found.append(number)
    return sorted(set(found))


async def _body(request: Request, limits: Limits) -> tuple[str, bytes]:
    """(content type, body); a body above the bound is not read to its end."""
    told = request.headers.get("content-length", "")
    too_large = bad("too_large", f"the body must be at most {limits.max_body_bytes:,} bytes", 413)
    if told.isdigit() and int(told) > limits.max_body_bytes:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limits.max_body_bytes:
            raise too_large
        chunks.append(chunk)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind, b"".join(chunks)


def _parsed(model: Any, body: bytes, limits: Limits) -> Any:
    """The validated body. JSON is read whole before anything in it is counted, so this looks before."""
    if body.count(b"[") + body.count(b"{") > 2 * limits.max_batch + 1000:  # an item to add has two lists
        raise bad(
            "too_many", f"at most {limits.max_batch} queries a request; the body has far more lists", 413
        )
    if body.count(b",") > MAX_JSON_VALUES:
        raise bad(
            "too_many", f"JSON takes at most {MAX_JSON_VALUES:,} values; send fewer, or {wire.ARROW}", 413
        )
    return s.parse(model, body)


def _table(body: bytes, limits: Limits) -> pa.Table:
    table = wire.read_table(body)
    _check_rows(table.num_rows, limits)
    return table


def _check_rows(n: int, limits: Limits) -> None:
    if n == 0:
        raise bad("no_queries", "there is nothing in the request", 422)
    if n > limits.max_batch:
        raise bad("too_many", f"at most {limits.max_batch} rows a request, got {n}", 413)


def _wrong_type(kind: str, wanted: str) -> Exception:
    return bad("wrong_content_type", f"content-type must be {wanted}, got {kind[:60] or 'none'}", 415)


def _ids(table: pa.Table) -> np.ndarray:
    if table.column_names.count("id") != 1:
        raise bad("bad_arrow", "the stream must have one column id")
    return wire.read_queries(table.select(["id"])).values


def _labels(table: pa.Table) -> list[list[int]] | None:
    if "labels" not in table.column_names:
        return None
    column = table["labels"]
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or not pa.types.is_integer(column.type.value_type) or column.null_count:
        raise bad("bad_arrow", f"the column labels must hold lists of int32, got {column.type}")
    if (pc.max(pc.list_value_length(column)).as_py() or 0) > s.MAX_LABELS:
        raise bad("too_many", f"an item has at most {s.MAX_LABELS} labels", 413)
    lists = column.to_pylist()
    if any(label is None or not 0 <= label < 2**31 for row in lists for label in row):
        raise bad("bad_arrow", "labels must be class ids from 0")
    return lists
