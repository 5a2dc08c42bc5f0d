"""Rows out of all proportion, and columns that say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hashnet.data import ordinary_rows, varying_columns
from hashnet.errors import DataError


def rows_of(*norms: float) -> np.ndarray:
    """A row (0.6 n, 0, 0.8 n) for each n."""
    return np.array([[0.6 * n, 0, 0.8 * n] for n in norms])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_of_over_a_hundred_times_the_median_is_not_ordinary(dtype):
    X = rows_of(1, 2, 3, 200.5, 2, 199.5)[:5].astype(dtype)  # the median is 2
    assert ordinary_rows(X).tolist() == [True, True, True, False, True]
    X[3] = rows_of(199.5)
    assert ordinary_rows(X).all()


def test_rows_of_zeros_do_not_make_the_others_outliers():
    assert ordinary_rows(rows_of(0, 0, 0, 1, 1.5)).all()
    assert ordinary_rows(np.zeros((4, 3))).all()
    assert ordinary_rows(np.zeros((0, 3))).all()


def test_many_large_rows_are_what_the_data_is_like():
    """Of 300 rows at most 3 can be outliers."""
    X = rows_of(*[1] * 297, *[1e6] * 3)
    assert (~ordinary_rows(X)).nonzero()[0].tolist() == [297, 298, 299]
    X[0] = X[-1]
    assert ordinary_rows(X).all()


def test_squares_beyond_float32_are_compared():
    X = rows_of(*[1e20] * 5, 1e25).astype(np.float32)  # 1e50 is infinite in float32
    assert ordinary_rows(X).tolist() == [True] * 5 + [False]


def test_varying_columns():
    X = np.array([[1, 2, 3], [1, 2.5, 3], [1, 2, 4]])
    assert varying_columns(X).tolist() == [False, True, True]
    with pytest.raises(DataError, match="all 3 columns of the features are constant in 2 rows"):
        varying_columns(X[[0, 0]])
