"""``parquet``: pictures as bytes (plain, or a struct with ``bytes`` and ``path``), or feature vectors.

Pictures stay where they are and are given by reference; ``inline`` copies them into the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashnet.data.columns import (
    expand_pattern,
    feature_column,
    features_from_column,
    further_columns,
    is_list,
    plain_column,
    read_labels,
    read_names,
    schema_type,
    uris_below,
)
from hashnet.data.fetch import parquet_value_uris
from hashnet.data.writer import SourceRows, refuse_duplicates
from hashnet.errors import DataError
from hashnet.io import REQUIRED, TableBuffer, key, storage


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "a file, a folder of files, or a pattern such as part-{000..012}.parquet")
    image: str | None = key(
        None, "column of the pictures (default: the one binary column, or struct with bytes)"
    )
    feature: str | None = key(None, "column of the feature vectors (default: the one list of numbers)")
    label: str | None = key(
        None, "column of a class id, a class name, or a list of them (default: label or labels)"
    )
    multi_hot: bool = key(False, "the label column holds a 0 or 1 per class")
    id: str | None = key(None, "column with ids, checked for duplicates; the row names in split files")
    columns: list[str] = key([], "further columns to keep for filters and hits; all: every other column")
    n_classes: int | None = key(None, "number of classes, where ids of the last ones may be missing", low=1)
    class_names: list[str] = key([], "names of the classes, or a text file with one per line")
    inline: bool = key(False, "copy the pictures into the manifest: faster to read in random order")
    # last, because the name hides the function
    key: str | None = key(None, "column with a text, or a whole number, that names each item, kept as `key`")


def load(options: Options) -> SourceRows:
    """Rows in the order of the files."""
    files = expand_pattern(options.path, ".parquet")
    schema, n = _schema_and_rows(files)
    image, feature = _payload_column(options, schema, files[0])
    label = options.label or next((name for name in ("labels", "label") if name in schema.names), None)
    used = dict.fromkeys(name for name in (label, options.id, options.key) if name)
    columns = _columns(files, schema, list(used))
    kept = further_columns(options.columns, options.key, schema, {*used, image, feature}, files[0])
    if options.key:
        refuse_duplicates(columns[options.key].cast(pa.large_string()), f"the keys of {options.path}")
    labels, names, n_classes = _labels(options, label, columns)
    ids = columns[options.id].cast(pa.large_string()) if options.id else None
    if ids is not None:
        refuse_duplicates(ids, f"column {options.id!r} of {options.path}")
    rows = partial(
        SourceRows,
        n=n,
        labels=labels,
        n_classes=n_classes,
        class_names=names,
        names=ids,
        columns={name: str(schema_type(schema, source, name)) for name, source in kept.items()},
        block_rows=4_096,
    )
    if feature is not None:
        d = _n_features(files, feature, schema.field(feature).type)
        if d == 0:
            raise DataError(f"column {feature!r} of {options.path} holds no numbers; check the files")
        stream = _with_columns(_feature_tables(files, feature, d, ids), files, kept)
        return rows(payload=_Payload(stream), modality="features", n_features=d)
    assert image is not None
    tables = _image_tables(files, image, schema.field(image).type, options.inline)
    return rows(payload=_Payload(_with_columns(tables, files, kept)), inline=options.inline)


def _with_columns(
    tables: Iterator[pa.Table], files: list[str], kept: Mapping[str, str]
) -> Iterator[pa.Table]:
    """The same tables with the further columns of their rows."""
    if not kept:
        yield from tables
        return
    waiting = TableBuffer()
    more = (table for _, table in _groups(files, list(dict.fromkeys(kept.values()))))
    for table in tables:
        while len(waiting) < len(table):
            waiting.add(next(more))
        beside = waiting.take(len(table))
        for name, source in kept.items():
            table = table.append_column(name, plain_column(beside[source], name))
        yield table


class _Payload:
    """The payload of ``SourceRows`` from tables of any length that come in order."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables, self._waiting, self._next = tables, TableBuffer(), 0

    def __call__(self, start: int, stop: int) -> pa.Table:
        assert start == self._next, "requested in ascending blocks"
        while len(self._waiting) < stop - start:
            self._waiting.add(next(self._tables))
        self._next = stop
        return self._waiting.take(stop - start)


