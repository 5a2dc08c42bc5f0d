"""Bit planes: what is beyond them is refused. Their distances are checked by the metrics' tests."""

import numpy as np
import pytest

from hashnet.errors import Unsupported
from hashnet.kernels.bitslice import ITEMS, bit_planes


def test_longer_codes_than_a_key_can_rank_are_refused():
    order = np.full(ITEMS, -1)
    order[0] = 0
    assert len(bit_planes(np.zeros((1, 255), np.uint8), order))
    with pytest.raises(Unsupported, match="up to 2040 bits can be evaluated, these have 2048"):
        bit_planes(np.zeros((1, 256), np.uint8), order)
