import numpy as np
import pytest
import scipy.linalg
from sklearn.cross_decomposition import CCA
from sklearn.decomposition import PCA

from hashnet.baselines.itq import (
    ITQ,
    ITQCCA,
    best_rotation,
    canonical_directions,
    principal_directions,
    random_rotation,
)


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


@pytest.fixture
def multi_label():
    rng = np.random.default_rng(0)
    y = (rng.random((300, 5)) < 0.4).astype(np.uint8)
    X = y @ rng.normal(size=(5, 12)) + rng.normal(size=(300, 12))
    return X - X.mean(axis=0), y


def test_correlations_are_those_of_the_generalised_eigenproblem(multi_label):
    # Cxy Cyy^-1 Cyx w = rho^2 Cxx w, solved as it stands.
    X, y = multi_label
    W, correlations = canonical_directions(X, y, ridge=0.0)
    Y = y - y.mean(axis=0)
    Cxx, Cxy, Cyy = X.T @ X, X.T @ Y, Y.T @ Y
    values = scipy.linalg.eigh(Cxy @ np.linalg.solve(Cyy, Cxy.T), Cxx, eigvals_only=True)[::-1]
    assert np.allclose(correlations, np.sqrt(values[:5]))
    assert np.allclose(W.T @ (Cxx / len(X)) @ W, np.eye(5))


def test_canonical_directions_are_those_of_scikit_learn(multi_label):
    X, y = multi_label
    W, correlations = canonical_directions(X, y, ridge=0.0)
    model = CCA(n_components=3, scale=False, max_iter=5000, tol=1e-12).fit(X, y.astype(float))
    theirs, theirs_y = model.transform(X, y.astype(float))
    for i in range(3):
        assert abs(np.corrcoef(X @ W[:, i], theirs[:, i])[0, 1]) == pytest.approx(1, abs=1e-5)
        assert np.corrcoef(theirs[:, i], theirs_y[:, i])[0, 1] == pytest.approx(correlations[i], abs=1e-5)


def test_the_ridge_shrinks_correlations_and_saves_singular_covariances(multi_label):
    X, y = multi_label
    _, free = canonical_directions(X, y, ridge=0.0)
    _, held = canonical_directions(X, y, ridge=1.0)
    assert (held < free).all()
    doubled = np.c_[X, X]  # singular
    _, correlations = canonical_directions(doubled, y, ridge=1e-6)
    assert np.allclose(correlations, free, atol=1e-3)


def test_single_labels_give_one_direction_less_than_classes():
    rng = np.random.default_rng(1)
    y = np.arange(200) % 10
    X = rng.normal(size=(10, 20))[y] + 0.3 * rng.normal(size=(200, 20))
    with pytest.warns(UserWarning, match="10 classes give 9 canonical directions for 16 bits"):
        method = ITQCCA(n_bits=16).fit(X, y)
    assert len(method.correlations_) == 9
    assert len(np.unique(method.encode(X), axis=0)) >= 10


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_principal_directions_are_those_of_scikit_learn(shape):
    X = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1)
    X -= X.mean(axis=0)
    ours = principal_directions(X, 5)
    theirs = PCA(5, svd_solver="full").fit(X).components_.T
    assert np.allclose(np.abs((ours * theirs).sum(axis=0)), 1)
    assert np.allclose(ours.T @ ours, np.eye(5))


def test_no_more_directions_than_the_rank():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 10))
    assert principal_directions(X - X.mean(axis=0), 8).shape == (10, 3)
