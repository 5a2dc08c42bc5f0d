"""Feature vectors on their way into a manifest: shape, finiteness, and the Arrow column they become."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

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
        raise DataError(f"{where} row {first_row + row} holds NaN or an infinite value; correct or drop it")


def from_column(column: pa.ChunkedArray, n_features: int | None, where: str, first_row: int) -> np.ndarray:
    """float32 (n, d) of a list column; every row must be there, have the same length and be finite."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        row = first_row + array.is_null().index(True).as_py()
        raise DataError(f"{where} row {row} has no feature vector; drop the row")
    if not pa.types.is_fixed_size_list(array.type):
        lengths = array.value_lengths().to_numpy()
        wanted = n_features or int(lengths[0])
        wrong = np.flatnonzero(lengths != wanted)
        if len(wrong):
            raise DataError(
                f"{where} row {first_row + wrong[0]} has {lengths[wrong[0]]} values, the first has {wanted}; "
                "all feature vectors must be of one length"
            )
    flat = array.flatten().to_numpy(zero_copy_only=False)
    features = flat.astype(np.float32, copy=False).reshape(len(array), -1)
    check_finite(features, where, first_row)
    return features
