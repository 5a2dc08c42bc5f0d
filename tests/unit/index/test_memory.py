"""Where the codes of an index lie."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hashnet import BinaryIndex

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this Linux gives no huge pages"
)
def test_codes_built_in_memory_lie_on_huge_pages() -> None:
    codes = np.random.default_rng(0).integers(0, 256, (1_500_000, 8), dtype=np.uint8)
    index = BinaryIndex.from_arrays(codes)
    (segment,) = index._state.segments
    address, pages = segment.rows.codes.ctypes.data + (4 << 20), {}
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        low, high = (int(part, 16) for part in re.match(r"([0-9a-f]+)-([0-9a-f]+) ", block).groups())  # type: ignore[union-attr]
        if low <= address < high:
            pages = dict(re.findall(r"^(\w+): +(\d+) kB", block, re.M))
    assert int(pages["AnonHugePages"]) > 4 << 10
    assert (index.codes([0, 1_499_999]) == codes[[0, -1]]).all()
