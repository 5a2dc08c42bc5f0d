"""Bit planes: of codes of any length. Their distances are checked by the metrics' tests."""

import numpy as np
import pytest

from hashnet.kernels.bitslice import ITEMS, bit_planes


@pytest.mark.parametrize("n_bytes", [1, 255, 256, 512])
def test_codes_of_every_length_have_planes(n_bytes):
    order = np.full(ITEMS, -1)
    order[0] = 0
    assert len(bit_planes(np.zeros((1, n_bytes), np.uint8), order))
