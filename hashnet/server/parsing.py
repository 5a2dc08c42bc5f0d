"""Parses requests: bodies and options → checked queries, or an ApiError that says what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.client import Queries, wire
from hashnet.server import schemas as s
from hashnet.server.http_server import RequestRecord
from hashnet.server.live_index import SearchOptions, SearchRequest
from hashnet.server.schemas import ApiError
from hashnet.server.settings import Limits, ServedRun
from hashnet.server.writer import AddItems, RemoveItems

JSON = "application/json"
DEFAULT_K = 10
MAX_JSON_VALUES = 1_000_000  # in a request; JSON with more takes seconds and a gigabyte to parse
MAX_JSON_HITS = 200_000  # in a response; writing more as JSON keeps a process busy for seconds
MAX_ITEMS = 2000  # hits of one JSON response that can come with uri, labels and code, or with columns


def accepts_arrow(record: RequestRecord) -> bool:
    """Whether the client wants an Arrow stream back."""
    return wire.ARROW in record.header(b"accept")


def read_search(
    record: RequestRecord, options: dict[str, Any], limits: Limits, served: ServedRun
) -> SearchRequest:
    """The search of a request; its options come from the query string (``options``) or a JSON body."""
    queries, body = _read_queries(record, s.SearchBody, limits)
    if body is not None:
        in_body = body.model_dump(include=s.SEARCH_OPTIONS, exclude_unset=True)
        if twice := sorted(in_body.keys() & options):
            sentence = f"{', '.join(twice)}: given in the body and in the address; give it once"
            raise ApiError("invalid_request", sentence)
        options = options | in_body
    check_queries(queries, limits, served)
    return _search_request(queries, options, limits, served, as_json=not accepts_arrow(record))


def read_encode(record: RequestRecord, limits: Limits, served: ServedRun) -> Queries:
    """The pictures or features to encode."""
    queries, _ = _read_queries(record, s.EncodeBody, limits)
    if queries.kind not in ("images", "features"):
        sentence = f"pictures and features can be encoded, {queries.kind} cannot"
        raise ApiError("invalid_request", sentence)
    check_queries(queries, limits, served)
    return queries


def _read_queries(record: RequestRecord, model: type[Any], limits: Limits) -> tuple[Queries, Any]:
    """(the queries of a request, its body as ``model`` where it is JSON)."""
    kind, body = _content_type(record), record.body
    if kind == JSON:
        parsed = _parsed(model, body, limits)
        return s.queries_of(parsed), parsed
    if kind == wire.ARROW:
        return wire.read_queries(_table(body, limits)), None
    if kind.startswith("image/"):
        return Queries("images", [body]), None
    raise _wrong_type(kind, f"{JSON}, {wire.ARROW} or image/*")


def read_add(record: RequestRecord, limits: Limits, served: ServedRun) -> tuple[Queries, AddItems]:
    """(codes, pictures or features; what is to be added, its codes still missing unless they were given)."""
    kind, body = _content_type(record), record.body
    upsert, columns = False, None
    if kind == JSON:
        parsed: s.AddBody = _parsed(s.AddBody, body, limits)
        queries, upsert = s.queries_of(parsed, ("codes", "images", "features")), parsed.upsert
        ids = None if parsed.item_ids is None else np.asarray(parsed.item_ids, np.int64)
        labels, columns = parsed.labels, _columns(parsed)
    elif kind == wire.ARROW:
        table = wire.read_table(body)
        further = [name for name in table.column_names if name not in wire.ITEM_COLUMNS]
        queries = wire.read_queries(table, also=("id", "labels", *further))
        ids, labels = wire.read_ids(table) if "id" in table.column_names else None, _labels(table)
        columns = table.select(further) if further else None
        upsert = (table.schema.metadata or {}).get(b"upsert") == b"true"
    else:
        raise _wrong_type(kind, f"{JSON} or {wire.ARROW}")
    if ids is None:
        _check_keyed(columns)
    else:
        _check_item_ids(ids, len(queries))
    if labels is not None and len(labels) != len(queries):
        raise ApiError("invalid_request", f"{len(queries)} items came with {len(labels)} lists of labels")
    check_queries(queries, None if queries.kind == "codes" else limits, served)
    class_ids = None if labels is None else _class_id_lists(labels, served.class_names or [])
    return queries, AddItems(queries.values, ids, class_ids, upsert, columns)


def _check_item_ids(ids: np.ndarray, n: int) -> None:
    if len(ids) != n:
        raise ApiError("invalid_request", f"{n} items came with {len(ids)} ids")
    if (len(ids) > 1 and len(np.unique(ids)) != len(ids)) or ids.min(initial=0) < 0:
        raise ApiError("invalid_request", "ids must be different from each other and not negative")


def _check_keyed(columns: pa.Table | None) -> None:
    """Items without ids are known by their keys."""
    keys = columns["key"] if columns is not None and "key" in columns.column_names else None
    if keys is None or keys.null_count:
        raise ApiError("invalid_request", "items need ids or, each of them, a key")


def _columns(body: s.AddBody) -> pa.Table | None:
    """Keys and further columns of the items in a JSON body."""
    given = dict(body.columns or {}) | ({} if body.keys is None else {"key": body.keys})
    if not given:
        return None
    try:
        return pa.table(given)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ApiError("invalid_request", f"columns: {str(error).splitlines()[0][:200]}") from None


def read_remove(record: RequestRecord, limits: Limits) -> RemoveItems:
    """The items to remove, by ids or keys."""
    kind, body = _content_type(record), record.body
    if kind == JSON:
        items = s.queries_of(_parsed(s.RemoveBody, body, limits), ("ids", "keys"))
    elif kind == wire.ARROW:
        items = wire.read_queries(wire.read_table(body))
    else:
        raise _wrong_type(kind, f"{JSON} or {wire.ARROW}")
    _check_rows(len(items), None)
    if items.kind == "keys":
        return RemoveItems(keys=sorted(set(items.values)))
    if items.kind != "ids":
        raise ApiError("invalid_request", f"items are removed by ids or keys, not by {items.kind}")
    return RemoveItems(np.unique(items.values))


def check_queries(queries: Queries, limits: Limits | None, served: ServedRun) -> None:
    """Refuses queries that this index and this model cannot take, or more of them than the limits allow."""
    _check_rows(len(queries), limits)
    if queries.kind not in served.accepts:
        sentence = f"this server takes {', '.join(served.accepts)}, not {queries.kind}"
        sentence += "" if served.model else ": it has no model to encode them with"
        raise ApiError("not_accepted", sentence)
    if queries.kind == "codes" and queries.values.shape[1] * 8 != served.n_bits:
        sentence = f"the index has {served.n_bits} bits, the codes have {queries.values.shape[1] * 8}"
        raise ApiError("wrong_width", sentence)
    if queries.kind == "features":
        width = queries.values.shape[1]
        if width != served.n_features:
            sentence = f"the model takes {served.n_features} features, the rows have {width}"
            raise ApiError("wrong_width", sentence)
        _check_finite("features", queries.values)
    if queries.vectors is not None:
        if queries.kind != "codes":
            raise ApiError("invalid_request", f"leave vectors out: they go with codes, not {queries.kind}")
        if len(queries.vectors) != len(queries):
            sentence = f"{len(queries)} codes came with {len(queries.vectors)} vectors"
            raise ApiError("invalid_request", sentence)
        _check_finite("vectors", queries.vectors)


def _check_finite(name: str, rows: np.ndarray) -> None:
    if not np.isfinite(rows).all():
        row = int((~np.isfinite(rows)).any(axis=1).argmax())
        raise ApiError("not_finite", f"{name} row {row} holds NaN or infinity")


def _search_request(
    queries: Queries, given: Mapping[str, Any], limits: Limits, served: ServedRun, as_json: bool
) -> SearchRequest:
    """The search with its options checked; ``given`` holds the options a client gave, by name."""
    k, radius = given.get("k"), given.get("radius")
    if k is not None and radius is not None:
        raise ApiError("invalid_request", "give either k or radius, not both")
    if radius is None:
        k = min(DEFAULT_K, limits.max_k) if k is None else k
        _check_k(k, len(queries), limits)
    elif radius > (most := min(limits.max_radius, served.n_bits)):
        limit = "the server's max_radius" if most == limits.max_radius else "the bits of a code"
        raise ApiError("radius_out_of_range", f"radius must be from 0 to {most} ({limit}), got {radius}")
    exclude_self, with_items = bool(given.get("exclude_self")), bool(given.get("items"))
    if exclude_self and queries.kind not in ("ids", "keys"):
        raise ApiError("invalid_request", "exclude_self is for queries by ids or keys")
    asymmetric = given.get("ranking") == "asymmetric"
    if asymmetric and (radius is not None or queries.kind not in ("images", "features")):
        sentence = "ranking=asymmetric is for the k nearest of pictures or features: it needs their logits"
        raise ApiError("invalid_request", sentence)
    _check_rescoring(queries, given, k, limits)
    max_hits = limits.max_hits
    if as_json:
        described = with_items or given.get("columns") is not None
        _check_json_hits((k or 0) * len(queries), described)
        # the index keeps it for a radius
        max_hits = min(max_hits, MAX_ITEMS if described else MAX_JSON_HITS)
    return SearchRequest(
        queries,
        SearchOptions(
            k=k,
            radius=radius,
            labels=_class_ids(given.get("labels"), served.class_names or []),
            exclude_self=exclude_self,
            asymmetric=asymmetric,
            where=_condition(given.get("where"), served),
            columns=None if given.get("columns") is None else tuple(given["columns"]),
            rescore=given.get("rescore") is not None,
            oversample=given.get("oversample"),
            metric=given.get("metric") or "cosine",
        ),
        max_hits=max_hits,
        min_version=given.get("min_version") or 0,
        with_items=with_items,
        text_ids=bool(given.get("text_ids")),
        deadline=time.time() + limits.timeout_s,
    )


def _condition(where: str | None, served: ServedRun) -> str | None:
    """The condition with class ids for class names."""
    if where is None or served.class_names is None:
        return where
    from hashnet.index import with_class_ids

    return with_class_ids(where, served.class_names)


def _check_rescoring(queries: Queries, given: Mapping[str, Any], k: int | None, limits: Limits) -> None:
    if given.get("rescore") is None:
        unused = [name for name in ("oversample", "metric") if given.get(name) is not None]
        if given.get("ranking") == "asymmetric" and "oversample" in unused:
            unused.remove("oversample")  # candidates by Hamming distance, ordered by their scores
        if queries.vectors is not None:
            unused.append("vectors")
        if unused:
            raise ApiError("invalid_request", f"{', '.join(unused)}: only with rescore=features")
        return
    if k is None:
        raise ApiError("invalid_request", "rescore=features is for the k nearest, not for a radius")
    if queries.kind == "codes" and queries.vectors is None:
        sentence = "rescore=features needs the queries' own vectors: send them with the codes, as vectors"
        raise ApiError("vectors_needed", sentence)
    n_candidates = k * (given.get("oversample") or 1) * len(queries)
    if n_candidates > limits.max_hits:
        sentence = f"k x oversample of {len(queries)} queries is more than {limits.max_hits} candidates"
        raise ApiError("too_many_hits", sentence, 413)


def _check_k(k: int, n_queries: int, limits: Limits) -> None:
    if k > limits.max_k:
        raise ApiError("k_out_of_range", f"k must be from 1 to {limits.max_k} (the server's max_k), got {k}")
    if k * n_queries > limits.max_hits:
        sentence = f"{n_queries} queries x k = {k} is more than {limits.max_hits} hits"
        raise ApiError("too_many_hits", sentence, 413)


def _check_json_hits(n_hits: int, described: bool) -> None:
    if described and n_hits > MAX_ITEMS:
        sentence = f"JSON with items or columns has at most {MAX_ITEMS} hits, requested {n_hits}; use Arrow"
        raise ApiError("too_many_items", sentence)
    if n_hits > MAX_JSON_HITS:
        sentence = f"a JSON response has at most {MAX_JSON_HITS:,} hits, requested {n_hits:,}; use Arrow"
        raise ApiError("too_many_hits", sentence, 413)


def _class_ids(labels: list[int | str] | None, class_names: list[str]) -> tuple[int, ...] | None:
    """Class ids of a label filter given as ids or names, ascending.

    The index checks whether the classes exist, since each version has its own.
    """
    if labels is None:
        return None
    names = {name: i for i, name in enumerate(class_names)}
    return tuple(sorted({_class_id(label, names) for label in labels}))


def _class_id_lists(labels: list[list[int | str]], class_names: list[str]) -> list[list[int]]:
    """Class ids of each item's labels, given as ids or names."""
    names = {name: i for i, name in enumerate(class_names)}
    return [[_class_id(label, names) for label in row] for row in labels]


