import numpy as np
import pytest
from sklearn.decomposition import PCA

from hashnet.baselines.itq import principal_directions


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_directions_are_those_of_scikit_learn(shape):
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
