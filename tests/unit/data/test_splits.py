"""Splits: flags and lists against plain loops; protocols by counts, seeds, disjointness, zero-shot, files."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet.data import splits
from hashnet.data.splits import DATABASE, QUERY, TRAIN, Protocol, assign_splits
from hashnet.errors import ConfigError, DataError


@settings(deadline=None)
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


def some_labels(n: int, n_classes: int = 10, most: int = 3, seed: int = 0) -> pa.Array:
    rng = np.random.default_rng(seed)
    return pa.array(
        [sorted(set(rng.integers(0, n_classes, rng.integers(1, most + 1)).tolist())) for _ in range(n)],
        pa.list_(pa.int32()),
    )


def sets(flags: np.ndarray) -> tuple[set[int], set[int], set[int]]:
    return tuple({i for i, flag in enumerate(flags) if flag & bit} for bit in (TRAIN, QUERY, DATABASE))


@given(
    n=st.integers(20, 200), n_query=st.integers(0, 20), n_train=st.integers(0, 100), seed=st.integers(0, 5)
)
def test_counts_and_disjointness(n, n_query, n_train, seed):
    n_train = min(n_train, n - n_query)
    protocol = Protocol(n_query=n_query, n_train=n_train, seed=seed)
    train, query, database = sets(assign_splits(protocol, n))
    assert (len(train), len(query), len(database)) == (n_train, n_query, n - n_query)
    assert train <= database
    assert not query & database


def test_a_seed_repeats_and_another_differs():
    protocol = Protocol(n_query=30, n_train=50, seed=4)
    np.testing.assert_array_equal(assign_splits(protocol, 500), assign_splits(protocol, 500))
    assert (
        assign_splits(protocol, 500) != assign_splits(Protocol(n_query=30, n_train=50, seed=5), 500)
    ).any()


def test_a_split_is_pinned():
    """The draw must not change with versions: results are compared across years."""
    train, query, _ = sets(assign_splits(Protocol(n_query=3, n_train=4, seed=0), 30))
    assert (sorted(train), sorted(query)) == PINNED


PINNED = ([8, 12, 13, 20], [2, 11, 26])


def test_per_class_draws():
    labels = pa.array([[i % 5] for i in range(200)], pa.list_(pa.int32()))
    flags = assign_splits(Protocol(query_per_class=4, train_per_class=7), 200, labels, 5)
    train, query, database = sets(flags)
    for class_id in range(5):
        assert sum(i % 5 == class_id for i in query) == 4
        assert sum(i % 5 == class_id for i in train) == 7
    assert len(database) == 180
    assert train <= database


def test_per_class_draws_with_several_labels_draw_no_row_twice():
    labels = some_labels(400)
    train, query, _ = sets(assign_splits(Protocol(query_per_class=5, train_per_class=10), 400, labels, 10))
    assert len(query) == 50
    assert len(train) == 100
    for class_id in range(10):
        assert sum(class_id in labels[i].as_py() for i in query) >= 5


def test_defaults_without_a_wish():
    labels = some_labels(1000)
    train, query, database = sets(assign_splits(Protocol(), 1000, labels, 10))
    assert (len(train), len(query), len(database)) == (900, 100, 900)
    train, query, database = sets(assign_splits(Protocol(), 1000))
    assert (len(train), len(query), len(database)) == (0, 0, 1000)  # no labels: only to be searched


@pytest.mark.parametrize("seed", range(3))
def test_zero_shot_never_mixes_seen_and_unseen(seed):
    labels = some_labels(2000, n_classes=20, seed=seed)
    flags = assign_splits(Protocol(zero_shot=0.4, n_query=50, n_train=300, seed=seed), 2000, labels, 20)
    train, query, database = sets(flags)
    assert (len(train), len(query)) == (300, 50)
    seen = {c for i in train for c in labels[i].as_py()}
    unseen = {c for i in query | database for c in labels[i].as_py()}
    assert not seen & unseen
    assert len(unseen) == 8
    assert not train & database
    assert not query & database


def test_zero_shot_keeps_a_sources_queries():
    labels = pa.array([[i % 10] for i in range(1000)], pa.list_(pa.int32()))
    fixed = np.where(np.arange(1000) < 900, DATABASE, QUERY).astype(np.uint8)
    train, query, database = sets(
        assign_splits(Protocol(zero_shot=0.5, train_per_class=20), 1000, labels, 10, fixed=fixed)
    )
    assert query <= set(range(900, 1000))
    assert len(query) == 50
    assert database <= set(range(900))
    assert len(train) == 100
    assert train <= set(range(900))


def test_a_fixed_split_stays_unless_asked():
    labels = some_labels(100)
    fixed = np.array([QUERY] * 10 + [DATABASE] * 80 + [0] * 10, dtype=np.uint8)
    np.testing.assert_array_equal(assign_splits(Protocol(), 100, labels, 10, fixed=fixed), fixed)
    train, query, database = sets(assign_splits(Protocol(n_train=20), 100, labels, 10, fixed=fixed))
    assert query == set(range(10))
    assert database == set(range(10, 90))
    assert len(train) == 20
    assert train <= database


def test_split_files(tmp_path):
    names = pa.array([f"{i}.jpg" for i in range(10)])
    labels = pa.array([[0]] * 10, pa.list_(pa.int32()))
    for name, rows in (("train", [3, 4, 5]), ("query", [0, 1]), ("database", range(2, 9))):
        (tmp_path / f"{name}.txt").write_text("".join(f"{i}.jpg\n" for i in rows))
    words = [f"{name}={tmp_path}/{name}.txt" for name in ("train", "query", "database")]
    flags = assign_splits(Protocol(split_files=words), 10, labels, 1, names)
    assert sets(flags) == ({3, 4, 5}, {0, 1}, set(range(2, 9)))
    (tmp_path / "query.txt").write_text("\ufeff0.jpg\n1.jpg\n")
    marked = assign_splits(Protocol(split_files=words), 10, labels, 1, names.cast(pa.large_string()))
    np.testing.assert_array_equal(marked, flags)
    by_number = tmp_path / "numbers.txt"
    by_number.write_text("7\n8\n")
    assert sets(assign_splits(Protocol(split_files=[f"query={by_number}"]), 10))[1] == {7, 8}
    (tmp_path / "query.txt").write_text("0.jpg\nnowhere.jpg\n")
    with pytest.raises(DataError, match=r"query.txt line 2: there is no row named 'nowhere.jpg'"):
        assign_splits(Protocol(split_files=words), 10, labels, 1, names)
    (tmp_path / "query.txt").write_text("5.jpg\n")
    with pytest.raises(DataError, match=r"1 rows are query and database at once, the first is '5.jpg'"):
        assign_splits(Protocol(split_files=words), 10, labels, 1, names)
    with pytest.raises(DataError, match="cannot read the split file"):
        assign_splits(Protocol(split_files=[f"train={tmp_path}/none.txt"]), 10)
    with pytest.raises(DataError, match="split_files takes train=FILE"):
        assign_splits(Protocol(split_files=["train"]), 10)


def test_everything_into_named_splits():
    assert set(assign_splits(Protocol(all_in=["database"]), 5).tolist()) == {DATABASE}
    assert set(assign_splits(Protocol(all_in=["train", "database"]), 5).tolist()) == {TRAIN | DATABASE}
    for other in ("database", "train"):
        with pytest.raises(ConfigError, match="queries must not be in another split"):
            Protocol(all_in=["query", other])


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (
            Protocol(n_query=500, n_train=10),
            "500 query rows were requested, but there are only 100 to draw from; lower n_q",
        ),
        (
            Protocol(n_query=50, n_train=51),
            "51 training rows were requested, but there are only 50 to draw from; lower n_t",
        ),
        (
            Protocol(query_per_class=40),
            "class 0 has only .* images to draw 40 query images from; lower query_per_cl",
        ),
        (Protocol(zero_shot=0.01), r"zero_shot=0.01 of 10 classes leaves 0 unseen and 10 seen"),
        (Protocol(zero_shot=0.99), "leaves 10 unseen and 0 seen; both must be at least 1"),
    ],
)
def test_too_few_images_say_how_many_there_are(protocol, message):
    with pytest.raises(DataError, match=message):
        assign_splits(protocol, 100, some_labels(100), 10)


def test_labels_are_needed_where_they_are():
    for protocol in (Protocol(zero_shot=0.5), Protocol(query_per_class=1), Protocol(train_per_class=1)):
        with pytest.raises(DataError, match="needs labels and these rows have none"):
            assign_splits(protocol, 10)


@pytest.mark.parametrize("protocol", [Protocol(), Protocol(zero_shot=0.4), Protocol(all_in=["train"])])
@pytest.mark.parametrize(
    ("last", "n_classes", "message"),
    [
        ([0, -1], 5, "row 20 has class -1, but the classes are 0..4"),
        ([7], 5, "row 20 has class 7, but the classes are 0..4"),
        ([900_000_000], 900_000_001, "900,000,001 classes are too many, .* map the ids to 0..n-1, or give"),
    ],
)
def test_labels_are_checked_before_they_are_used(protocol, last, n_classes, message):
    labels = pa.array([[i % 5] for i in range(20)] + [last], pa.list_(pa.int32()))
    with pytest.raises(DataError, match=message):
        assign_splits(protocol, 21, labels, n_classes)


def test_no_similar_pair_is_refused():
    labels = pa.array([[i] for i in range(50)], pa.list_(pa.int32()))
    with pytest.raises(
        DataError, match="no two of the 20 training images share a label, so there is no similar"
    ):
        assign_splits(Protocol(n_query=5, n_train=20), 50, labels, 50)
