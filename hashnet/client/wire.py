"""The wire format of bulk requests and responses: Arrow IPC streams, read as untrusted input.

    request   one column: code (fixed-size binary), image (binary), feature (list of float), id (int64) or
              key (text); with code, also vector (list of float): what hits are rescored by; to add items:
              code, image or feature, with id or key and, where known, labels and vector
    response  ids and distances, one list per query (fixed-size lists from a k search, -1 in unused
              slots; with scores from asymmetric ranking and rescoring; where requested, columns: a struct
              for each hit); code and, if requested, vector from encode. The schema's metadata carries
              ``version``.

Streams with compressed bodies or dictionaries are refused: a small body must stay small.

>>> import numpy as np
>>> queries = Queries("codes", np.array([[1, 2]], dtype=np.uint8))
>>> read_table(write_queries(queries)).column_names
['code']
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hashnet.codes import check_codes
from hashnet.errors import CodeError, DataError, RequestRejected
from hashnet.io import as_array, binary_column, binary_matrix
from hashnet.results import SearchResult

ARROW = "application/vnd.apache.arrow.stream"
COLUMNS = {"codes": "code", "images": "image", "features": "feature", "ids": "id", "keys": "key"}
VECTOR = "vector"  # the column of vectors beside codes
# Of a table of items to add; its other columns, "key" among them, are the items' own.
ITEM_COLUMNS = ("code", "image", "feature", "id", "labels", VECTOR)
MAX_KEY = 4096  # characters of a key in a request
MAX_CODE_BYTES = 512  # codes have at most 4,096 bits
MAX_MESSAGES = 1024  # record batches in one stream


def _bad_arrow(message: str) -> RequestRejected:
    return RequestRejected(message, code="bad_arrow", status=400)


# ---------------------------------------------------------------- requests


def _lists(rows: np.ndarray) -> pa.FixedSizeListArray:
    """A matrix as a column of lists of one length."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows).ravel()), rows.shape[1])


def _query_columns(queries: Queries) -> dict[str, pa.Array]:
    """The queries, and their vectors where they have any, as the columns that carry them."""
    if queries.kind == "codes":
        column = binary_column(queries.values)
    elif queries.kind == "features":
        column = _lists(np.asarray(queries.values, np.float32))
    elif queries.kind == "ids":
        column = pa.array(np.asarray(queries.values, dtype=np.int64))
    elif queries.kind == "keys":
        column = pa.array(queries.values, pa.string())
    else:
        column = pa.array(queries.values, pa.binary())
    columns = {COLUMNS[queries.kind]: column}
    return (
        columns
        if queries.vectors is None
        else columns | {VECTOR: _lists(queries.vectors.astype(np.float32, copy=False))}
    )


def write_queries(queries: Queries) -> bytes:
    """The body of a bulk search or encode request, or of the response to an encode request (codes)."""
    return write_table(pa.table(_query_columns(queries)))


def write_items(
    queries: Queries,
    ids: np.ndarray | None,
    labels: Sequence[Sequence[int | str]] | None = None,
    further: pa.Table | None = None,
    upsert: bool = False,
) -> bytes:
    """The body of a bulk add request; ``further`` are columns of the user's, ``upsert`` is metadata."""
    columns = _query_columns(queries)
    if ids is not None:
        columns["id"] = pa.array(ids, pa.int64())
    if labels is not None:
        named = any(isinstance(label, str) for row in labels for label in row)
        column = pa.array([list(row) for row in labels], pa.list_(pa.string() if named else pa.int32()))
        columns["labels"] = column
    table = pa.table(columns)
    if further is not None:
        for name in further.column_names:
            table = table.append_column(name, further[name])
    return write_table(table, {"upsert": "true"} if upsert else None)


def as_columns(columns: Any, keys: Sequence[str] | None, n: int) -> pa.Table | None:
    """Columns of ``n`` items, an Arrow table or name → values, and their keys as a table; None for none."""
    if columns is None and keys is None:
        return None
    try:
        table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns or {}))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"columns= must be an Arrow table or name → values: {error}") from error
    if keys is not None:
        if "key" in table.column_names:
            raise DataError("the column 'key' is given twice: in columns= and as keys=")
        if len(keys) != n:
            raise DataError(f"{n} items came with {len(keys)} keys")
        key = pa.array(keys, pa.string())
        table = pa.table({"key": key}) if table.num_columns == 0 else table.append_column("key", key)
    if table.num_rows != n:
        raise DataError(f"{n} items came with columns of {table.num_rows} rows")
    taken = set(table.column_names) & set(ITEM_COLUMNS)
    if taken:
        raise DataError(f"a column cannot be called {', '.join(sorted(taken))}; rename it")
    return table


