"""Tie-aware AP: the average over tie orders, all of them or many, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from hashnet.metrics.measures import tie_aware_precision

GROUPS = [  # tied items by distance, 1 for relevant
    [[1, 0]],
    [[1], [0, 0, 0], [1, 0]],
    [[0, 0], [1, 1, 0], [], [1]],
    [[1, 1, 1]],
    [[0, 0, 0]],
    [[1, 0, 1, 0, 1], [0, 1]],
    [[], [0], [1], [0], [1]],
]


def counts(groups):
    return np.array([[len(group) for group in groups]]), np.array([[sum(group) for group in groups]])


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_mean_and_bounds_over_all_orders(slow, groups, k):
    n_relevant = sum(map(sum, groups))
    values = [slow.ap(ranking, n_relevant, k)[1] for ranking in slow.tie_orders(groups)]
    mean, last, first = (float(x[0]) for x in tie_aware_precision(*counts(groups), k=k))
    assert mean == pytest.approx(np.mean(values), abs=1e-12)
    assert last == pytest.approx(min(values), abs=1e-12)
    assert first == pytest.approx(max(values), abs=1e-12)


def test_mean_over_many_orders_of_large_groups(slow):
    rng = np.random.default_rng(0)
    groups = [list(rng.random(n) < share) for n, share in ((40, 0.8), (100, 0.4), (300, 0.1))]
    n_relevant = int(sum(map(sum, groups)))
    values = []
    for _ in range(3000):
        ranking = [bool(x) for group in groups for x in rng.permutation(group)]
        values.append(slow.ap(ranking, n_relevant, 120)[1])
    mean, last, first = (float(x[0]) for x in tie_aware_precision(*counts(groups), k=120))
    assert mean == pytest.approx(np.mean(values), abs=4 * np.std(values) / np.sqrt(len(values)))
    assert last <= min(values)
    assert max(values) <= first


def test_formula_by_hand(slow):
    # one group, n = 3, r = 2, k = 2: ranks 1 and 2 hold a hit each with probability 2/3;
    # sum = 2/3 * 1/1 + 2/3 * (1 + 1/2) / 2 = 2/3 + 1/2 = 7/6, divided by min(2, 2)
    mean, _, _ = tie_aware_precision(np.array([[3]]), np.array([[2]]), 2)
    assert mean[0] == pytest.approx(7 / 12)


def test_against_the_sum_term_by_term(slow):
    rng = np.random.default_rng(1)
    for _ in range(50):
        n = rng.integers(0, 40, (1, 9))
        r = rng.binomial(n, 0.3)
        k = int(rng.integers(1, 250))
        items = [(d, place < r[0, d]) for d in range(9) for place in range(n[0, d])]
        assert tie_aware_precision(n, r, k)[0][0] == pytest.approx(slow.tie_aware(items, k), abs=1e-10)
