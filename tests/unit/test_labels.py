"""Relevance, Jaccard and pair counts against double loops over Python sets."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hashnet import labels
from hashnet.errors import CodeError, DataError

MULTI_HOT = st.integers(1, 70).flatmap(
    lambda c: hnp.arrays(np.uint8, st.tuples(st.integers(0, 9), st.just(c)), elements=st.integers(0, 1))
)


def sets(multi_hot):
    return [{c for c, on in enumerate(row) if on} for row in multi_hot.tolist()]


@given(MULTI_HOT)
def test_relevance_and_jaccard_equal_set_loops(rows):
    as_sets = sets(rows)
    assert labels.share_label(rows, rows).tolist() == [[bool(a & b) for b in as_sets] for a in as_sets]
    expected = [[len(a & b) / len(a | b) if a | b else 0.0 for b in as_sets] for a in as_sets]
    found = labels.jaccard(rows, rows)
    assert found == pytest.approx(np.array(expected).reshape(found.shape), abs=1e-6)


@given(MULTI_HOT)
def test_packed_words_say_the_same(rows):
    words = labels.pack_labels(rows)
    assert words.dtype == np.uint64
    for a, x in enumerate(sets(rows)):
        for b, y in enumerate(sets(rows)):
            assert bool((words[a] & words[b]).any()) == bool(x & y)


@settings(max_examples=60)
@given(MULTI_HOT)
def test_pair_counts_equal_the_double_loop(rows):
    as_sets = sets(rows)
    pairs = [(as_sets[i], as_sets[j]) for i in range(len(rows)) for j in range(i)]
    found = labels.count_pairs(rows)
    assert found.n_pairs == len(pairs)
    assert found.n_similar == sum(bool(a & b) for a, b in pairs)
    assert found.n_dissimilar == sum(not a & b for a, b in pairs)
    assert found.jaccard_sum == pytest.approx(
        sum(len(a & b) / len(a | b) for a, b in pairs if a & b), abs=1e-4
    )


def test_pair_counts_over_several_blocks(monkeypatch):
    rows = np.random.default_rng(0).integers(0, 2, (200, 12)).astype(np.uint8)
    whole = labels.count_pairs(rows)
    monkeypatch.setattr(labels, "PATTERN_BLOCK", 7)
    assert labels.count_pairs(rows).n_similar == whole.n_similar
    assert labels.count_pairs(rows).jaccard_sum == pytest.approx(whole.jaccard_sum)


def test_many_patterns_are_compared_in_smaller_blocks(monkeypatch):
    rows = np.random.default_rng(0).integers(0, 2, (200, 12)).astype(np.uint8)
    whole, jaccard, cells = labels.count_pairs(rows), labels.jaccard, []

    def watched(a, b):
        cells.append(len(a) * len(b))
        return jaccard(a, b)

    monkeypatch.setattr(labels, "jaccard", watched)
    for most in (1000, 1):  # five patterns at once, and always one
        monkeypatch.setattr(labels, "PATTERN_CELLS", most)
        found = labels.count_pairs(rows)
        assert (found.n_pairs, found.n_similar) == (whole.n_pairs, whole.n_similar)
        assert found.jaccard_sum == pytest.approx(whole.jaccard_sum)
        assert max(cells) <= 1000


def test_pair_ratio_of_a_large_single_label_set():
    # 100 classes of 1,000: 100 * C(1000, 2) similar pairs of C(100000, 2)
    found = labels.count_pairs(np.repeat(np.arange(100), 1000))
    assert found.n_similar == 100 * 1000 * 999 // 2
    assert found.ratio == pytest.approx((100_000 * 99_999 // 2) / found.n_similar - 1)


def test_no_similar_pair_is_an_infinite_ratio():
    assert labels.count_pairs(np.arange(3)).ratio == float("inf")


@given(MULTI_HOT)
def test_arrow_lists_round_trip(rows):
    lists = labels.to_lists(rows)
    assert lists.type == pa.list_(pa.int32())
    assert [set(x) for x in lists.to_pylist()] == sets(rows)
    assert np.array_equal(labels.from_lists(lists, rows.shape[1]), rows)


def test_null_lists_and_sliced_lists():
    lists = pa.array([[0], None, [], [2, 1]], pa.list_(pa.int32()))
    assert labels.from_lists(lists, 3).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert labels.from_lists(lists[2:], 3).tolist() == [[0, 0, 0], [0, 1, 1]]
    assert labels.from_lists(pa.chunked_array([lists[:1], lists[3:]]), 3).tolist() == [[1, 0, 0], [0, 1, 1]]


def test_class_ids_become_one_hot():
    assert labels.as_multi_hot(np.array([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert labels.as_multi_hot(np.array([1]), n_classes=4).tolist() == [[0, 1, 0, 0]]
    assert labels.as_multi_hot([[True, False]]).dtype == np.uint8


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: labels.as_multi_hot([[0, 2]]), CodeError, "only 0 and 1; row 0"),
        (lambda: labels.as_multi_hot([-1, 2]), CodeError, "got -1 in row 0"),
        (lambda: labels.as_multi_hot([5], n_classes=3), CodeError, "class 5, but there are only 3"),
        (lambda: labels.as_multi_hot([0.5]), CodeError, "whole numbers"),
        (lambda: labels.as_multi_hot(np.zeros((1, 1, 1))), CodeError, "class ids"),
        (lambda: labels.as_multi_hot([[0, 1]], n_classes=3), CodeError, "2 classes where 3"),
        (lambda: labels.jaccard([[0, 1]], [[1]]), CodeError, "label widths differ: 2 and 1"),
        (lambda: labels.from_lists(pa.array([[7]], pa.list_(pa.int32())), 3), DataError, "7"),
    ],
)
def test_wrong_labels_name_both_values(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
