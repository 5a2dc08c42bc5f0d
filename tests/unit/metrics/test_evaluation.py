"""evaluate against the definitions written as loops, and what it does with odd and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hashnet
from hashnet.errors import CodeError, ConfigError, DataError, HashnetError
from hashnet.metrics import evaluate, validation_k, validation_map

KINDS = (
    "random", "multi", "tied", "class-sorted", "one distance", "equal codes", "nothing relevant",
    "all relevant",
)  # fmt: skip


def assert_same(report, expected) -> None:
    names = ("map", "map_retrieved_hits_only", "map_relevant", "ndcg", "chance")
    for name in (*names, "map_tie_aware", "map_relevant_first", "map_relevant_last"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name), abs=1e-12), name
    assert report.queries_without_hit == expected.queries_without_hit
    assert report.queries_without_relevant == expected.queries_without_relevant
    np.testing.assert_allclose(report.ap, expected.ap, atol=1e-12)
    np.testing.assert_allclose(report.ap_relevant, expected.ap_relevant, atol=1e-12)
    np.testing.assert_allclose(report.by_rank.precision, expected.precision, atol=1e-12)
    np.testing.assert_allclose(report.by_rank.recall, expected.recall, atol=1e-12)
    for name, values in expected.ball.items():
        np.testing.assert_allclose(getattr(report.by_radius, name), values, atol=1e-12)
    assert report.similar == tuple(expected.similar)
    assert report.dissimilar == tuple(expected.dissimilar)
    assert {s.class_id: s.n_queries for s in report.per_class} == {
        c: n for c, (n, _) in expected.per_class.items()
    }
    for score in report.per_class:
        assert score.map == pytest.approx(expected.per_class[score.class_id][1], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_bits", "k"), [(8, 10), (24, 60), (64, 7), (72, 1), (256, 1000)])
def test_every_metric_is_its_definition(slow, make, kind, n_bits, k):
    case = make(kind, n_bits=n_bits, seed=n_bits)
    ids = np.random.default_rng(1).permutation(10_000)[:60] - 50  # in no order, some negative
    report = hashnet.evaluate(*case, k=k, database_ids=ids, seed=3)
    assert_same(report, slow.evaluate(*case, k=k, ids=ids, seed=3))
    assert report.k == min(k, 60)
    assert report.map_relevant_last - 1e-12 <= report.map_tie_aware <= report.map_relevant_first + 1e-12
    assert report.map_relevant_last - 1e-12 <= report.map_relevant <= report.map_relevant_first + 1e-12


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_small_case(slow, data):
    n_bits = 8 * data.draw(st.integers(1, 10))
    q, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    few = rng.integers(0, 256, (3, n_bits // 8), dtype=np.uint8)  # few codes make many ties
    case = (
        few[rng.integers(0, 3, q)],
        rng.integers(0, 3, q),
        few[rng.integers(0, 3, n)],
        rng.integers(0, 3, n),
    )
    k = data.draw(st.integers(1, 40))
    assert_same(hashnet.evaluate(*case, k=k), slow.evaluate(*case, k=k))


def test_toy_case_of_the_three_denominators():
    # k = 3. A ranks hit, miss, hit and has 4 relevant items; B has no hit in its top 3, but 2 relevant items.
    # AP of A: (1/1 + 2/3) / 2 = 0.8333 retrieved; / min(3, 4) = 0.5556 relevant. B: 0 in both.
    near_a = [0b00000000, 0b00000001, 0b00000011, 0b00001111, 0b00001111]
    near_b = [0b11111111, 0b11111110, 0b11111100, 0b11110000, 0b11110000]
    codes = np.array([near_a + near_b], dtype=np.uint8).T
    labels = np.zeros((10, 3), dtype=np.uint8)
    labels[[0, 2, 3, 4], 0] = 1
    labels[[8, 9], 1] = 1
    queries = np.array([[0b00000000], [0b11111111]], dtype=np.uint8)
    report = hashnet.evaluate(queries, np.eye(3, dtype=np.uint8)[:2], codes, labels, k=3)
    assert report.map_retrieved_hits_only == pytest.approx(0.8333, abs=5e-5)
    assert report.map == pytest.approx(0.4167, abs=5e-5)
    assert report.map_relevant == pytest.approx(0.2778, abs=5e-5)
    assert report.queries_without_hit == 1
    assert report.queries_without_relevant == 0


def test_intervals_are_the_bootstrap_of_each_mean(make):
    report = hashnet.evaluate(*make("random", q=40), k=20, seed=5)
    for values, found in (
        (report.ap, report.map_interval),
        (report.ap_relevant, report.map_relevant_interval),
        (report.ap_tie_aware, report.map_tie_aware_interval),
    ):
        rng = np.random.default_rng(11)  # not the report's: the noise of 1,000 draws is allowed for
        means = sorted(sum(values[i] for i in rng.integers(0, 40, 40)) / 40 for _ in range(1000))
        assert found == pytest.approx((means[25], means[974]), abs=0.02)


def test_class_ids_and_multi_hot_mean_the_same(make):
    queries, query_labels, codes, labels = make("random")
    by_id = hashnet.evaluate(queries, query_labels, codes, labels, k=20)
    one_hot = np.eye(4)
    assert hashnet.evaluate(queries, one_hot[query_labels], codes, one_hot[labels], k=20) == by_id
    assert hashnet.evaluate(queries, query_labels, codes, one_hot[labels].astype(bool), k=20) == by_id


def test_the_order_of_storage_does_not_matter(make):
    queries, query_labels, codes, labels = make("class-sorted", n=500)
    ids = np.arange(500)
    order = np.random.default_rng(0).permutation(500)
    stored = hashnet.evaluate(queries, query_labels, codes, labels, k=100, database_ids=ids)
    shuffled = hashnet.evaluate(
        queries, query_labels, codes[order], labels[order], k=100, database_ids=ids[order]
    )
    assert stored == shuffled


def test_ties_do_not_favour_a_database_sorted_by_class():
    # all codes equal: a ranking by storage order would give the first class MAP 1
    codes, labels = np.zeros((4000, 8), np.uint8), np.repeat(np.arange(4), 1000)
    for c in range(4):
        report = hashnet.evaluate(codes[:1], [c], codes, labels, k=4000)
        assert report.map == pytest.approx(report.chance, abs=0.03)
        assert report.map_tie_aware == pytest.approx(report.map, abs=0.03)


def test_k_stops_at_the_database_and_none_means_all_of_it(make):
    case = make("random")
    assert (
        hashnet.evaluate(*case, k=None) == hashnet.evaluate(*case, k=60) == hashnet.evaluate(*case, k=10**6)
    )


def test_nothing_of_the_input_is_changed(make):
    case = make("multi")
    copies = [array.copy() for array in case]
    for array in case:
        array.setflags(write=False)
    hashnet.evaluate(*case, k=10, database_ids=np.arange(60))
    for array, copy in zip(case, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_database_without_a_relevant_item_has_documented_values(make):
    report = hashnet.evaluate(*make("nothing relevant"), k=10)
    assert report.map == report.map_relevant == report.map_tie_aware == report.map_retrieved_hits_only == 0
    assert report.queries_without_hit == report.queries_without_relevant == 5
    assert report.chance == 0
    assert set(report.by_radius.recall) == {0.0}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query_codes": np.zeros((2, 4), np.uint8)}, CodeError, "32 bits.*24"),
        ({"query_codes": np.zeros((2, 3), np.float32)}, CodeError, "packed uint8"),
        (
            {"database_codes": np.zeros((0, 3), np.uint8), "database_labels": []},
            DataError,
            "no database codes",
        ),
        ({"query_codes": np.zeros((0, 3), np.uint8), "query_labels": []}, DataError, "no query codes"),
        ({"query_labels": [1]}, CodeError, "2 query codes, but 1 rows"),
        ({"database_labels": np.zeros((4, 3), np.uint8)}, CodeError, "3 database codes, but 4 rows"),
        (
            {"query_labels": np.ones((2, 4), np.uint8), "database_labels": np.ones((3, 5), np.uint8)},
            CodeError,
            "4 classes, database labels 5",
        ),
        (
            {"query_labels": [0, 9], "database_labels": np.ones((3, 5), np.uint8)},
            CodeError,
            "class 9.*5 classes",
        ),
        (
            {"query_labels": np.array([[1, 0], [0, 0]]), "database_labels": np.ones((3, 2))},
            DataError,
            "row 1",
        ),
        ({"query_labels": [0, -1]}, CodeError, "got -1 in row 1"),
        ({"query_labels": [0.5, 1.0]}, CodeError, "whole numbers"),
        ({"query_labels": np.full((2, 2), 3), "database_labels": np.ones((3, 2))}, CodeError, "only 0 and 1"),
        ({"query_labels": None}, DataError, "no query labels"),
        ({"k": 0}, ConfigError, "at least 1.*0"),
        ({"k": 2.5}, ConfigError, "2.5"),
        ({"database_ids": [1, 2]}, CodeError, "3 codes came with 2 database ids"),
        ({"database_ids": [2**63] * 3}, CodeError, "database ids must fit into int64"),
        ({"query_labels": 1}, CodeError, "2 query codes, but 1 rows"),
        ({"query_labels": [[0], [1, 2]]}, CodeError, "query labels are not an array: their rows differ"),
        ({"query_codes": [[0], [1, 2]]}, CodeError, "query codes are not an array"),
        ({"query_labels": [0, 2**31 + 5]}, CodeError, "class 2147483653; number classes from 0"),
        ({"database_labels": np.array([0, 1, 2**63], np.uint64)}, CodeError, "class 9223372036854775808"),
        ({"class_names": ["a"]}, CodeError, "1 class names for 2 classes"),
        ({"seed": -1}, ConfigError, "seed must be a whole number of at least 0, got -1"),
        ({"device": "tpu"}, ConfigError, "tpu"),
    ],
)
def test_bad_input_is_told(change, error, words):
    given = {
        "query_codes": np.zeros((2, 3), np.uint8),
        "query_labels": [0, 1],
        "database_codes": np.zeros((3, 3), np.uint8),
        "database_labels": [0, 1, 1],
    }
    with pytest.raises(error, match=words) as caught:
        hashnet.evaluate(**(given | change))
    assert isinstance(caught.value, HashnetError)


@pytest.mark.parametrize("seed", [np.int64(1), np.int8(1)])
def test_a_seed_of_numpy_s_is_one_like_any_other(make, seed, tmp_path):
    report = hashnet.evaluate(*make("random"), k=5, seed=seed)
    assert report == hashnet.evaluate(*make("random"), k=5, seed=1)
    report.save(str(tmp_path / "report.json"))


def test_cuda_is_refused_where_there_is_none(make):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="no GPU"):
        hashnet.evaluate(*make("random"), k=5, device="cuda")


def test_the_depth_is_a_quarter_of_the_rows_searched_and_at_least_a_hundred():
    assert [validation_k(n) for n in (2, 800, 1600, 1920)] == [100, 100, 200, 240]


def test_each_half_searches_the_other():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (1000, 2), dtype=np.uint8)
    labels = np.eye(4, dtype=np.uint8)[rng.integers(0, 4, 1000)]
    there = evaluate(codes[::2], labels[::2], codes[1::2], labels[1::2], k=125).map
    back = evaluate(codes[1::2], labels[1::2], codes[::2], labels[::2], k=125).map
    assert validation_map(codes, labels) == pytest.approx((there + back) / 2)


def test_rows_without_a_label_are_neither_queries_nor_searched():
    codes = np.arange(12, dtype=np.uint8)[:, None]
    labels = np.eye(2, dtype=np.uint8)[np.arange(12) % 2]
    labels[[0, 5]] = 0
    kept = labels.any(axis=1)
    assert validation_map(codes, labels) == validation_map(codes[kept], labels[kept])


def test_too_few_rows_give_none():
    assert validation_map(np.zeros((1, 2), np.uint8), np.ones((1, 1), np.uint8)) is None
    assert validation_map(np.zeros((3, 2), np.uint8), np.zeros((3, 1), np.uint8)) is None
