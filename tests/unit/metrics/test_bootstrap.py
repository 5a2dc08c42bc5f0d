"""Intervals over queries and the paired difference of two methods."""

from __future__ import annotations

import numpy as np
import pytest

from hashnet.errors import CodeError
from hashnet.metrics.bootstrap import interval, paired_difference


def test_interval_is_seeded_and_surrounds_the_mean():
    values = np.random.default_rng(0).random(400)
    low, high = interval(values, seed=1)
    assert (low, high) == interval(values, seed=1) != interval(values, seed=2)
    assert low < values.mean() < high
    # about 1.96 standard errors to each side
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)


def test_interval_of_one_query_is_that_query():
    assert interval([0.25]) == (0.25, 0.25)


def test_interval_does_not_depend_on_how_draws_are_cut(monkeypatch):
    values = np.random.default_rng(0).random(50)
    whole = interval(values)
    monkeypatch.setattr("hashnet.metrics.bootstrap._AT_ONCE", 500)
    assert interval(values) == whole


def test_pairing_sees_what_single_intervals_hide():
    rng = np.random.default_rng(0)
    hard = rng.random(300)  # queries differ far more than methods do
    a, b = hard + 0.02 + rng.normal(0, 0.01, 300), hard
    low, high = interval(a)
    assert low < b.mean() < high
    difference = paired_difference(a, b)
    assert difference.mean == pytest.approx(0.02, abs=0.003)
    assert difference.clear
    assert 0 < difference.low < difference.mean < difference.high
    assert not paired_difference(rng.normal(0, 1, 100), rng.normal(0, 1, 100)).clear


@pytest.mark.parametrize(("a", "b"), [([0.1], [0.1, 0.2]), ([], []), ([[0.1]], [[0.2]])])
def test_unpaired_values_are_refused(a, b):
    with pytest.raises(CodeError, match="same queries"):
        paired_difference(a, b)
