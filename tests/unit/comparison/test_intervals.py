import numpy as np
import pytest

from hashnet.comparison.intervals import paired_difference


def test_the_interval_is_that_of_plain_resampling():
    rng = np.random.default_rng(0)
    a, b = rng.random(60), rng.random(60)
    ours = paired_difference(a, b)
    means = []
    for _ in range(4000):
        drawn = rng.integers(0, 60, size=60)
        means.append((a[drawn] - b[drawn]).mean())
    low, high = np.quantile(means, [0.025, 0.975])
    assert ours.mean == pytest.approx((a - b).mean())
    assert ours.low == pytest.approx(low, abs=0.012)
    assert ours.high == pytest.approx(high, abs=0.012)


def test_pairing_finds_a_small_difference_between_noisy_methods():
    hardness = np.random.default_rng(1).random(500)
    assert paired_difference(hardness + 0.01, hardness).clear
    assert not paired_difference(hardness, hardness).clear


def test_it_is_repeatable():
    rng = np.random.default_rng(2)
    a, b = rng.random(30), rng.random(30)
    assert paired_difference(a, b, seed=3) == paired_difference(a, b, seed=3)
