import itertools

import numpy as np
import pytest

from hashnet.baselines.bre import (
    BRE,
    PairLists,
    draw_pairs,
    improve_weight,
    pair_gains,
    reconstruction_error,
    target_distances,
    unit_rows,
)
from hashnet.errors import ConfigError


def error_by_loops(bits, left, right, distance):
    """sum (d_ij - different bits / n_bits)^2."""
    total = 0.0
    for i, j, d in zip(left, right, distance, strict=True):
        different = sum(int(bits[b, i] != bits[b, j]) for b in range(len(bits)))
        total += (d - different / len(bits)) ** 2
    return total


def tiny_problem(seed, n=9, n_bits=4):
    rng = np.random.default_rng(seed)
    left, right = draw_pairs(n, 0.6, rng)
    distance = rng.integers(0, 2, size=len(left)).astype(float)
    k = rng.normal(size=n)
    if seed % 2:
        k[2], k[5] = 0.0, k[4]  # a row that never flips, and (below) two that flip together
    value = rng.normal(size=n)
    value[5] = value[4]
    bits = rng.integers(0, 2, size=(n_bits, n)).astype(np.uint8)
    bits[1] = value >= 0
    return left, right, distance, k, value, bits


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_search_is_as_good_as_trying_every_threshold(seed):
    left, right, distance, k, value, bits = tiny_problem(seed)
    n, w = len(k), 0.3
    pairs = PairLists.of(n, left, right, distance)
    c = value - w * k
    # One candidate inside each interval between thresholds, and one beyond each end.
    thresholds = sorted(-c[i] / k[i] for i in range(n) if k[i] != 0)
    candidates = [thresholds[0] - 1, thresholds[-1] + 1, w]
    candidates += [(a + b) / 2 for a, b in itertools.pairwise(thresholds)]
    errors = []
    for candidate in candidates:
        tried = bits.copy()
        tried[1] = c + candidate * k >= 0
        errors.append(error_by_loops(tried, left, right, distance))
    gains = pair_gains(bits, 1, *pairs)
    new_value, new_bit = value.copy(), bits[1].copy()
    new_w = improve_weight(w, k, new_value, new_bit, pairs.first, pairs.row, gains)
    found = bits.copy()
    found[1] = new_bit
    assert error_by_loops(found, left, right, distance) == pytest.approx(min(errors))
    assert np.allclose(new_value, c + new_w * k)
    assert np.array_equal(new_bit, new_value >= 0)


def test_the_error_and_the_gains_by_loops():
    left, right, distance, _, _, bits = tiny_problem(1)
    pairs = PairLists.of(9, left, right, distance)
    expected = error_by_loops(bits, left, right, distance)
    assert reconstruction_error(bits, *pairs) == pytest.approx(expected)
    gains = pair_gains(bits, 2, *pairs)
    for i in range(9):
        for e in range(pairs.first[i], pairs.first[i + 1]):
            j = pairs.row[e]
            equal, unequal = bits.copy(), bits.copy()
            equal[2, j], unequal[2, j] = equal[2, i], 1 - unequal[2, i]
            here = [(a, b, d) for a, b, d in zip(left, right, distance, strict=True) if {a, b} == {i, j}]
            difference = error_by_loops(unequal, *zip(*here, strict=True)) - error_by_loops(
                equal, *zip(*here, strict=True)
            )
            assert gains[e] == pytest.approx(difference)


def test_pairs_are_distinct_and_ordered():
    left, right = draw_pairs(30, 0.05, np.random.default_rng(0))
    assert (left < right).all()
    assert len(set(zip(left, right, strict=True))) == len(left) == 30  # at least as many as rows


def test_targets_come_from_labels_or_from_angles():
    U = unit_rows(np.array([[1.0, 0], [0, 2.0], [-3.0, 0]]))
    left, right = np.array([0, 0, 1]), np.array([1, 2, 2])
    assert np.allclose(target_distances(U, None, left, right), [0.5, 1, 0.5])
    y = np.array([[1, 0], [1, 1], [0, 1]], dtype=np.uint8)
    assert target_distances(U, y, left, right).tolist() == [0, 1, 0]


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize("with_labels", [False, True])
def test_the_objective_falls_with_either_kernel_and_with_or_without_labels(kernel, with_labels):
    rng = np.random.default_rng(4)
    y = np.arange(80) % 4
    X = rng.normal(size=(4, 6))[y] * 2 + rng.normal(size=(80, 6))
    method = BRE(n_bits=8, n_rows=60, n_anchors=5, kernel=kernel).fit(X, y if with_labels else None)
    assert len(method.history_) >= 2
    assert (np.diff(method.history_) <= 0).all()
    assert method.history_[-1] < method.history_[0]


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ConfigError, match="linear or rbf"):
        BRE(kernel="cubic")
