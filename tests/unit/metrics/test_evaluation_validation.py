import numpy as np
import pytest

from hashnet.metrics.evaluation import evaluate, validation_k, validation_map


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
