"""Columns of an index's items: an Arrow table per segment, in id order; string keys are its column ``key``.

On disk a segment's table is one Arrow IPC file, uncompressed: it is memory-mapped, and a filter or a hit
reads only the columns and rows it needs.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.errors import FormatError, IdTaken, IndexMismatch, Unsupported
from hashnet.index.expressions import nearest_name
from hashnet.io import storage

KEY = "key"
RESERVED = ("id", "labels", "code", "distance", "score")  # what a hit has without columns
ROWS_PER_BATCH = 1 << 16


def as_table(columns: Any, keys: Any, n: int) -> Any:
    """Columns (an Arrow table, or name → values) and keys of ``n`` items as one table, or None."""
    if columns is None and keys is None:
        return None
    try:
        table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns or {}))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise IndexMismatch(f"columns= must be an Arrow table or name → values: {error}") from error
    refuse_names(table.schema)
    given = {name: table[name] for name in table.schema.names}
    if keys is not None:
        if KEY in given:
            raise IndexMismatch(f"the column {KEY!r} is given twice: in columns= and as keys=")
        given[KEY] = _key_array(keys)
    for name, values in given.items():
        if len(values) != n:
            raise IndexMismatch(f"{n} codes came with {len(values)} values of {name!r}; give one per code")
    table = _plain(pa.table(given))
    if KEY in table.schema.names:
        refuse_repeated(table[KEY])
    return table


def refuse_names(schema: pa.Schema) -> None:
    """Names that would be ambiguous in a filter or a hit; keys that are not text."""
    names = schema.names
    for name in names:
        if name in RESERVED:
            raise IndexMismatch(f"a column cannot be called {name!r}, which every hit has; rename it")
        if names.count(name) > 1:
            raise IndexMismatch(f"the column {name!r} is given twice; give each name once")
    if KEY in names and not _is_text(schema.field(KEY).type):
        got = schema.field(KEY).type
        raise IndexMismatch(f"the column {KEY!r} names items and must hold text, got {got}")


def _key_array(keys: Any) -> pa.Array:
    try:
        array = pa.array(keys) if not isinstance(keys, (pa.Array, pa.ChunkedArray)) else keys
        if not _is_text(array.type):
            raise pa.ArrowInvalid(f"got {array.type}")
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise IndexMismatch(f"keys must be text, one per item: {error}") from error
    return array.cast(pa.large_string())


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _plain(table: pa.Table) -> pa.Table:
    """Without metadata and dictionaries; text has 64-bit offsets, so that tables of any size join."""
    fields = []
    for column in table.schema:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        fields.append(pa.field(column.name, pa.large_string() if pa.types.is_string(kind) else kind))
    return table.cast(pa.schema(fields))


def schema_of(table: pa.Table) -> pa.Schema:
    """The schema of an index whose first rows are these."""
    return _plain(table.slice(0, 0)).schema


def conform(table: pa.Table | None, schema: pa.Schema | None, n: int) -> pa.Table | None:
    """The columns of ``n`` items as an index with ``schema`` has them; a column left out holds nulls."""
    if schema is None:
        if table is not None:
            raise Unsupported("this index was built without columns and keys; add the codes without them")
        return None
    given = {} if table is None else {name: table[name] for name in table.schema.names}
    for name in given:
        if name not in schema.names:
            raise IndexMismatch(f"the index has no column {name!r}; {nearest_name(name, schema.names)}")
    columns = []
    for column in schema:
        values = given.get(column.name, pa.nulls(n, column.type))
        try:
            columns.append(values.cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise IndexMismatch(
                f"column {column.name!r} holds {column.type}, the new items have {values.type}: {error}"
            ) from error
    return pa.table(columns, schema=schema)


def refuse_repeated(keys: pa.ChunkedArray) -> None:
    """IdTaken where two items have the same key."""
    if pc.count_distinct(keys).as_py() == len(keys) - keys.null_count:
        return
    counts = pc.value_counts(keys.drop_null()).to_pylist()
    key, times = next((c["values"], c["counts"]) for c in counts if c["counts"] > 1)
    raise IdTaken(f"key {key!r} is given {times} times; a key belongs to one item")


def find_keys(table: pa.Table, keys: pa.Array) -> np.ndarray:
    """Row of each key, int64; -1 where the table does not hold it. One pass over its keys."""
    found = np.full(len(keys), -1, dtype=np.int64)
    place = pc.index_in(table[KEY], value_set=keys, skip_nulls=True).fill_null(-1).to_numpy()
    rows = np.flatnonzero(place >= 0)
    found[place[rows]] = rows
    return found


def check_keyed(schema: pa.Schema | None) -> None:
    """Unsupported unless the items have keys."""
    if schema is None or KEY not in schema.names:
        raise Unsupported("the items of this index have no keys; build it with keys= to name them")


def check_names(names: Any, schema: pa.Schema | None) -> list[str]:
    """The columns to return with hits."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise IndexMismatch(f"columns= must be a list of names, got {names!r}")
    known = [] if schema is None else schema.names
    for name in names:
        if name not in known:
            raise IndexMismatch(f"the index has no column {name!r}; {nearest_name(name, known)}")
    return list(names)


def write_table(uri: str, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression=None)
    with storage.open_output(uri) as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=ROWS_PER_BATCH)


def read_table(uri: str, n_rows: int, schema: pa.Schema) -> pa.Table:
    """The table at ``uri``, memory-mapped; FormatError unless it is the one the header describes.

    Columns that the index was given after the file was written hold nulls.
    """
    with storage.local_copy(uri) as path:  # a map keeps the bytes alive when a copy is deleted
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{uri} does not hold columns of an index: {error}") from error
    if table.num_rows != n_rows or any(column not in schema for column in table.schema):
        raise FormatError(
            f"{uri} holds {table.num_rows} rows of {table.schema.names}, not what the index says"
        )
    return table if table.schema == schema else conform(table, schema, n_rows)


def schema_text(schema: pa.Schema | None) -> str | None:
    """A schema as it stands in a header, in base 64."""
    return None if schema is None else base64.b64encode(schema.serialize().to_pybytes()).decode()


def read_schema(text: Any) -> pa.Schema | None:
    """The schema in a header; ValueError where it is none."""
    return None if text is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