def _class_id(label: int | str, names: dict[str, int]) -> int:
    """The class id of a label; a name that is a number is a name first."""
    number = label if isinstance(label, int) else names.get(label)
    if number is None and str(label).isascii() and str(label).isdigit() and len(str(label)) < 10:
        number = int(label)
    if number is None:
        some = ", ".join(list(names)[:8]) + (", …" if len(names) > 8 else "")
        known = some or "no names, give class ids"
        raise ApiError("unknown_label", f"there is no class {str(label)[:40]!r}; there are {known}")
    return number


def _content_type(record: RequestRecord) -> str:
    return record.header(b"content-type").partition(";")[0].strip().lower()


def _parsed(model: Any, body: bytes, limits: Limits) -> Any:
    """The validated body. JSON is parsed whole before its values are counted, so this counts first."""
    if body.count(b"[") + body.count(b"{") > 2 * limits.max_batch + 1000:  # an item to add has two lists
        sentence = f"a request has at most {limits.max_batch} queries; the body has far more lists"
        raise ApiError("too_many", sentence, 413)
    if body.count(b",") > MAX_JSON_VALUES:
        sentence = f"JSON may hold at most {MAX_JSON_VALUES:,} values; send fewer, or {wire.ARROW}"
        raise ApiError("too_many", sentence, 413)
    return s.parse(model, body)