def read_queries(table: pa.Table, also: tuple[str, ...] = ()) -> Queries:
    """The queries of a request's table; any column besides them must be in ``also``."""
    names = table.column_names
    kinds = [kind for kind, name in COLUMNS.items() if name in names and name not in also]
    if len(kinds) != 1:
        raise _bad_arrow(
            f"the stream must have exactly one of the columns {', '.join(COLUMNS.values())}, "
            f"got {', '.join(names) or 'none'}",
        )
    kind = kinds[0]
    extra = set(names) - {COLUMNS[kind], VECTOR, *also}
    if extra or len(set(names)) != len(names):
        raise _bad_arrow(f"unknown or repeated columns: {', '.join(sorted(extra) or names)}")
    values = _values(kind, _column(table, COLUMNS[kind]))
    return Queries(kind, values, _vectors(table) if VECTOR in names else None)


def read_ids(table: pa.Table) -> np.ndarray:
    """The ids int64 (n,) that a table has beside other columns."""
    if table.column_names.count("id") != 1:
        raise _bad_arrow("the stream must have one column id")
    return _values("ids", _column(table, "id"))


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    if column.num_chunks == 1:
        column = column.chunk(0)
    else:
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if column.null_count:
        raise _bad_arrow(f"the column {name} has {column.null_count} nulls; leave those rows out")
    return column


def _vectors(table: pa.Table) -> np.ndarray:
    column = _column(table, VECTOR)
    if not is_float_list(column.type):
        raise _bad_arrow(f"the column {VECTOR} must hold lists of float of one length, got {column.type}")
    return _matrix(column)


def _values(kind: str, column: pa.Array) -> Any:
    type_ = column.type
    name = COLUMNS[kind]
    if kind == "codes" and pa.types.is_fixed_size_binary(type_) and 0 < type_.byte_width <= MAX_CODE_BYTES:
        return binary_matrix(column, type_.byte_width)
    if kind == "ids" and pa.types.is_integer(type_):
        try:
            return (column if type_ == pa.int64() else column.cast(pa.int64())).to_numpy()
        except pa.ArrowInvalid as error:
            raise _bad_arrow(f"the column id does not fit int64: {error}") from error
    if kind == "keys" and (pa.types.is_string(type_) or pa.types.is_large_string(type_)):
        return column.to_pylist()
    if kind == "images" and (pa.types.is_binary(type_) or pa.types.is_large_binary(type_)):
        return column.to_pylist()
    if kind == "features" and is_float_list(type_):
        return _matrix(column)
    expected = {
        "codes": "fixed-size binary of n_bits / 8 bytes",
        "ids": "int64",
        "keys": "text",
        "images": "binary",
        "features": "lists of float of one length",
    }
    raise _bad_arrow(f"the column {name} must hold {expected[kind]}, got {type_}")


def is_float_list(type_: pa.DataType) -> bool:
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return bool(is_list and pa.types.is_floating(type_.value_type))


def _matrix(column: pa.Array) -> np.ndarray:
    values = column.flatten()
    width = len(values) // len(column) if len(column) else 0
    if len(column) and width == 0:
        raise _bad_arrow("the column feature holds empty lists")
    if not pa.types.is_fixed_size_list(column.type) and len(column):
        lengths = np.diff(column.offsets.to_numpy())
        if not (lengths == width).all():
            raise _bad_arrow(f"features differ in length: from {lengths.min()} to {lengths.max()}")
    if values.null_count or len(values) != width * len(column):
        raise _bad_arrow("the column feature holds nulls")
    return values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(len(column), width)


# ---------------------------------------------------------------- responses


def write_hits(
    hits: SearchResult | list[SearchResult], version: int | None, further: pa.Table | None = None
) -> bytes:
    """The body of a bulk search response: one (q, k) result, or a list of 1-D ones of a radius search.

    ``further`` holds the columns of all used hits, query after query.
    """
    if isinstance(hits, SearchResult):
        columns = {"ids": _lists(hits.ids), "distances": _lists(hits.distances)}
        if hits.scores is not None:
            columns["scores"] = _lists(hits.scores)
    else:
        offsets = np.zeros(len(hits) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in hits], out=offsets[1:])
        ids = np.concatenate([one.ids for one in hits] or [np.zeros(0, np.int64)]).astype(np.int64)
        distances = np.concatenate([one.distances for one in hits] or [np.zeros(0, np.int32)])
        columns = {
            "ids": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids)),
            "distances": pa.LargeListArray.from_arrays(
                pa.array(offsets), pa.array(distances.astype(np.int32))
            ),
        }
    if further is not None:
        used = (hits.ids >= 0).sum(axis=1) if isinstance(hits, SearchResult) else list(map(len, hits))
        ends = pa.array(np.cumsum([0, *used]))
        structs = further.to_struct_array().combine_chunks()
        columns["columns"] = pa.LargeListArray.from_arrays(ends, structs)
    return write_table(pa.table(columns), {} if version is None else {"version": str(version)})


