"""JSON requests, responses and errors; the OpenAPI description is made from these pydantic models."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

import numpy as np
import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from hashnet.client import Queries, wire
from hashnet.errors import (
    CodeError,
    HashnetError,
    IndexMismatch,
    LineageMismatch,
    RequestRejected,
    UnknownId,
    Unsupported,
)

Hex = Annotated[
    str, Field(pattern=r"^([0-9a-fA-F]{2}){1,512}$", description="a packed code, two hex digits per byte")
]


def _whole(value: Any) -> Any:
    """5.0 is a whole number in JSON; text and true are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_or_text(value: Any) -> Any:
    """An id may be text: numbers above 2^53 are not exact in every client."""
    is_number = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20
    return int(value) if is_number else _whole(value)


WHOLE = BeforeValidator(_whole)
Id = Annotated[
    int,
    Field(strict=True, ge=0, le=2**63 - 1),
    BeforeValidator(_whole_or_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
                {"type": "string", "pattern": "^[0-9]{1,18}$", "description": "the same as text"},
            ]
        }
    ),
]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-3.4028234663852886e38, le=3.4028234663852886e38)]
Label = (
    Annotated[int, Field(strict=True, ge=0, le=2**31 - 1), WHOLE]
    | Annotated[str, Field(strict=True, max_length=200)]
)
QueryClassId = Annotated[int, Field(ge=0, le=2**31 - 1)]  # text in an address, so not strict
Base64 = Annotated[
    str, Field(json_schema_extra={"contentEncoding": "base64"}, description="a picture file, base64")
]
Version = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1), WHOLE]

# Validation of a list stops at the first mistake: a large body of wrong entries would make millions.
FIRST = Field(fail_fast=True)
QUERIES = tuple(wire.COLUMNS)  # the fields that hold queries: codes, images, features, ids, keys
MAX_CONDITION = 2000  # characters
MAX_LABELS = 1000  # of one item, and of a filter
MAX_COLUMNS = 100  # of the items, in one response
Codes = Annotated[list[Hex], FIRST]
Images = Annotated[list[Base64], FIRST]
Features = Annotated[list[Annotated[list[Finite], Field(min_length=1, fail_fast=True)]], FIRST]
Ids = Annotated[list[Id], FIRST]
Key = Annotated[str, Field(strict=True, max_length=wire.MAX_KEY)]
Keys = Annotated[list[Key], FIRST]
LabelLists = Annotated[list[Annotated[list[Label], Field(max_length=MAX_LABELS, fail_fast=True)]], FIRST]


class Schema(BaseModel):
    """A model that is built when it is first used: a server starts sooner."""

    model_config = ConfigDict(defer_build=True)


