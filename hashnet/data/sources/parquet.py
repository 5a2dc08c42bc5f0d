"""``parquet``: pictures as bytes (plain, or a struct with ``bytes`` and ``path``), or feature vectors.

Pictures stay where they are and are given by reference; ``inline`` copies them into the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashnet import storage
from hashnet.config import REQUIRED, key
from hashnet.data import features as vectors
from hashnet.data.class_lists import read_names
from hashnet.data.files import complete, expand, parent
from hashnet.data.label_columns import is_list, read_labels
from hashnet.data.references import parquet_values
from hashnet.data.rows import Rows, refuse_duplicates
from hashnet.errors import DataError


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
    multi_hot: bool = key(False, "the label column holds a 0 or 1 for each class")
    id: str | None = key(None, "column with ids: checked for duplicates, and what split files name rows by")
    n_classes: int | None = key(None, "number of classes, where ids of the last ones may be missing", low=1)
    class_names: list[str] = key([], "names of the classes, or a text file with one a line")
    inline: bool = key(False, "copy the pictures into the manifest: faster to read in random order")


def load(options: Options) -> Rows:
    """Rows in the order of the files."""
    files = expand(options.path, ".parquet")
    schema, n = _schema_and_rows(files)
    image, feature = _payload_column(options, schema, files[0])
    label = options.label or next((name for name in ("labels", "label") if name in schema.names), None)
    columns = _columns(files, schema, [name for name in dict.fromkeys((label, options.id)) if name])
    labels, names, n_classes = _labels(options, label, columns)
    ids = columns[options.id].cast(pa.string()) if options.id else None
    if ids is not None:
        refuse_duplicates(ids, f"column {options.id!r} of {options.path}")
    about: dict[str, Any] = {"labels": labels, "n_classes": n_classes, "class_names": names, "names": ids}
    if feature is not None:
        first = next(_groups(files, [feature]), None)
        d = (
            len(first[1][feature][0])
            if first is not None and first[1].num_rows and first[1][feature][0].is_valid
            else 0
        )
        stream = _feature_tables(files, feature, d, ids)
        return Rows(n, InOrder(stream), modality="features", n_features=d, block_rows=4_096, **about)
    assert image is not None
    tables = _image_tables(files, image, pa.types.is_struct(schema.field(image).type), options.inline)
    return Rows(n, InOrder(tables), inline=options.inline, block_rows=4_096, **about)


class InOrder:
    """A payload out of tables of any size that come in order."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables, self._rest, self._at = tables, list[pa.Table](), 0

    def __call__(self, start: int, stop: int) -> pa.Table:
        assert start == self._at, "asked for in ascending blocks"
        while sum(map(len, self._rest)) < stop - start:
            self._rest.append(next(self._tables))
        joined = pa.concat_tables(self._rest)
        self._at, self._rest = stop, [joined.slice(stop - start)]
        return joined.slice(0, stop - start)


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
    return {name: table[name].combine_chunks() for name in names}


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
        f"{', '.join(images) or 'none'}, features {', '.join(features) or 'none'}; say image= or feature="
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


def _feature_tables(files: list[str], column: str, d: int, ids: pa.Array | None) -> Iterator[pa.Table]:
    row = 0
    for (uri, group), table in _groups(files, [column]):
        for start in range(0, len(table), 4_096):
            part = table.slice(start, 4_096)
            matrix = vectors.from_column(part[column], d, uri, row)
            names = (
                ids[row : row + len(part)]
                if ids is not None
                else parquet_values(uri, column, group, len(table))[start : start + len(part)]
            )
            yield pa.table({"uri": names, "feature": vectors.to_column(matrix)})
            row += len(part)


def _image_tables(files: list[str], column: str, struct: bool, inline: bool) -> Iterator[pa.Table]:
    value = f"{column}.bytes" if struct else column
    for uri in files:
        file = _open(uri)
        for group in range(file.num_row_groups):
            n = file.metadata.row_group(group).num_rows
            uris = parquet_values(uri, value, group, n)
            if not inline and not struct:
                yield pa.table({"uri": uris})
                continue
            paths = _paths(file, column, group, uri) if struct else None
            if not inline:
                assert paths is not None
                yield pa.table({"uri": pc.coalesce(paths, uris) if _all_paths(file, group, value) else uris})
                continue
            data = file.read_row_group(group, columns=[value]).column(0).combine_chunks()
            data = data.field(0) if struct else data
            yield pa.table(
                {
                    "uri": pc.coalesce(paths, uris) if paths is not None else uris,
                    "image": data.cast(pa.binary()),
                }
            )


def _paths(file: pq.ParquetFile, column: str, group: int, uri: str) -> pa.Array | None:
    """The ``path`` field as uris beside the file, or None when the struct has none."""
    kind = file.schema_arrow.field(column).type
    if kind.get_field_index("path") < 0:
        return pa.nulls(file.metadata.row_group(group).num_rows, pa.string())
    paths = (
        file.read_row_group(group, columns=[f"{column}.path"])
        .column(0)
        .combine_chunks()
        .field(0)
        .cast(pa.string())
    )
    return complete(parent(uri), paths)


def _all_paths(file: pq.ParquetFile, group: int, value: str) -> bool:
    """Whether the bytes are null throughout the row group, so that the pictures lie at their paths."""
    meta = file.metadata.row_group(group)
    for i in range(meta.num_columns):
        chunk = meta.column(i)
        if chunk.path_in_schema == value and chunk.statistics is not None:
            return chunk.statistics.null_count == meta.num_rows
    return False
