"""Tables cut into other lengths, against a list of rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet.errors import DataError
from hashnet.io import TableBuffer, check_ids, rechunk


def cut(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """The oracle: rows off the front of a list, one length after the other; what is left comes last."""
    pieces = []
    for length in lengths:
        if len(rows) < length:
            break
        pieces.append(rows[:length])
        rows = rows[length:]
    return [*pieces, rows] if rows else pieces


def tables_of(lengths: list[int]) -> list[pa.Table]:
    """Tables of these lengths whose rows count up from 0 over all of them."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        pa.table({"x": pa.array(range(start, start + n), pa.int64())})
        for start, n in zip(starts, lengths, strict=True)
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9))
def test_tables_of_one_length(given_lengths, rows):
    pieces = [table["x"].to_pylist() for table in rechunk(iter(tables_of(given_lengths)), rows)]
    total = sum(given_lengths)
    assert pieces == cut(list(range(total)), [rows] * (total + 1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=8), st.lists(st.integers(1, 9), max_size=8))
def test_tables_of_listed_lengths(given_lengths, lengths):
    pieces = [table["x"].to_pylist() for table in rechunk(tables_of(given_lengths), lengths)]
    assert pieces == cut(list(range(sum(given_lengths))), lengths)


def test_a_buffer_counts_the_rows_and_bytes_that_wait():
    buffer = TableBuffer()
    for table in tables_of([3, 0, 4]):
        buffer.add(table)
    assert (len(buffer), buffer.nbytes) == (7, 56)
    assert buffer.take(5)["x"].to_pylist() == [0, 1, 2, 3, 4]
    assert (len(buffer), buffer.nbytes) == (2, 16)
    assert buffer.take(2)["x"].to_pylist() == [5, 6]
    assert buffer.take(0).column_names == ["x"]


@pytest.mark.parametrize(
    ("given", "ids"),
    [(7, [7]), ([], []), ({5}, [5]), (range(2), [0, 1]), (np.array([2**63 - 1], np.uint64), [2**63 - 1])],
)
def test_ids_are_int64(given, ids):
    checked = check_ids(given)
    assert checked.dtype == np.int64
    assert checked.tolist() == ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2**63], f"ids must fit into int64, got {2**63}"),
        ([2**64], "ids must be whole numbers"),
        ([-1, 2**63], "ids must be whole numbers"),
        ([0.0], "whole numbers .* got float64"),
        ([[1]], r"whole numbers .* shape \(1, 1\)"),
        ([1, -2], "ids must be >= -1 .* got -2"),
        ([1], "2 codes came with 1 ids"),
    ],
)
def test_other_ids_are_refused_by_the_callers_error(given, message):
    with pytest.raises(DataError, match=message):
        check_ids(given, error=DataError, n=2 if message[0] == "2" else None, lowest=-1)