class Strict(Schema):
    """Refuses unknown fields, and null where a field should be left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            unknown = next((name for name in data if name not in cls.model_fields), None)
            if unknown is not None:  # the first is enough: there may be millions
                raise ValueError(f"there is no field {str(unknown)[:40]!r}")
            empty = [str(name) for name, value in data.items() if value is None]
            if empty:
                raise ValueError(f"leave {', '.join(empty[:3])} out instead of null")
        return data


def _exactly_one(*names: str) -> ConfigDict:
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in names]})


VECTORS = "with codes: the vector of each, which hits are rescored by"


Ranking = Literal["hamming", "asymmetric"]
RANKING = "by Hamming distance, or by the logits of pictures or features against the codes (finer, slower)"
WHERE = "a condition on the items' columns, such as: year >= 2020 and city in ('Rome', 'Oslo')"
Rescore = Literal["features"]
Metric = Literal["cosine", "inner_product"]
RESCORE = "order the nearest by their stored vectors and the queries' own"
OVERSAMPLE = (
    "order this many candidates per hit: by their vectors (none: 4, or what the index was tuned to) or, with "
    "ranking=asymmetric, by their scores (none: the index's choice)"
)
METRIC = "of the vectors"
COLUMNS = "columns of the items to return with each hit, key among them"
TEXT_IDS = "write ids as text, for clients whose numbers are not exact above 2^53"


class SearchParams(Schema):
    """The options of a search in the query string."""

    k: int | None = Field(None, ge=1)
    radius: int | None = Field(None, ge=0)
    labels: list[str] | None = Field(None, description="class names, or ids that are not a name")
    label_ids: list[QueryClassId] | None = Field(None, description="class ids only")
    exclude_self: bool | None = None
    items: bool | None = None
    min_version: int | None = Field(None, ge=0, le=2**63 - 1)
    text_ids: bool | None = Field(None, description=TEXT_IDS)
    ranking: Ranking | None = Field(None, description=RANKING)
    where: str | None = Field(None, max_length=MAX_CONDITION, description=WHERE)
    columns: list[str] | None = Field(None, max_length=MAX_COLUMNS, description=COLUMNS)
    rescore: Rescore | None = Field(None, description=RESCORE)
    oversample: float | None = Field(None, ge=1, allow_inf_nan=False, description=OVERSAMPLE)
    metric: Metric | None = Field(None, description=METRIC)

    def given(self) -> dict[str, Any]:
        """The options that were given, by the names they have in a JSON body."""
        options = self.model_dump(include=SEARCH_OPTIONS, exclude_none=True)
        if labels := [*(self.labels or ()), *(self.label_ids or ())]:
            options["labels"] = labels
        return options


class InfoParams(Schema):
    """The options of /v1/info in the query string."""

    min_version: int = Field(0, ge=0, le=2**63 - 1, description="of this index version or a newer one")


class ItemParams(InfoParams):
    """The options of /v1/items/{id} in the query string."""

    text_ids: bool = Field(False, description=TEXT_IDS)


class SampleParams(ItemParams):
    """The options of /v1/items in the query string."""

    n: int = Field(24, ge=1, le=100)
    seed: int = Field(0, ge=0, le=2**32 - 1)
    key: list[Key] | None = Field(
        None, min_length=1, max_length=100, description="the items with these keys, not a sample"
    )


class ItemPath(Schema):
    """What the path of an item says."""

    id: int = Field(ge=0, le=2**63 - 1, description="id of an indexed item")


class SearchBody(Strict):
    """One or many queries of one kind, and either ``k`` (10 when neither is given) or ``radius``."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [name]} for name in QUERIES],
            "not": {"required": ["k", "radius"]},
        }
    )

    codes: Codes | None = Field(None, min_length=1, description="packed codes, hex")
    images: Images | None = Field(None, min_length=1, description="picture files, base64")
    features: Features | None = Field(
        None, min_length=1, description="feature vectors, where the model takes features"
    )
    ids: Ids | None = Field(None, min_length=1, description="ids of indexed items")
    keys: Keys | None = Field(None, min_length=1, description="keys of indexed items")
    vectors: Features | None = Field(None, min_length=1, description=VECTORS)
    k: Annotated[int, Field(strict=True, ge=1), WHOLE] | None = Field(
        None, description="number of nearest items"
    )
    radius: Annotated[int, Field(strict=True, ge=0), WHOLE] | None = Field(
        None, description="find every item within this many bits"
    )
    labels: Annotated[list[Label], FIRST] | None = Field(
        None,
        min_length=1,
        max_length=MAX_LABELS,
        description="only items with at least one of these classes (id or name)",
    )
    exclude_self: bool = Field(False, strict=True, description="leave a queried item out of its own hits")
    items: bool = Field(False, strict=True, description="include uri, labels, key and code of each hit")
    min_version: Version = Field(0, description="search this index version or a newer one")
    text_ids: bool = Field(False, strict=True, description=TEXT_IDS)
    ranking: Ranking = Field("hamming", description=RANKING)
    where: str | None = Field(None, max_length=MAX_CONDITION, description=WHERE)
    columns: Annotated[list[str], FIRST] | None = Field(
        None, min_length=1, max_length=MAX_COLUMNS, description=COLUMNS
    )
    rescore: Rescore | None = Field(None, description=RESCORE)
    oversample: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] | None = Field(
        None, description=OVERSAMPLE
    )
    metric: Metric | None = Field(None, description=METRIC)


SEARCH_OPTIONS = set(SearchBody.model_fields) - {*QUERIES, "vectors"}


class EncodeParams(Schema):
    """The options of encoding in the query string."""

    vectors: bool | None = Field(None, description="also the vectors that this index is rescored by")


class EncodeBody(Strict):
    """Exactly one of the two: images, features."""

    model_config = _exactly_one("images", "features")

    images: Images | None = Field(None, min_length=1, description="picture files, base64")
    features: Features | None = Field(None, min_length=1)


class AddBody(Strict):
    """New items: their ids or keys, one of codes, images, features and, where known, their labels."""

    model_config = _exactly_one("codes", "images", "features")

    item_ids: Ids | None = Field(
        None,
        min_length=1,
        description="ids that are not in the index yet, unless upsert is true; none: the keys name the items",
    )
    codes: Codes | None = Field(None, min_length=1)
    images: Images | None = Field(None, min_length=1)
    features: Features | None = Field(None, min_length=1)
    vectors: Features | None = Field(None, min_length=1, description=VECTORS)
    labels: LabelLists | None = Field(None, description="classes of each item, ids or names")
    upsert: bool = Field(
        False, strict=True, description="replace items that have one of these ids or, without ids, keys"
    )
    keys: Keys | None = Field(None, description="a key of each item")
    columns: dict[str, list[Any]] | None = Field(None, description="column name → one value per item")


