import numpy as np
import pytest
import scipy.linalg
from sklearn.cross_decomposition import CCA

from hashnet.baselines.itq_cca import ITQCCA, canonical_directions


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


def test_directions_are_those_of_scikit_learn(multi_label):
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