def read_hits(data: bytes) -> SearchResult | list[SearchResult]:
    """What ``write_hits`` wrote: (q, k), or a list of 1-D results after a radius search."""
    table = read_table(data)
    metadata = table.schema.metadata or {}
    version = int(metadata[b"version"]) if b"version" in metadata else None
    columns = [table[name].combine_chunks() for name in ("ids", "distances")]
    flat = [column.flatten().to_numpy() for column in columns]
    further = None
    if "columns" in table.column_names:
        further = pa.Table.from_struct_array(table["columns"].combine_chunks().flatten())
    if pa.types.is_fixed_size_list(columns[0].type):
        shape = (len(table), columns[0].type.list_size)
        scores = None
        if "scores" in table.column_names:
            scores = table["scores"].combine_chunks().flatten().to_numpy().reshape(shape)
        if further is not None:  # nulls in unused slots
            used = flat[0] >= 0
            further = further.take(pa.array(np.cumsum(used) - 1, mask=~used))
        return SearchResult(flat[0].reshape(shape), flat[1].reshape(shape), version, scores, further)
    bounds = columns[0].offsets.to_numpy()
    return [
        SearchResult(flat[0][a:b], flat[1][a:b], version, columns=further and further.slice(a, b - a))
        for a, b in pairwise(bounds)
    ]


def read_version(data: bytes) -> int:
    """The index version in the JSON response to a write."""
    return int(json.loads(data)["version"])


# ---------------------------------------------------------------- streams


def write_table(table: pa.Table, metadata: dict[str, str] | None = None) -> bytes:
    """One table as an Arrow IPC stream, not compressed."""
    if metadata:
        table = table.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def read_table(data: bytes) -> pa.Table:
    """The table in an Arrow IPC stream, validated; RequestRejected (``bad_arrow``) for anything else."""
    try:
        _check_messages(data)
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, struct.error, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise _bad_arrow(f"the body is not an Arrow IPC stream: {reason}") from error
    return table


def _check_messages(data: bytes) -> None:
    """Refuses messages that could unpack into more than was sent, before any is unpacked."""
    for number, message in enumerate(pa.ipc.MessageReader.open_stream(data)):
        if message.type != ("record batch" if number else "schema"):
            raise _bad_arrow(f"the stream must be a schema and record batches, found a {message.type}")
        if number and _is_compressed(message.metadata):
            raise _bad_arrow("the stream is compressed; write it without compression")
        if number > MAX_MESSAGES:
            raise _bad_arrow(f"the stream has more than {MAX_MESSAGES} record batches")


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether a record batch's flatbuffer has the field ``compression`` (Message.header.compression)."""
    data = metadata.to_pybytes()
    message = struct.unpack_from("<I", data)[0]
    header = _field(data, message, 2)  # Message: version, header_type, header, bodyLength
    if header is None:
        return False
    batch = header + struct.unpack_from("<I", data, header)[0]
    return _field(data, batch, 3) is not None  # RecordBatch: length, nodes, buffers, compression


def _field(data: bytes, table: int, number: int) -> int | None:
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    slot = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + slot)[0] if slot + 2 <= size else 0
    return table + offset if offset else None


# ---------------------------------------------------------------- queries
# Queries of one kind: pictures, packed codes, features, or ids or keys of indexed items.

MAX_PICTURES = 64  # in one request: even a large model on a CPU encodes them in time