class RemoveBody(Strict):
    """Exactly one of the two: ids, keys."""

    model_config = _exactly_one("ids", "keys")

    ids: Ids | None = Field(None, min_length=1)
    keys: Keys | None = Field(None, min_length=1)


OutId = int | Annotated[str, Field(description="where text_ids is true")]


class ItemOut(Schema):
    id: OutId
    uri: str | None = Field(description="where it came from; null where unknown")
    labels: list[int] | None = Field(description="class ids; null where the database has none")
    label_names: list[str] | None = Field(description="their names; null where classes have none")
    code: str = Field(description="its packed code, hex")
    thumbnail: str | None = Field(description="path of its thumbnail; null where there is none")
    columns: dict[str, Any] | None = Field(None, description="its key and further columns, where it has them")


class HitsOut(Schema):
    code: str = Field(description="the query's code, hex")
    ids: list[OutId] = Field(description="nearest first; equal distances by id")
    distances: list[int] = Field(description="bits that differ")
    scores: list[float] | None = Field(
        None, description="of asymmetric ranking or rescoring, the largest first"
    )
    items: list[ItemOut] | None = Field(None, description="one per hit, where requested")
    columns: list[dict[str, Any]] | None = Field(None, description="one per hit, where requested")


class SearchOut(Schema):
    version: int = Field(description="the index version that all results come from")
    took_ms: float
    results: list[HitsOut]


class EncodeOut(Schema):
    n_bits: int
    codes: list[str] = Field(description="packed codes, hex")
    vectors: list[list[float]] | None = Field(None, description="where requested, and the index has any")


class WrittenOut(Schema):
    version: int = Field(description="the index version that holds the change")
    size: int = Field(description="items in that version")


class ItemsOut(Schema):
    version: int
    items: list[ItemOut]


class InfoOut(Schema):
    n_bits: int
    size: int
    kind: str
    engine: str
    version: int
    modality: str | None = Field(description="what the model takes: image or features; null without a model")
    accepts: list[str] = Field(description="kinds of queries that /v1/search takes")
    n_features: int | None
    n_classes: int | None
    class_names: list[str] | None
    pictures: bool = Field(description="whether items have thumbnails")
    n_vector: int | None = Field(description="values of the vectors to rescore by; null without")
    oversample: float | None = Field(description="candidates per hit that are rescored unless requested")
    writable: bool = Field(description="whether the server was started with a write token")
    lineage: dict[str, Any]
    limits: dict[str, int | float]
    hashnet: str = Field(description="version of the server software")


class StateOut(Schema):
    status: str


class Problem(Schema):
    code: str = Field(description="a stable word for programs")
    message: str = Field(description="a sentence for people")
    request_id: str


class ErrorOut(Schema):
    error: Problem


def parse(model: type[BaseModel], body: bytes) -> Any:
    """The validated body, or ApiError with the first few mistakes."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise explain(error) from None


def parse_query(model: type[BaseModel], query_string: bytes) -> Any:
    """The validated query string, or ApiError."""
    given = parse_qs(query_string.decode("latin-1"), keep_blank_values=True)
    lists = {"labels", "label_ids", "columns", "key"}
    return validate(model, {name: listed if name in lists else listed[-1] for name, listed in given.items()})


def validate(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """The validated values, or ApiError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error) from None


def explain(error: ValidationError) -> ApiError:
    """One sentence with the first mistakes; contents of the request are not repeated."""
    mistakes = error.errors(include_url=False, include_input=False)
    kinds = {mistake["type"] for mistake in mistakes}
    if kinds & {"json_invalid"}:
        return ApiError("invalid_json", f"the body is not JSON: {mistakes[0]['ctx'].get('error', '')}", 400)
    by_place: dict[str, list[str]] = {}
    for mistake in mistakes:
        by_place.setdefault(_place(mistake["loc"]), []).append(_sentence(mistake))
    listed = "; ".join(
        f"{place}: {' or '.join(dict.fromkeys(said))}" for place, said in list(by_place.items())[:3]
    )
    more = f" (and {len(by_place) - 3} more)" if len(by_place) > 3 else ""
    places = {str(mistake["loc"][0]) for mistake in mistakes if mistake["loc"]}
    code = "invalid_request"
    if kinds == {"finite_number"}:
        code = "not_finite"
    elif places in ({"k"}, {"radius"}, {"oversample"}):
        code = f"{places.pop()}_out_of_range"
    return ApiError(code, f"{listed}{more}")


