import itertools

import numpy as np
import pytest

from hashnet.baselines.sdh import SDH, discrete_descent, least_squares_inverse, ridge_classifier


def b_cost(B, W, Q):
    """|B W|^2 - 2 tr(B^T Q) by loops."""
    total = 0.0
    for b, q in zip(B, Q, strict=True):
        total += sum(float(b @ W[:, c]) ** 2 for c in range(W.shape[1])) - 2 * float(b @ q)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_no_flip_of_a_single_bit_improves_what_descent_returns(seed):
    rng = np.random.default_rng(seed)
    n, k, c = 7, 5, 3
    W, Q = rng.normal(size=(k, c)), rng.normal(size=(n, k))
    start = np.where(rng.random((n, k)) < 0.5, -1.0, 1.0)
    B = discrete_descent(start, W, Q)
    assert b_cost(B, W, Q) <= b_cost(start, W, Q) + 1e-12
    for i, j in itertools.product(range(n), range(k)):
        flipped = B.copy()
        flipped[i, j] *= -1
        assert b_cost(B, W, Q) <= b_cost(flipped, W, Q) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_one_bit_step_is_the_best_of_all_sign_vectors(seed):
    # With one bit only, descent must find the global minimum over all 2^n columns.
    rng = np.random.default_rng(seed)
    W, Q = rng.normal(size=(1, 4)), rng.normal(size=(6, 1))
    ours = b_cost(discrete_descent(np.ones((6, 1)), W, Q), W, Q)
    every = [b_cost(np.array(signs)[:, None], W, Q) for signs in itertools.product([-1.0, 1.0], repeat=6)]
    assert ours == pytest.approx(min(every))


def test_the_classifier_and_the_regression_are_their_normal_equations_solutions():
    rng = np.random.default_rng(0)
    B, Y = np.where(rng.random((30, 4)) < 0.5, -1.0, 1.0), rng.random((30, 3))
    W = ridge_classifier(B, Y, 0.7)
    assert np.allclose(B.T @ (B @ W - Y) + 0.7 * W, 0)
    phi = rng.random((30, 6))
    assert np.allclose(least_squares_inverse(phi) @ phi.T @ B, np.linalg.lstsq(phi, B, rcond=None)[0])


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
@pytest.mark.parametrize("nu", [1e-5, 1.0])
def test_the_objective_falls_every_round(nu):
    rng = np.random.default_rng(1)
    y = (rng.random((150, 6)) < 0.3).astype(np.uint8)
    y[:, 0] |= ~y.any(axis=1)
    X = y @ rng.normal(size=(6, 10)) + rng.normal(size=(150, 10))
    history = SDH(n_bits=16, nu=nu, n_anchors=40).fit(X, y).history_
    assert len(history) == 6
    assert (np.diff(history) <= 1e-9 * history[0]).all()


def test_fewer_rows_than_anchors_uses_all_rows_with_one_warning():
    rng = np.random.default_rng(2)
    with pytest.warns(UserWarning, match="1000 requested but there are only 50 rows") as caught:
        method = SDH(n_bits=8).fit(rng.normal(size=(50, 4)), np.arange(50) % 3)
    assert len(caught) == 1
    assert len(method.anchors_) == 50
