import numpy as np
import pytest

from hashnet.baselines.itq import ITQ, best_rotation, random_rotation


def quantisation_loss(V, R):
    """|sgn(VR) - VR|_F^2 by loops."""
    total = 0.0
    for row in V @ R:
        for value in row:
            total += ((1.0 if value >= 0 else -1.0) - value) ** 2
    return total


def test_a_random_rotation_is_orthogonal():
    R = random_rotation(12, np.random.default_rng(0))
    assert np.allclose(R @ R.T, np.eye(12))


@pytest.mark.parametrize("rank", [3, 8])
def test_the_rotation_found_is_orthogonal_and_the_objective_is_the_loss_and_falls(rank):
    V = np.random.default_rng(1).normal(size=(60, rank))
    R, history = best_rotation(V, 8, 20, np.random.default_rng(2))
    assert np.allclose(R @ R.T, np.eye(rank))
    assert (np.diff(history) <= 1e-9).all()
    start = random_rotation(8, np.random.default_rng(2))[:rank]
    assert history[0] == pytest.approx(quantisation_loss(V, start))
    assert quantisation_loss(V, R) <= history[-1] + 1e-9


def test_the_rotation_step_beats_every_angle_in_two_dimensions():
    # With B fixed the best rotation is the Procrustes solution: no angle of a fine grid is better.
    V = np.random.default_rng(3).normal(size=(30, 2))
    start = random_rotation(2, np.random.default_rng(4))
    B = np.where(V @ start >= 0, 1.0, -1.0)
    R, _ = best_rotation(V, 2, 1, np.random.default_rng(4))
    ours = ((B - V @ R) ** 2).sum()
    for angle in np.linspace(0, 2 * np.pi, 720):
        c, s = np.cos(angle), np.sin(angle)
        for mirror in (1, -1):
            other = np.array([[c, -s * mirror], [s, c * mirror]])
            assert ours <= ((B - V @ other) ** 2).sum() + 1e-9


def test_a_rotated_cube_is_recovered():
    # Rows are corners of a rotated cube (scaled apart so that PCA is unique): ITQ must give 8 codes.
    rng = np.random.default_rng(5)
    corners = np.where(rng.integers(0, 2, size=(400, 8)) > 0, 1.0, -1.0)
    X = corners @ random_rotation(8, rng)
    losses = [ITQ(n_bits=8, seed=seed, n_iterations=200).fit(X).history_[-1] for seed in range(5)]
    assert min(losses) < 0.05 * X.size


def test_pca_keeps_the_directions_of_most_variance():
    rng = np.random.default_rng(6)
    X = rng.normal(size=(200, 20)) * np.r_[np.full(8, 10.0), np.full(12, 0.01)]
    method = ITQ(n_bits=8).fit(X)
    assert np.abs(method.directions_[8:]).max() < 0.01
    assert np.allclose(method.directions_.T @ method.directions_, np.eye(8))
