import numpy as np
import pytest
from scipy.optimize import check_grad

from hashnet.baselines.ksh import KSH, refine, smooth_objective, spectral_start


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    K = rng.normal(size=(40, 6))
    S = np.where(np.equal.outer(np.arange(40) % 4, np.arange(40) % 4), 1.0, -1.0)
    return K, 8 * S


def test_the_spectral_start_beats_every_random_direction_of_the_same_length(problem):
    K, R = problem
    a = spectral_start(K.T @ R @ K, K.T @ K, len(K))
    assert a @ K.T @ K @ a == pytest.approx(len(K))
    ours = a @ K.T @ R @ K @ a
    rng = np.random.default_rng(1)
    for _ in range(2000):
        other = rng.normal(size=6)
        other *= np.sqrt(len(K) / (other @ K.T @ K @ other))
        assert other @ K.T @ R @ K @ other <= ours + 1e-9


def test_the_gradient_is_that_of_finite_differences(problem):
    K, R = problem
    for seed in range(3):
        a = np.random.default_rng(seed).normal(size=6)
        error = check_grad(lambda a: smooth_objective(a, K, R)[0], lambda a: smooth_objective(a, K, R)[1], a)
        assert error < 1e-3 * np.linalg.norm(smooth_objective(a, K, R)[1])


def test_the_smooth_objective_by_loops(problem):
    K, R = problem
    a = np.full(6, 0.3)
    y = [2 / (1 + np.exp(-float(row @ a))) - 1 for row in K]
    expected = -sum(y[i] * R[i, j] * y[j] for i in range(40) for j in range(40))
    assert smooth_objective(a, K, R)[0] == pytest.approx(expected)


def test_refinement_never_ends_above_its_start(problem):
    K, R = problem
    start = spectral_start(K.T @ R @ K, K.T @ K, len(K))
    end = refine(start, K, R, 200)
    assert smooth_objective(end, K, R)[0] < smooth_objective(start, K, R)[0]
    assert np.linalg.norm(smooth_objective(end, K, R)[1]) < np.linalg.norm(smooth_objective(start, K, R)[1])


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
def test_the_history_is_the_residual_by_loops():
    rng = np.random.default_rng(2)
    y = np.arange(60) % 3
    X = rng.normal(size=(3, 5))[y] * 2 + rng.normal(size=(60, 5))
    method = KSH(n_bits=8, n_iterations=20).fit(X, y)
    H = np.where(method.logits(X) >= 0, 1, -1)
    for bits in (1, 8):
        total = 0.0
        for i in range(60):
            for j in range(60):
                s = 1 if y[i] == y[j] else -1
                total += (8 * s - int(H[i, :bits] @ H[j, :bits])) ** 2
        assert method.history_[bits - 1] == pytest.approx(total / 3600)


def test_fewer_rows_than_anchors_uses_all_rows_with_a_warning():
    rng = np.random.default_rng(3)
    with pytest.warns(UserWarning, match="anchors: 300 requested but there are only 50 rows"):
        KSH(n_bits=8, n_labelled=50, n_iterations=5).fit(rng.normal(size=(50, 4)), np.arange(50) % 3)