def _open(uri: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(storage.open_input(uri))
    except pa.ArrowInvalid as error:
        raise DataError(f"{uri} is not Parquet: {error}") from error


def _schema_and_rows(files: list[str]) -> tuple[pa.Schema, int]:
    """The columns all files have, and the rows of all together."""
    schema, n = None, 0
    for uri in files:
        file = _open(uri)
        schema = schema or file.schema_arrow
        if not file.schema_arrow.equals(schema):
            raise DataError(f"{uri} has other columns than {files[0]}; they must be the same")
        n += file.metadata.num_rows
    return schema, n


def _columns(files: list[str], schema: pa.Schema, names: list[str]) -> dict[str, pa.Array]:
    """These columns of all files."""
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise DataError(f"{files[0]} has no column {missing[0]!r}; it has {', '.join(schema.names)}")
    if not names:
        return {}
    table = pa.concat_tables([_open(uri).read(names) for uri in files])
    return {name: _joined(table[name]) for name in names}


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """One array; text as large_string, see ``SourceRows``."""
    return (column.cast(pa.large_string()) if pa.types.is_string(column.type) else column).combine_chunks()


def _groups(files: list[str], columns: list[str]) -> Iterator[tuple[tuple[str, int], pa.Table]]:
    for uri in files:
        file = _open(uri)
        for group in range(file.num_row_groups):
            yield (uri, group), file.read_row_group(group, columns=columns)


def _payload_column(options: Options, schema: pa.Schema, uri: str) -> tuple[str | None, str | None]:
    """(image column, None) or (None, feature column)."""
    for name in (options.image, options.feature):
        if name is not None and name not in schema.names:
            raise DataError(f"{uri} has no column {name!r}; it has {', '.join(schema.names)}")
    if options.image and options.feature:
        raise DataError("give image or feature, not both: a manifest holds pictures or features")
    if options.image or options.feature:
        return options.image, options.feature
    taken = {options.id, options.label, "label", "labels"}
    images = [f.name for f in schema if _is_image(f.type) and f.name not in taken]
    features = [f.name for f in schema if _is_vector(f.type) and f.name not in taken]
    if len(images) == 1:
        return images[0], None
    if not images and len(features) == 1:
        return None, features[0]
    raise DataError(
        f"which column of {uri} holds the pictures or features? Pictures could be "
        f"{', '.join(images) or 'none'}, features {', '.join(features) or 'none'}; give image= or feature="
    )


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_vector(kind: pa.DataType) -> bool:
    return is_list(kind) and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def _labels(
    options: Options, name: str | None, columns: dict[str, pa.Array]
) -> tuple[pa.Array | None, tuple[str, ...] | None, int | None]:
    if name is None:
        return None, None, None
    given = tuple(read_names(options.class_names)) or None
    return read_labels(columns[name], name, options.multi_hot, options.n_classes, given)


def _n_features(files: list[str], column: str, kind: pa.DataType) -> int:
    """The length of the first vector, or 0 when there is none; files and row groups may be empty."""
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size
    for _, table in _groups(files, [column]):
        lengths = pc.list_value_length(table[column]).drop_null()
        if len(lengths):
            return lengths[0].as_py()
    return 0


def _feature_tables(files: list[str], column: str, d: int, ids: pa.Array | None) -> Iterator[pa.Table]:
    row = 0
    for (uri, group), table in _groups(files, [column]):
        for start in range(0, len(table), 4_096):
            part = table.slice(start, 4_096)
            matrix = features_from_column(part[column], d, uri, row)
            names = (
                ids[row : row + len(part)]
                if ids is not None
                else parquet_value_uris(uri, column, group, len(table))[start : start + len(part)]
            )
            yield pa.table({"uri": names, "feature": feature_column(matrix)})
            row += len(part)


def _image_tables(files: list[str], column: str, kind: pa.DataType, inline: bool) -> Iterator[pa.Table]:
    struct = pa.types.is_struct(kind)
    value = f"{column}.bytes" if struct else column
    with_paths = struct and kind.get_field_index("path") >= 0
    for uri in files:
        file = _open(uri)
        for group in range(file.num_row_groups):
            uris = parquet_value_uris(uri, value, group, file.metadata.row_group(group).num_rows)
            paths = uris
            if with_paths:
                given = _values(file, group, f"{column}.path").cast(pa.string()).combine_chunks()
                paths = pc.coalesce(uris_below(storage.parent_folder(uri), given), uris)
            if inline:
                yield pa.table({"uri": paths, "image": _values(file, group, value).cast(pa.binary())})
            elif with_paths:
                yield pa.table({"uri": pc.if_else(_has_bytes(file, group, value), uris, paths)})
            else:
                yield pa.table({"uri": uris})


def _values(file: pq.ParquetFile, group: int, name: str) -> pa.ChunkedArray:
    """A column of a row group; ``image.path`` is a struct's field, read without the others."""
    found = file.read_row_group(group, columns=[name]).column(0)
    return pc.struct_field(found, 0) if pa.types.is_struct(found.type) else found


def _has_bytes(file: pq.ParquetFile, group: int, value: str) -> pa.Scalar | pa.ChunkedArray:
    """Which rows hold their picture; reads the pictures only where the statistics do not tell."""
    meta = file.metadata.row_group(group)
    chunks = [meta.column(i) for i in range(meta.num_columns)]
    known = [c.statistics for c in chunks if c.path_in_schema == value and c.statistics is not None]
    nulls = known[0].null_count if known else None
    if nulls in (0, meta.num_rows):
        return pa.scalar(nulls == 0)
    return _values(file, group, value).is_valid()
