"""Arrow tables cut into other lengths, rows of bytes as Arrow columns, and callers' values as arrays."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from hashnet.errors import CodeError, HashnetError


def as_array(values: Any, name: str) -> np.ndarray:
    """``values`` as a numpy array; CodeError for rows of different lengths.

    >>> as_array([[1], [2, 3]], "labels")
    Traceback (most recent call last):
    hashnet.errors.CodeError: labels are not an array: their rows differ in length; give rows of one length
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise CodeError(
            f"{name} are not an array: their rows differ in length; give rows of one length"
        ) from error


def check_ids(
    values: Any,
    name: str = "ids",
    error: type[HashnetError] = CodeError,
    *,
    n: int | None = None,
    lowest: int | None = None,
) -> np.ndarray:
    """int64 (n,) of one whole number or many, none below ``lowest``; ``error`` for anything else.

    >>> check_ids([2**63])
    Traceback (most recent call last):
    hashnet.errors.CodeError: ids must fit into int64, got 9223372036854775808
    """
    array = np.atleast_1d(
        as_array(list(values) if isinstance(values, (set, frozenset, range)) else values, name)
    )
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise error(f"{name} must be whole numbers of shape (n,), got {array.dtype} of shape {array.shape}")
    if n is not None and len(array) != n:
        raise error(f"{n} codes came with {len(array)} {name}; give one id per code")
    if len(array) and int(array.max()) > np.iinfo(np.int64).max:  # a cast would make it negative
        raise error(f"{name} must fit into int64, got {array.max()}")
    array = array.astype(np.int64)
    if lowest is not None and len(array) and array.min() < lowest:
        raise error(f"{name} must be >= {lowest} (-1 marks an unused slot), got {array.min()}")
    return array


def type_from_text(text: str) -> pa.DataType:
    """The Arrow type that ``str`` of a type names: a plain one, a timestamp, or a list of one of these.

    >>> type_from_text("list<element: string>"), type_from_text("timestamp[us, tz=UTC]")
    (ListType(list<element: string>), TimestampType(timestamp[us, tz=UTC]))
    """
    if found := re.fullmatch(r"list<(?:element|item): (.+)>", text):
        return pa.list_(pa.field(text[5:].partition(":")[0], type_from_text(found[1])))
    if found := re.fullmatch(r"timestamp\[(\w+), tz=(.+)\]", text):
        return pa.timestamp(found[1], found[2])
    return pa.type_for_alias(text)


def binary_matrix(column: pa.ChunkedArray | pa.Array, width: int) -> np.ndarray:
    """uint8 (n, width) of a fixed_size_binary column, without a copy where it has one chunk."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    views = [
        np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * width, chunk.offset * width)
        for chunk in chunks
        if len(chunk)
    ]
    if not views:
        return np.zeros((0, width), dtype=np.uint8)
    return (views[0] if len(views) == 1 else np.concatenate(views)).reshape(-1, width)


def binary_column(matrix: np.ndarray) -> pa.Array:
    """fixed_size_binary(width) of a uint8 (n, width) matrix, without a copy."""
    matrix = np.ascontiguousarray(matrix, dtype=np.uint8)
    return pa.Array.from_buffers(pa.binary(matrix.shape[1]), len(matrix), [None, pa.py_buffer(matrix)])


class TableBuffer:
    """Rows that arrive in tables of any length and leave in tables of another.

    >>> buffer = TableBuffer()
    >>> buffer.add(pa.table({"x": [1, 2, 3]}))
    >>> buffer.add(pa.table({"x": [4, 5]}))
    >>> buffer.take(4)["x"].to_pylist(), len(buffer)
    ([1, 2, 3, 4], 1)
    """

    def __init__(self) -> None:
        self._tables: deque[pa.Table] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the waiting rows."""
        return sum(table.nbytes for table in self._tables)

    def add(self, table: pa.Table) -> None:
        """Appends the rows of a table, without a copy."""
        self._tables.append(table)
        self._rows += len(table)

    def take(self, rows: int) -> pa.Table:
        """Removes and returns the first ``rows`` rows, of at least one table that was added."""
        taken, missing = [self._tables[0].slice(0, 0)], rows
        while missing:
            table = self._tables.popleft()
            taken.append(table.slice(0, missing))
            if len(table) > missing:
                self._tables.appendleft(table.slice(missing))
            missing -= len(taken[-1])
        self._rows -= rows
        if not self._tables:
            self._tables.append(taken[0])  # the columns stay known
        return pa.concat_tables(taken[1:] or taken)


def rechunk(tables: Iterable[pa.Table], rows: int | Iterable[int]) -> Iterator[pa.Table]:
    """The same rows in tables of ``rows`` rows each, or of each length in turn; the last has what is left.

    >>> [len(table) for table in rechunk([pa.table({"x": range(5)}), pa.table({"x": range(2)})], 3)]
    [3, 3, 1]
    """
    lengths = repeat(rows) if isinstance(rows, int) else iter(rows)
    buffer, length = TableBuffer(), next(lengths, None)
    for table in tables:
        buffer.add(table)
        while length is not None and len(buffer) >= length:
            yield buffer.take(length)
            length = next(lengths, None)
    if len(buffer):
        yield buffer.take(len(buffer))