@dataclass(frozen=True)
class Queries:
    """Queries of one kind: codes uint8 (n, bytes), features float32 (n, d), ids int64 (n,), keys or pictures.

    ``vectors`` float32 (n, width) come with codes where hits are rescored by them.
    """

    kind: str  # codes | images | features | ids | keys
    values: Any
    vectors: np.ndarray | None = None
    names: tuple[str, ...] = ()  # paths of pictures, for errors; "" where one came as bytes

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, rows: slice) -> Queries:
        """Some of the queries."""
        vectors = None if self.vectors is None else self.vectors[rows]
        return Queries(self.kind, self.values[rows], vectors, self.names[rows])

    def parts(self, rows: int, max_bytes: int = 8 << 20) -> Iterator[Queries]:
        """The queries in parts of at most ``rows`` rows (pictures: MAX_PICTURES) and ``max_bytes``."""
        if self.kind not in ("images", "keys"):
            size = self.values.nbytes + (0 if self.vectors is None else self.vectors.nbytes)
            rows = max(1, min(rows, max_bytes * len(self) // max(1, size)))
            for first in range(0, len(self), rows):
                yield self.rows(slice(first, first + rows))
            return
        most = min(rows, MAX_PICTURES) if self.kind == "images" else rows
        first = size = 0
        for end, value in enumerate(self.values):
            if end > first and (end - first == most or size + len(value) > max_bytes):
                yield self.rows(slice(first, end))
                first, size = end, 0
            size += len(value)
        if len(self) > first:
            yield self.rows(slice(first, len(self)))


def with_vectors(queries: Queries, vectors: Any) -> Queries:
    """The queries with the vectors to rescore by, (n, width); None: without."""
    if vectors is None:
        return queries
    if queries.kind != "codes":
        raise DataError(
            f"features= are the vectors of codes; the server has those of {queries.kind}: leave features out"
        )
    rows = _features(as_array(vectors, "features"))
    if len(rows) != len(queries):
        raise DataError(f"{len(queries)} codes came with {len(rows)} rows of features")
    return Queries(queries.kind, queries.values, rows)


def as_queries(queries: Any = None, ids: Any = None, keys: Any = None) -> Queries:
    """A caller's argument as Queries: pictures, packed codes, features, or ids or keys of indexed items."""
    if sum(given is not None for given in (queries, ids, keys)) != 1:
        raise DataError("give one of queries (pictures, codes or features), ids= and keys=")
    if keys is not None:
        return Queries("keys", as_keys(keys))
    if ids is not None:
        return Queries("ids", as_ids(ids))
    if isinstance(queries, Queries):
        return queries
    if hasattr(queries, "detach"):  # a torch tensor, without importing torch
        queries = queries.detach().cpu().numpy()
    if _is_picture(queries):
        queries = [queries]
    if isinstance(queries, (list, tuple)) and queries and _is_picture(queries[0]):
        names = tuple(str(one) if isinstance(one, (str, os.PathLike)) else "" for one in queries)
        return Queries("images", [_picture(one) for one in queries], names=names)
    array = as_array(queries, "queries")
    if array.dtype == np.uint8 and array.ndim <= 2:
        return Queries("codes", check_codes(array))
    if array.dtype == np.uint8:
        raise DataError(f"pixels of shape {array.shape} cannot be sent; give files, bytes or PIL pictures")
    if array.dtype.kind == "f":
        return Queries("features", _features(array))
    raise CodeError(
        f"queries must be pictures (paths, bytes, PIL), packed uint8 codes or float features, got "
        f"{array.dtype} of shape {array.shape}; search by items of the index with ids="
    )


def as_ids(ids: Any) -> np.ndarray:
    """int64 (n,) of one id or many."""
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"ids must be whole numbers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def as_keys(keys: Any) -> list[str]:
    """A list of one key or many."""
    listed = [keys] if isinstance(keys, str) else list(keys)
    wrong = next((key for key in listed if not isinstance(key, str) or len(key) > MAX_KEY), None)
    if wrong is not None:
        raise DataError(f"keys are texts of at most {MAX_KEY} characters, got {str(wrong)[:40]!r}")
    return listed


def label_lists(labels: Any) -> list[list[int]] | list[list[str]]:
    """One list of class ids or of names per item, from lists, single labels or a multi-hot matrix."""
    if isinstance(labels, np.ndarray) and labels.ndim == 2:
        return [np.flatnonzero(row).tolist() for row in labels]
    lists = [[row] if isinstance(row, str) or np.ndim(row) == 0 else list(row) for row in labels]
    named = {isinstance(label, str) for row in lists for label in row}
    if len(named) > 1:
        raise DataError("labels are class ids or names, not both in one call")
    return lists if named == {True} else [[int(label) for label in row] for row in lists]


def _features(array: np.ndarray) -> np.ndarray:
    if array.ndim == 1:
        array = array[None, :] if len(array) else array.reshape(0, 0)  # [] holds no query
    if array.ndim != 2 or (len(array) and not array.shape[1]):
        raise DataError(f"features must have shape (n, d), got {array.shape}")
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array)).any(axis=1).argmax())
        raise DataError(f"features row {row} holds NaN or infinity; clean the input")
    return np.ascontiguousarray(array, dtype=np.float32)


def _is_picture(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike, bytes, bytearray)) or hasattr(value, "tobitmap")


def _picture(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, (str, os.PathLike)):
        try:
            return Path(value).expanduser().read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the picture {value}: {error.strerror or error}") from error
    if hasattr(value, "tobitmap"):  # a PIL picture, without importing PIL
        sink = io.BytesIO()
        value.convert("RGB").save(sink, format="PNG")
        return sink.getvalue()
    raise DataError(f"a picture must be a path, bytes or a PIL picture, got {type(value).__name__}")
