import numpy as np
import pytest

from hashnet.baselines.sh import SH, smoothest_modes
from hashnet.codes import unpack_codes


def test_the_smallest_eigenvalues_by_hand():
    # Sides 4, 2, 1 and eigenvalues proportional to (m / side)^2:
    #   side 4: 1/16, 4/16, 9/16, 16/16, 25/16, ...   side 2: 4/16, 16/16, ...   side 1: 16/16, ...
    # The 8 smallest: 1 (a1), 4 (a2), 4 (b1), 9 (a3), 16 (a4), 16 (b2), 16 (c1), 25 (a5).
    dimension, mode = smoothest_modes(np.array([4.0, 2.0, 1.0]), 8)
    assert list(zip(dimension.tolist(), mode.tolist(), strict=True)) == [
        (0, 1), (0, 2), (1, 1), (0, 3), (0, 4), (1, 2), (2, 1), (0, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_modes_are_those_of_trying_all(seed):
    side = np.random.default_rng(seed).uniform(0.2, 3, size=6)
    dimension, mode = smoothest_modes(side, 16)
    ours = sorted((m / side[d]) ** 2 for d, m in zip(dimension, mode, strict=True))
    everything = sorted((m / s) ** 2 for s in side for m in range(1, 17))
    assert np.allclose(ours, everything[:16])


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
def test_one_dimension_is_cut_into_equal_waves():
    # Rows 0..1 along one line: bit m is the sign of cos(pi m x), with m = 1..8.
    x = np.linspace(0, 1, 201)
    method = SH(n_bits=8).fit(np.c_[x, np.zeros_like(x), 0 * x] + np.array([5.0, 0, 1]))
    signs = unpack_codes(method.encode(np.c_[x, 0 * x, 0 * x] + np.array([5.0, 0, 1])))
    for m in range(1, 9):
        expected = np.cos(np.pi * m * x)
        clear = np.abs(expected) > 1e-6
        assert np.array_equal(signs[clear, m - 1] > 0, expected[clear] > 0)


def test_the_box_is_the_training_set_s():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 10))
    method = SH(n_bits=8).fit(X)
    far = X[:1] * 100  # outside the box: the wave goes on, nothing is refitted
    assert method.encode(far).shape == (1, 1)
    assert np.array_equal(method.encode(np.r_[far, X[:5]])[1:], method.encode(X[:5]))
