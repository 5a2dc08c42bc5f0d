"""Compiled kernels: the population count itself, and a checkout where nothing may be written."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from hashnet.kernels.jit import KernelCache, compiled, popcount


@compiled
def ones(words, out):
    for i in range(len(words)):
        out[i] = popcount(words[i])


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_popcount(dtype):
    words = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 100, dtype=dtype)
    words[:2] = 0, np.iinfo(dtype).max
    out = np.zeros(100, dtype=np.int64)
    ones(words, out)
    assert out.tolist() == [int(word).bit_count() for word in words]


def twice(x):
    return 2 * x


def test_without_a_place_for_the_cache_it_still_compiles(monkeypatch):
    """No home folder that can be written: numba knows no folder to keep what it compiled."""
    monkeypatch.setattr(KernelCache, "ensure_cache_path", _refuse)
    kernel = compiled(twice)
    assert kernel(21) == 42
    assert kernel.stats.cache_path is None


def _refuse(self):
    raise PermissionError


def test_copies_of_the_package_share_what_one_compiled(repo, tmp_path):
    """As the copies do that Ray unpacks for each job; a changed file, whichever it is, shares nothing."""
    ask = """
from hashnet.kernels.exact import merge_sorted as kernel
from hashnet.kernels.jit import _sources
print(_sources(), kernel.stats.cache_path)
"""

    def told(folder):
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.check_output([sys.executable, "-c", ask], env=env, cwd=folder, text=True)

    for name in ("a", "b"):
        shutil.copytree(repo / "hashnet", tmp_path / name / "hashnet")
    first = told(tmp_path / "a")
    assert told(tmp_path / "b") == first
    with (tmp_path / "b" / "hashnet" / "codes.py").open("a") as file:
        file.write("# changed\n")
    assert told(tmp_path / "b") != first
