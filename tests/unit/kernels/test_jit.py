"""Compiled kernels: the population count itself, and a checkout where nothing may be written."""

import ast
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
    """As the copies do that Ray unpacks for each job; a changed kernel shares nothing."""
    ask = """
from hashnet.kernels.exact import merge_sorted
from hashnet.losses.dnnh import violations
print(merge_sorted.stats.cache_path, violations.stats.cache_path)
"""

    def told(folder):
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.check_output([sys.executable, "-c", ask], env=env, cwd=folder, text=True).split()

    for name in ("a", "b"):
        shutil.copytree(repo / "hashnet", tmp_path / name / "hashnet")
    search, loss = told(tmp_path / "a")
    assert search != loss

    def change(name):
        with (tmp_path / "b" / "hashnet" / name).open("a") as file:
            file.write("# changed\n")
        return told(tmp_path / "b")

    assert change("codes.py") == [search, loss]
    search_now, loss_now = change("losses/pairwise.py")
    assert search_now == search
    assert loss_now != loss
    assert not {search, loss_now} & set(change("kernels/hamming.py"))


def test_kernels_use_their_own_package_and_this_one_alone(repo):
    """What a kernel took from elsewhere could change without its being compiled again."""
    for path in sorted((repo / "hashnet").rglob("*.py")):
        tree = ast.parse(path.read_text())
        allowed = ("hashnet.kernels", ".".join(path.relative_to(repo).parent.parts))
        elsewhere = {
            name.asname or name.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hashnet")
            if not (node.module or "").startswith(allowed)
            for name in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id == "compiled" for mark in node.decorator_list
            ):
                used = {
                    inner.id
                    for statement in node.body
                    for inner in ast.walk(statement)
                    if isinstance(inner, ast.Name)
                }
                assert not used & elsewhere, f"{path.name}: {node.name}"
