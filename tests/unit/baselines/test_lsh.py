import tracemalloc

import numpy as np

from hashnet.baselines.lsh import LSH
from hashnet.codes import hamming_distances, unpack_codes


def test_hamming_distance_estimates_the_angle():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 30))
    X -= X.mean(axis=0)
    codes = LSH(n_bits=1024, seed=1).fit(X).encode(X)
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    angle = np.arccos(np.clip(unit @ unit.T, -1, 1)) / np.pi
    assert np.abs(hamming_distances(codes, codes) / 1024 - angle).max() < 0.06


def test_bits_are_balanced_on_features_that_are_never_negative():
    X = np.maximum(np.random.default_rng(1).normal(size=(500, 20)), 0) + 3
    share = (unpack_codes(LSH(n_bits=64).fit(X).encode(X)) > 0).mean(axis=0)
    assert share.min() > 0.3
    assert share.max() < 0.7


def test_other_seeds_give_other_directions():
    X = np.random.default_rng(2).normal(size=(50, 8))
    assert not np.array_equal(LSH(64, seed=0).fit(X).encode(X), LSH(64, seed=1).fit(X).encode(X))


def test_encoding_holds_no_second_copy_of_the_rows(monkeypatch):
    monkeypatch.setattr("hashnet.baselines.base.BLOCK_ROWS", 256)
    X = np.random.default_rng(3).normal(size=(8000, 64)).astype(np.float32)
    method = LSH(n_bits=16).fit(X[:100])
    tracemalloc.start()
    method.encode(X)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < X.nbytes
