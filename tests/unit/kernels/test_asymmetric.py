"""Asymmetric scores against a matrix product of unpacked signs, ordered by (score descending, position)."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from hashnet.codes import unpack_codes
from hashnet.kernels import merge_scores, score_codes, top_scores
from hashnet.kernels.asymmetric import FEW

SORTS = ("random", "clustered", "duplicated", "equal")


def whole_logits(n, n_bits, seed=0):
    """Multiples of 1/64: their sums are exact in every order, so that scores must agree to the last bit."""
    return (np.random.default_rng(seed).integers(-300, 300, (n, n_bits)) / 64).astype(np.float32)


def slow(codes, logits, k, allowed=None):
    """[(score, position)] of each query, by sorting all of them."""
    scores = logits.astype(np.float64) @ unpack_codes(codes).T.astype(np.float64)
    rows = range(len(codes)) if allowed is None else np.flatnonzero(allowed)
    return [
        sorted(((float(np.float32(s[i])), int(i)) for i in rows), key=lambda x: (-x[0], x[1]))[:k]
        for s in scores
    ]


def as_lists(positions, scores):
    return [
        [(float(s), int(p)) for p, s in zip(ps, ss, strict=True) if p >= 0]
        for ps, ss in zip(positions, scores, strict=True)
    ]


@pytest.mark.parametrize("n_bits", [8, 16, 24, 48, 64, 72, 128, 256, 1024])
@pytest.mark.parametrize("sort", SORTS)
def test_equal_to_a_matrix_product(codes_of, n_bits, sort):
    for n in (1, 7, 64, 65, 700):
        codes, all_logits = codes_of(sort, n, n_bits, seed=n), whole_logits(FEW + 1, n_bits, seed=n)
        for k, n_queries in itertools.product((1, 9, n, n + 3), (1, FEW + 1)):  # two ways to bound scores
            logits = all_logits[:n_queries]
            positions, scores = top_scores(codes, logits, k)
            assert positions.shape == scores.shape == (n_queries, k)
            assert (positions.dtype, scores.dtype) == (np.int64, np.float32)
            assert as_lists(positions, scores) == slow(codes, logits, k)
            assert (positions[:, n:] == -1).all()
            assert (scores[:, n:] == -np.inf).all()


def test_a_filter_and_several_groups_of_queries_and_threads(codes_of):
    codes, logits = codes_of("clustered", 70_000, 64), whole_logits(150, 64)
    allowed = (np.random.default_rng(1).random(len(codes)) < 0.3).astype(np.uint8)
    for n_queries in (1, 150):  # the database is cut for few queries, the queries are for many
        for threads in (1, 2, 3):
            found = top_scores(codes, logits[:n_queries], 20, allowed=allowed, threads=threads)
            if threads == 1:
                assert as_lists(*found)[:3] == slow(codes, logits[: min(3, n_queries)], 20, allowed)
                one = found
            assert all((a == b).all() for a, b in zip(one, found, strict=True))


def test_the_worst_order_for_the_bound(codes_of):
    """Rows that come ever nearer: every one of them is a candidate."""
    codes, logits = codes_of("random", 5000, 32), whole_logits(1, 32)
    worst_first = codes[[i for _, i in reversed(slow(codes, logits, 5000)[0])]]
    for k, n_queries in itertools.product((1, 40, 5000), (1, FEW + 1)):
        same = np.repeat(logits, n_queries, axis=0)
        assert as_lists(*top_scores(worst_first, same, k)) == slow(worst_first, same, k)


@pytest.mark.parametrize("logits", [np.zeros((1, 16)), np.full((1, 16), 1e37), np.eye(16)[:3] * 1e-42])
def test_odd_logits(codes_of, logits):
    """All zero, huge, and one bit that matters: ties go to the smallest positions."""
    codes, logits = codes_of("random", 300, 16), logits.astype(np.float32)
    for some in (logits[:1], np.repeat(logits, FEW + 1, axis=0)):
        assert as_lists(*top_scores(codes, some, 12)) == slow(codes, some, 12)


def test_real_logits_are_scored_to_float32(codes_of):
    codes, logits = (
        codes_of("clustered", 3000, 64),
        np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32),
    )
    positions, scores = top_scores(codes, logits, 10)
    truth = logits.astype(np.float64) @ unpack_codes(codes).T
    assert np.allclose(scores, np.take_along_axis(truth, positions, 1), rtol=1e-6)
    assert np.allclose(scores, -np.sort(-truth, axis=1)[:, :10], rtol=1e-6)


def test_candidates_are_scored_as_in_a_scan(codes_of):
    codes, logits = (
        codes_of("random", 500, 40),
        np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32),
    )
    positions, scores = top_scores(codes, logits, 20)
    assert (score_codes(codes[positions], logits) == scores).all()


def test_merging_keeps_the_smallest_ids_of_a_tie():
    parts = [np.array([[5, 9, -1]]), np.array([[2, 7, 11]])]
    scores = [np.array([[3, 1, -np.inf]], np.float32), np.array([[3, 2, 1]], np.float32)]
    ids, merged = merge_scores(parts, scores, 4)
    assert ids.tolist() == [[2, 5, 7, 9]]
    assert merged.tolist() == [[3, 3, 2, 1]]


def test_a_machine_without_a_byte_shuffle(tmp_path):
    """The plain look-ups that other processors get, compiled for a processor without any extension."""
    script = """
import numpy as np
from hashnet.kernels import top_scores
from hashnet.kernels.jit import has_avx2
assert not has_avx2()
rng = np.random.default_rng(0)
codes = rng.integers(0, 256, (200, 3), dtype=np.uint8)
logits = rng.integers(-9, 9, (6, 24)).astype(np.float32)
print(top_scores(codes, logits, 7)[0].tolist())
"""
    env = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    told = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    rng = np.random.default_rng(0)
    codes, logits = (
        rng.integers(0, 256, (200, 3), dtype=np.uint8),
        rng.integers(-9, 9, (6, 24)).astype(np.float32),
    )
    assert told.strip() == str([[p for _, p in hits] for hits in slow(codes, logits, 7)])
