"""Arrays at the borders: what a caller passed as one, and rows of bytes as Arrow columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from hashnet.errors import CodeError


def as_array(values: Any, name: str) -> np.ndarray:
    """``values`` as they are or as numpy takes them; rows of different lengths are no array.

    >>> as_array([[1], [2, 3]], "labels")
    Traceback (most recent call last):
    hashnet.errors.CodeError: labels are no array: their rows differ in length; give rows of one length
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise CodeError(
            f"{name} are no array: their rows differ in length; give rows of one length"
        ) from error


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