# What pydantic adds to a place, or to a sentence, says how a field is checked, not what a client sent.
_OF_PYDANTIC = re.compile(r"(constrained|function|nullable|list|int|str|float|bool)\b")
_WORDS = {"Value error, ": "", "Input should be": "must be", "List should": "must", "String should": "must"}


def _place(loc: tuple[int | str, ...]) -> str:
    """The field, and the positions in it."""
    kept = [str(part) for part in loc if isinstance(part, int) or not _OF_PYDANTIC.match(part)]
    return ".".join(kept) or "body"


def _sentence(mistake: Any) -> str:
    if mistake["type"] == "string_pattern_mismatch":
        return "must be hexadecimal, two digits per byte"
    text = mistake["msg"]
    for old, new in _WORDS.items():
        text = text.replace(old, new)
    return text


def queries_of(body: Any, kinds: tuple[str, ...] = QUERIES) -> Queries:
    """The queries in a JSON body, which must be of one of these kinds."""
    names = [name for name in kinds if getattr(body, name, None) is not None]
    if len(names) != 1:
        fields = [name for name in kinds if name in type(body).model_fields]
        raise ApiError(
            "invalid_request", f"give exactly one of {', '.join(fields)}; got {' and '.join(names) or 'none'}"
        )
    kind = names[0]
    values = getattr(body, kind)
    if kind == "codes":
        widths = {len(text) for text in values}
        if len(widths) > 1:
            raise ApiError(
                "wrong_width", f"codes differ in length: {min(widths) * 4} to {max(widths) * 4} bits"
            )
        rows = np.frombuffer(bytes.fromhex("".join(values)), dtype=np.uint8).reshape(len(values), -1)
        vectors = getattr(body, "vectors", None)
        return Queries(kind, rows, None if vectors is None else _matrix("vectors", vectors))
    if getattr(body, "vectors", None) is not None:
        raise ApiError("invalid_request", f"leave vectors out: they go with codes, not {kind}")
    if kind == "images":
        return Queries(kind, [_picture(i, text) for i, text in enumerate(values)])
    if kind == "features":
        return Queries(kind, _matrix(kind, values))
    return Queries(kind, values if kind == "keys" else np.asarray(values, dtype=np.int64))


def _matrix(name: str, rows: list[list[float]]) -> np.ndarray:
    """float32 (n, d) of lists."""
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ApiError("wrong_width", f"{name} differ in length: {min(widths)} to {max(widths)}")
    return np.asarray(rows, dtype=np.float32)


def _picture(number: int, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError("not_an_image", f"images.{number} is not base64") from None


# ---------------------------------------------------------------- errors
# ApiError: every error a client is told about, and the one place that turns it into a response.


class ApiError(HashnetError):
    """An error response: a stable ``code`` for programs, a ``message`` for people, the HTTP ``status``.

    Inside a process it is raised. Between processes, and among the results of a batch, it is a value in the
    place of the result, so that one bad request does not spoil the others that are handled with it.
    """

    def __init__(self, code: str, message: str, status: int = 422) -> None:
        super().__init__(code, message, status)  # all three, so that it can be pickled
        self.code, self.message, self.status = code, message, status

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the request may succeed; None for an error that stays."""
        return 1 if self.status in (429, 503) else None

    @classmethod
    def of(cls, error: BaseException) -> ApiError | None:
        """What a client is told about ``error``; None for a failure of the server."""
        if isinstance(error, ApiError):
            return error
        message = str(error.args[0]) if error.args else str(error)
        if isinstance(error, RequestRejected):
            return cls(error.code, message, error.status)
        if isinstance(error, UnknownId):
            return cls("unknown_id", message, 404)
        if isinstance(error, Unsupported):
            return cls("unsupported", message)
        if isinstance(error, LineageMismatch):
            return cls("lineage_mismatch", message, 409)
        if isinstance(error, (IndexMismatch, CodeError)):
            return cls("invalid_request", message)
        return None


@dataclass
class Response:
    """What a client is sent."""

    body: bytes = b""
    status: int = 200
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def error_response(error: ApiError, request_id: str) -> Response:
    """The HTTP response that tells a client about an error."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = {"error": {"code": error.code, "message": error.message, "request_id": request_id}}
    return Response(orjson.dumps(body), error.status, headers=headers)
