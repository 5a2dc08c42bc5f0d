"""``where=``: which items a search may find, by a condition on their columns, by ids, by labels.

    where="year >= 2020 and city in ('Rome', 'Oslo')"    a condition (``hashnet.index.expressions``)
    where=pc.field("year") >= 2020                       the same as a pyarrow.compute expression
    where=[3, 17, 42]                                    these ids
    where={"labels": [5, 8]}                             items with at least one of these labels
    where={"ids": …, "labels": …, "condition": …}        all of them at once

An id the index does not hold matches nothing; a label outside its classes is a mistake, and so is an unknown
column or a value of another type than the column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero

from hashnet.errors import IndexMismatch, Unsupported
from hashnet.index.expressions import LABELS, Condition, nearest_name, parse_condition
from hashnet.index.rows import Selection, StoredRows
from hashnet.io import check_ids

FILTER_KEYS = ("ids", "labels", "condition")
LABELS_HINT = (
    'labels are no column of an Arrow expression: give {"labels": [3, 5], "condition": expression}, '
    'or the condition as text, "labels in (3, 5) and …"'
)
# What Arrow raises where an expression does not fit the columns, or fails on a value in them.
UNFIT = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowIndexError, pa.ArrowKeyError, TypeError)


@dataclass(frozen=True)
class Where:
    """A checked filter: sorted ids, labels, a condition, or several of them."""

    ids: np.ndarray | None = None
    labels: list[int] | None = None
    condition: Condition | None = None
    text: str | None = None  # the condition, where it is all there is

    def selection(self, rows: StoredRows, live: Selection | None) -> Selection:
        """The rows it lets through, of those that are ``live``."""
        masks = [] if live is None else [live.mask]
        found = []
        if self.ids is not None:
            places = rows.find(self.ids)
            found.append(np.unique(places[places >= 0]))
        if self.labels is not None:
            found.append(rows.rows_with(self.labels))
        if self.condition is not None:
            masks.append(_matching(self.condition, rows))
        if not found:
            return Selection(len(rows), mask=reduce(np.bitwise_and, masks))
        positions = reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), found)
        for mask in masks:
            positions = positions[mask[positions] == 1]
        return Selection(len(rows), positions=positions)


def _matching(condition: Condition, rows: StoredRows) -> np.ndarray:
    """uint8 (n,): 1 where the condition is true."""
    table = rows.columns if rows.columns is not None else pa.table({})
    columns = {name: table[name] for name in table.schema.names} | {"id": pa.array(rows.ids)}
    for name, labels in condition.label_sets.items():
        mask = np.zeros(len(rows), dtype=bool)
        mask[rows.rows_with(labels)] = True
        columns[name] = pa.array(mask)
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.table(columns)))
    project = acero.Declaration("project", acero.ProjectNodeOptions([condition.expression], ["true"]))
    try:
        found = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False)  # in order
    except UNFIT as error:  # 1 / 0, a text that is no number, a list without that element
        raise IndexMismatch(f"where= fails on the items of this index: {_reason(error)}") from error
    return _unpacked(found["true"].fill_null(False))


def _unpacked(bits: pa.ChunkedArray) -> np.ndarray:
    """uint8 (n,) of booleans without nulls; Arrow's own cast takes four times as long."""
    parts = [np.empty(0, dtype=np.uint8)]
    for chunk in filter(len, bits.chunks):
        packed = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
        end = chunk.offset + len(chunk)
        parts.append(np.unpackbits(packed, count=end, bitorder="little")[chunk.offset :])
    return np.concatenate(parts)


def parse_where(where: Any, n_classes: int | None, schema: pa.Schema | None) -> Where | None:
    """The filter that ``where`` describes, or an error that says what it may be."""
    if where is None or isinstance(where, Where):
        return where
    if isinstance(where, (str, pc.Expression)):
        text = where if isinstance(where, str) else None
        return Where(condition=_condition(where, n_classes, schema), text=text)
    if not isinstance(where, Mapping):
        return Where(_whole(where, "ids"))
    unknown = sorted(map(str, set(where) - set(FILTER_KEYS)))
    if unknown or not where:
        raise IndexMismatch(
            f"where= knows the keys ids, labels and condition, got {', '.join(unknown) or 'none'}"
        )
    ids = _whole(where["ids"], "ids") if where.get("ids") is not None else None
    labels = _labels(where["labels"], n_classes) if where.get("labels") is not None else None
    condition = where.get("condition")
    checked = None if condition is None else _condition(condition, n_classes, schema)
    return None if ids is labels is checked is None else Where(ids, labels, checked)


def _condition(where: Any, n_classes: int | None, schema: pa.Schema | None) -> Condition:
    schema = (pa.schema([]) if schema is None else schema).append(pa.field("id", pa.int64()))
    if isinstance(where, str):
        return parse_condition(where, schema, n_classes)
    if not isinstance(where, pc.Expression):
        raise IndexMismatch(
            f"a condition is text or a pyarrow.compute expression, got {type(where).__name__}"
        )
    try:
        schema.empty_table().filter(where)
    except UNFIT as error:
        missing = re.search(r"No match for FieldRef\.Name\((.*?)\)", str(error))
        if missing:
            by_label = missing[1] == LABELS and n_classes is not None
            hint = LABELS_HINT if by_label else nearest_name(missing[1], schema.names)
            raise IndexMismatch(f"where= names a column {missing[1]!r}; {hint}") from error
        raise IndexMismatch(f"where= does not fit the columns: {_reason(error)}") from error
    return Condition(where)


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _labels(values: Any, n_classes: int | None) -> list[int]:
    if n_classes is None:
        raise Unsupported(
            "this index was built without labels; build it from codes with labels to filter by them"
        )
    labels = _whole(values, "labels").tolist()
    outside = [label for label in labels if not 0 <= label < n_classes]
    if outside:
        raise IndexMismatch(
            f"where= names label {outside[0]}, but the index has {n_classes} classes, 0..{n_classes - 1}"
        )
    return labels


def _whole(values: Any, name: str) -> np.ndarray:
    """Sorted distinct int64 of a number, a set, a list or an array of them."""
    return np.unique(check_ids(values, f"{name} of where=", IndexMismatch))
