"""A label column of somebody's Parquet file, in any usual form → class id lists."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet import labels as label_sets
from hashnet.data.class_lists import by_name, class_sets, one_each
from hashnet.errors import CodeError, DataError

Labels = tuple[pa.Array, tuple[str, ...] | None, int]


def read_labels(
    column: pa.Array, name: str, multi_hot: bool, n_classes: int | None, class_names: tuple[str, ...] | None
) -> Labels:
    """Class id lists list<int32> (n,), class names or None, and the number of classes.

    A column holds a class id, a class name, a list of either, or (``multi_hot``) a 0 or 1 a class.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if multi_hot and is_list(kind):
        lists, width = _from_multi_hot(column, name)
        return lists, class_names, n_classes or width
    if _is_text(kind):
        _refuse_unknown(pc.unique(column).to_pylist(), class_names, name)
        lists, names = by_name(column.cast(pa.large_string()), class_names)
        return lists, tuple(names), len(names)
    if is_list(kind) and _is_text(kind.value_type):
        words = column.flatten().cast(pa.large_string())
        found = pc.unique(words).to_pylist()
        _refuse_unknown(found, class_names, name)
        classes = class_names or tuple(sorted(word for word in found if word is not None))
        ids = pc.index_in(words, value_set=pa.array(classes, pa.large_string()))
        return _with_values(column, ids), classes, len(classes)
    single = pa.types.is_integer(kind)
    if not single and not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        raise DataError(f"column {name!r} is {kind}; labels are class ids, names, or lists of them")
    values = column if single else column.flatten()
    top = pc.max(values).as_py() or 0
    if top >= label_sets.MAX_CLASSES:
        most = label_sets.MAX_CLASSES
        raise DataError(f"column {name!r} holds class {top}; number classes from 0, at most {most:,} of them")
    lists = one_each(column) if single else _with_values(column, values)
    return lists, class_names, n_classes or (len(class_names) if class_names else top + 1)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _refuse_unknown(found: list[str | None], class_names: tuple[str, ...] | None, name: str) -> None:
    unknown = sorted(set(found) - {None} - set(class_names or found))  # type: ignore[type-var]
    if unknown:
        raise DataError(f"column {name!r} has class {unknown[0]!r}, which is not among the class_names")


def _with_values(column: pa.Array, values: pa.Array) -> pa.Array:
    """The lists of ``column`` with other values in them, as sets: sorted, each once, without nulls."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(column)), lengths)
    known = values.is_valid().to_numpy(zero_copy_only=False)
    return class_sets(rows[known], values.drop_null().cast(pa.int32()).to_numpy(), len(column))


def _from_multi_hot(column: pa.Array, name: str) -> tuple[pa.Array, int]:
    lengths = pc.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != lengths[0])
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"column {name!r} row {row} has {lengths[row]} labels, row 0 has {lengths[0]}")
    values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    try:
        return label_sets.to_lists(label_sets.as_multi_hot(values, name=f"column {name!r}")), values.shape[1]
    except CodeError as error:
        raise DataError(str(error)) from error