def _table(body: bytes, limits: Limits) -> pa.Table:
    table = wire.read_table(body)
    _check_rows(table.num_rows, limits)
    return table


def _check_rows(n: int, limits: Limits | None) -> None:
    if n == 0:
        raise ApiError("no_queries", "the request is empty")
    if limits is not None and n > limits.max_batch:
        raise ApiError("too_many", f"a request has at most {limits.max_batch} rows, got {n}", 413)


def _wrong_type(kind: str, expected: str) -> ApiError:
    sentence = f"content-type must be {expected}, got {kind[:60] or 'none'}"
    if kind == "multipart/form-data":  # a form, as curl -F sends it
        sentence += "; send the picture itself: curl -H 'content-type: image/jpeg' --data-binary @FILE"
    return ApiError("wrong_content_type", sentence, 415)


def _labels(table: pa.Table) -> list[list[int | str]] | None:
    if "labels" not in table.column_names:
        return None
    column = table["labels"]
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    named = is_list and pa.types.is_string(column.type.value_type)
    if not (named or (is_list and pa.types.is_integer(column.type.value_type))) or column.null_count:
        sentence = f"the column labels must hold lists of int32 or of names, got {column.type}"
        raise ApiError("bad_arrow", sentence, 400)
    if (pc.max(pc.list_value_length(column)).as_py() or 0) > s.MAX_LABELS:
        raise ApiError("too_many", f"an item has at most {s.MAX_LABELS} labels", 413)
    lists = column.to_pylist()
    if any(label is None or not (named or 0 <= label < 2**31) for row in lists for label in row):
        raise ApiError("bad_arrow", "labels must be class ids from 0, or names", 400)
    return lists
