"""Codes from elsewhere: a CodeStore from numpy or Parquet files of binary embeddings, without a model.

Three conventions are read. ``packed`` is ours, also numpy's ``packbits`` and the ``ubinary`` of
sentence-transformers: uint8, most significant bit first. ``binary`` is their int8, the same minus 128.
``signs`` has one number per bit, which is set where the number is >= 0, or one boolean. Other types of
integers, as Python's become in Arrow, are read where the convention is given.

    store = import_codes(CodesOptions(path="codes.parquet", key="url", columns=["year"]), "runs/mine/codes")
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.codes import pack_signs
from hashnet.data import expand_pattern, further_columns, read_labels, read_names
from hashnet.errors import DataError
from hashnet.io import REQUIRED, binary_matrix, key, storage
from hashnet.store.code_store import CodeStore
from hashnet.store.commit import ROWS_PER_SHARD, write_store

CONVENTIONS = ("packed", "ubinary", "binary", "signs")
CODE_COLUMNS = ("code", "codes", "embedding", "embeddings")  # tried in this order
BESIDE = {"id": "ids", "label": "labels", "key": "keys"}  # column in Parquet → file beside an .npy


@dataclass(frozen=True)
class CodesOptions:
    path: str = key(
        REQUIRED, "codes.npy, an .npz with `codes`, a Parquet file, a folder of them, or a pattern"
    )
    code: str | None = key(None, "Parquet: column of the codes (default: code, codes, embedding, embeddings)")
    convention: str | None = key(
        None,
        "packed or ubinary: 0 to 255; binary: these minus 128; signs: a number or boolean per bit "
        "(default: by type)",
        choices=CONVENTIONS,
    )
    id: str | None = key(None, "Parquet: column of whole numbers (default: 0, 1, 2, …)")
    uri: str | None = key(None, "Parquet: column with the path or URL of each item")
    label: str | None = key(None, "Parquet: column of a class id, a class name, or a list of them")
    columns: list[str] = key([], "Parquet: further columns to keep; all: every other column")
    ids: str | None = key(None, "ids.npy, for an .npy of codes")
    labels: str | None = key(None, "labels.npy, for an .npy of codes: class ids, or 0 and 1 per class")
    keys: str | None = key(None, "names.txt (one per line) or names.npy, for an .npy of codes: their keys")
    n_classes: int | None = key(None, "number of classes, where ids of the last ones may be missing", low=1)
    class_names: list[str] = key([], "names of the classes in order, or a text file with one per line")
    rows_per_shard: int = key(ROWS_PER_SHARD, "rows per shard", low=1)
    # last, because the name hides the function
    key: str | None = key(None, "Parquet: column with a text, or a whole number, that names each item")


def import_codes(options: CodesOptions, out: str, overwrite: bool = False) -> CodeStore:
    """The store ``out`` of the codes in the files; everything is held in memory while it is written."""
    numpy_file = storage.name_of(options.path).lower().endswith((".npy", ".npz"))
    found = _from_numpy(options) if numpy_file else _from_parquet(options)
    codes = as_packed(found.pop("codes"), options.convention, options.path)
    return write_store(
        out,
        codes,
        rows_per_shard=options.rows_per_shard,
        lineage={"codes_from": storage.name_of(options.path)},
        overwrite=overwrite,
        **found,
    )


def as_packed(values: np.ndarray, convention: str | None, where: str) -> np.ndarray:
    """Packed codes, uint8 (n, n_bits // 8), of values in one of the conventions (None: by their type).

    >>> as_packed(np.array([[-128, 127]], dtype=np.int8), None, "x").tolist()
    [[0, 255]]
    """
    if values.ndim != 2 or not values.size:
        raise DataError(f"the codes of {where} must have shape (n, bytes) with n > 0, got {values.shape}")
    if convention is None:
        convention = {"uint8": "packed", "int8": "binary"}.get(values.dtype.name)
        if convention == "binary" and np.isin(values, (-1, 0, 1)).all():
            raise DataError(
                f"{where} holds only -1, 0 and 1: are these signs (signs) or int8 codes (binary)?"
            )
    if convention == "signs":
        if values.dtype.kind in "iu" and values.min() == 0 and values.max() == 1:
            raise DataError(
                f"{where} holds only 0 and 1, none of which is below 0; give -1 and 1, or booleans"
            )
        return pack_signs(np.where(values, 1, -1) if values.dtype == bool else values)
    if convention is None or values.dtype.kind not in "iu":
        raise DataError(
            f"{where} holds {values.dtype}; codes are whole numbers 0 to 255 (packed, ubinary), these minus "
            "128 (binary), or one number or boolean per bit (signs): give the convention"
        )
    return _as_bytes(values, -128 if convention == "binary" else 0, f"{convention} codes", where)


def _as_bytes(values: np.ndarray, low: int, what: str, where: str) -> np.ndarray:
    """uint8 of integers of any type from ``low`` to ``low + 255``; DataError names the first other one."""
    wrong = (values < low) | (values > low + 255)
    if wrong.any():
        row, place = np.argwhere(wrong)[0]
        raise DataError(
            f"{where} row {row} holds {values[row, place]}; {what} are {low} to {low + 255}: "
            "correct it, or give the convention they follow"
        )
    return values.astype(np.uint8) ^ np.uint8(-low)


def _from_numpy(options: CodesOptions) -> dict[str, Any]:
    """The arguments of ``write_store`` from an .npy, with files beside it, or from an .npz."""
    given = [name for name in ("code", "id", "uri", "label", "key", "columns") if getattr(options, name)]
    if given:
        instead = f"give a file beside it, --{BESIDE[given[0]]}" if given[0] in BESIDE else "leave it out"
        instead += " names.txt (one per line) or names.npy" if given[0] == "key" else ""
        raise DataError(f"{given[0]} names a column, and {options.path} is not Parquet: {instead}")
    arrays = _load(options.path)
    arrays = {"codes": arrays} if isinstance(arrays, np.ndarray) else arrays
    if "codes" not in arrays:
        raise DataError(f"{options.path} has no array 'codes'; it has {', '.join(arrays)}")
    beside = {"ids": options.ids, "labels": options.labels}
    arrays |= {name: _load(uri) for name, uri in beside.items() if uri}
    known = {name: arrays[name] for name in ("codes", "ids", "labels") if name in arrays}
    if options.keys or "keys" in arrays:
        keys = _read_keys(options.keys) if options.keys else arrays["keys"]
        known["columns"] = _key_column(keys, options.keys or options.path, arrays["codes"].shape)
    names = read_names(options.class_names) or None
    return known | {"n_classes": options.n_classes or (len(names) if names else None), "class_names": names}


def _read_keys(uri: str) -> Any:
    """The keys in a text file, one per line, or in an .npy."""
    if storage.name_of(uri).lower().endswith((".npy", ".npz")):
        return _load(uri)
    if not storage.exists(uri):
        raise DataError(f"{uri} does not exist; check the path")
    try:
        text = storage.read_bytes(uri).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{uri} is not UTF-8 text with a key per line: {error}") from error
    return np.array([line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")])


def _key_column(keys: Any, where: str, shape: tuple[int, ...]) -> pa.Table:
    """The keys as a column; DataError unless they are a text or a whole number per code."""
    if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype.kind not in "Uiu":
        what = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else "several arrays"
        raise DataError(f"{where} holds {what}; keys are one text or whole number per code")
    if keys.shape != shape[:1]:
        raise DataError(f"{where} holds {len(keys)} keys for codes of shape {shape}; give one per code")
    return pa.table({"key": pa.array(keys.astype(str), pa.string())})


def _load(uri: str) -> Any:
    if not storage.exists(uri):
        raise DataError(f"{uri} does not exist; check the path")
    try:
        with storage.local_copy(uri) as path:
            loaded = np.load(path, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {uri} as numpy arrays (without pickle): {error}") from error


def _from_parquet(options: CodesOptions) -> dict[str, Any]:
    """The arguments of ``write_store`` from the columns of Parquet files."""
    if given := [name for name in BESIDE.values() if getattr(options, name)]:
        column = next(column for column, name in BESIDE.items() if name == given[0])
        raise DataError(f"{given[0]} goes with .npy codes; in Parquet name the column with --{column}")
    files = expand_pattern(options.path, ".parquet")
    try:
        schema = pq.read_schema(storage.open_input(files[0]))
        code = options.code or next((name for name in CODE_COLUMNS if name in schema.names), None)
        if code is None or code not in schema.names:
            wanted = code or " or ".join(CODE_COLUMNS)
            raise DataError(
                f"{files[0]} has no column {wanted}; it has {', '.join(schema.names)}: give code="
            )
        used: set[str | None] = {code, options.id, options.uri, options.label, options.key}
        kept = further_columns(options.columns, options.key, schema, used, files[0])
        names = [name for name in dict.fromkeys([*used, *kept.values()]) if name]
        table = pa.concat_tables([pq.read_table(storage.open_input(uri), columns=names) for uri in files])
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"cannot read {options.path} as Parquet: {error}") from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise DataError(f"{files[0]} has no column {missing[0]!r}; it has {', '.join(schema.names)}")
    return {
        "codes": _matrix(table[code], f"column {code!r} of {options.path}"),
        "ids": table[options.id].to_numpy() if options.id else None,
        "uris": table[options.uri].to_pylist() if options.uri else None,
        "columns": pa.table({name: table[source] for name, source in kept.items()}) if kept else None,
        **_labels(options, table),
    }


def _matrix(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """The rows of a column of bytes or of lists of numbers, (n, width)."""
    if column.null_count:
        row = column.combine_chunks().is_null().index(True).as_py()
        raise DataError(f"{where}: row {row} has no code; remove the row")
    kind = column.type
    if pa.types.is_fixed_size_binary(kind):
        return binary_matrix(column, kind.byte_width)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        widths = pa.compute.unique(pa.compute.binary_length(column)).to_pylist()
        _refuse_widths(widths, where)
        return binary_matrix(column.cast(pa.binary(widths[0])), widths[0])
    array = column.combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise DataError(f"{where} is {kind}; codes are bytes or lists of numbers")
    _refuse_widths(pa.compute.unique(pa.compute.list_value_length(array)).to_pylist(), where)
    values = array.flatten()
    if values.null_count:
        place = values.is_null().index(True).as_py()
        row = pa.compute.list_parent_indices(array)[place].as_py()
        raise DataError(f"{where}: the code of row {row} holds a null; correct or remove the row")
    return values.to_numpy(zero_copy_only=False).reshape(len(array), -1)


def _refuse_widths(widths: list[int], where: str) -> None:
    if len(widths) != 1:
        raise DataError(f"{where} has codes of {min(widths)} and of {max(widths)} values; they must be equal")


def _labels(options: CodesOptions, table: pa.Table) -> Mapping[str, Any]:
    if not options.label:
        return {}
    column = table[options.label].combine_chunks()
    names = tuple(read_names(options.class_names)) or None
    lists, names, n_classes = read_labels(column, options.label, False, options.n_classes, names)
    return {"labels": lists, "n_classes": n_classes, "class_names": names}
