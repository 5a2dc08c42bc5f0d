"""Split flags and their Arrow form, against plain loops."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashnet.data import splits
from hashnet.errors import DataError


@given(st.lists(st.integers(0, 7), max_size=50))
def test_flags_and_lists_are_the_same_thing(values):
    flags = np.array(values, dtype=np.uint8)
    lists = splits.to_lists(flags)
    assert lists.type == pa.list_(pa.string())
    for flag, names in zip(values, lists.to_pylist(), strict=True):
        assert names == [n for n, bit in (("train", 1), ("query", 2), ("database", 4)) if flag & bit]
    np.testing.assert_array_equal(splits.from_lists(lists), flags)


def test_counts():
    flags = np.array([splits.TRAIN | splits.DATABASE, splits.DATABASE, splits.DATABASE, 0], dtype=np.uint8)
    assert splits.counts(flags) == {"train": 1, "database": 3}


def test_slices_and_nulls():
    lists = pa.chunked_array([pa.array([["query"], None]), pa.array([["database", "train"], []])])
    np.testing.assert_array_equal(splits.from_lists(lists.slice(1)), [0, 5, 0])


def test_an_unknown_split_is_named():
    with pytest.raises(DataError, match="there is no split 'gallery'; a row is in some of train, query, dat"):
        splits.from_lists(pa.array([["gallery"]]))
