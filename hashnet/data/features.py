"""Feature vectors as a matrix and as the Arrow column ``feature`` of a manifest; what makes one unusable."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.errors import DataError


def to_column(features: np.ndarray) -> pa.Array:
    """Arrow fixed_size_list<float32, d> of a matrix (n, d)."""
    flat = np.ascontiguousarray(features, dtype=np.float32).ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), features.shape[1])


def check_finite(features: np.ndarray, where: str, first_row: int) -> None:
    """DataError naming the first row with NaN or an infinite value."""
    good = np.isfinite(features).all(axis=1)
    if not good.all():
        row = int(np.argmin(good))
        raise DataError(f"{where} row {first_row + row} holds NaN or an infinite value; correct or remove it")


def from_column(column: pa.ChunkedArray, n_features: int | None, where: str, first_row: int) -> np.ndarray:
    """float32 (n, d) of a list column; DataError for a missing, infinite or shorter or longer row."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        row = first_row + array.is_null().index(True).as_py()
        raise DataError(f"{where} row {row} has no feature vector; remove the row")
    if not pa.types.is_fixed_size_list(array.type):
        lengths = array.value_lengths().to_numpy()
        expected = n_features or int(lengths[0])
        wrong = np.flatnonzero(lengths != expected)
        if len(wrong):
            raise DataError(
                f"{where} row {first_row + wrong[0]} has {lengths[wrong[0]]} values, "
                f"the first has {expected}; all feature vectors must have the same length"
            )
    flat = array.flatten().to_numpy(zero_copy_only=False)
    features = flat.astype(np.float32, copy=False).reshape(len(array), -1)
    check_finite(features, where, first_row)
    return features


def feature_matrix(table: pa.Table) -> np.ndarray:
    """float32 (n, d) of the column ``feature``."""
    if "feature" not in table.column_names:
        raise DataError("these rows are pictures, they have no column 'feature'")
    column = table["feature"].combine_chunks()
    if column.null_count:
        raise DataError(f"row {column.is_null().index(True).as_py()} has no feature")
    return np.ascontiguousarray(column.flatten().to_numpy().reshape(len(column), -1), dtype=np.float32)


def feature_rows(table: pa.Table) -> tuple[np.ndarray, pa.Array]:
    """float32 (n, d), and per row the reason why it cannot be used: null, ``missing`` or ``not_finite``."""
    column = table["feature"].combine_chunks()
    width = column.type.list_size
    values = column.values.slice(column.offset * width, len(column) * width)  # null rows keep their place
    matrix = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(-1, width)
    finite = pa.array(np.isfinite(matrix).all(axis=1))
    reasons = pc.if_else(finite, pa.scalar(None, pa.string()), pa.scalar("not_finite"))
    return matrix, pc.if_else(column.is_valid(), reasons, pa.scalar("missing"))
