"""near_duplicates and cross_duplicates: against loops, FAISS, and their limits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hashnet
from hashnet.dedup import cross_duplicates, near_duplicates
from hashnet.dedup import pairs as pairs_module
from hashnet.errors import CodeError, ConfigError, DataError
from hashnet.store import write_store


def triples(found) -> list[tuple[int, int, int]]:
    return list(zip(found.a.tolist(), found.b.tolist(), found.distances.tolist(), strict=True))


@pytest.mark.parametrize("n_bits", [8, 16, 40, 64, 72, 128, 200, 1024])
@pytest.mark.parametrize("radius", [0, 1, 2, 4, 9])
def test_pairs_are_those_of_a_loop(slow, clustered, n_bits, radius):
    codes = clustered(300, n_bits)
    found = near_duplicates(codes, radius)
    assert triples(found) == slow(codes, radius)
    assert (found.a.dtype, found.b.dtype, found.distances.dtype) == (np.int64, np.int64, np.int32)
    assert not found.truncated


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**16 - 1), max_size=60),
    st.integers(0, 20),
    st.integers(1, 40),
    st.data(),
)
def test_any_small_case_in_any_order_and_with_any_limit(slow, values, radius, limit, data):
    codes = np.array(values, dtype=">u2").view(np.uint8).reshape(-1, 2)
    ids = np.array(data.draw(st.permutations(range(len(codes)))), dtype=np.int64) * 7 - 20
    wanted = slow(codes, radius, ids)
    assert triples(near_duplicates(codes, radius, ids=ids)) == wanted
    cut = near_duplicates(codes, radius, ids=ids, max_pairs=limit)
    nearest = sorted(wanted, key=lambda pair: (pair[2], pair[0], pair[1]))[:limit]
    assert triples(cut) == sorted(nearest)
    assert cut.truncated == (len(wanted) > limit)
    complete = [pair for pair in wanted if pair[2] <= cut.complete_radius]
    assert set(complete) <= set(nearest)


def test_the_order_of_rows_and_the_number_of_threads_do_not_matter(clustered):
    codes = clustered(5000, 64)
    one = near_duplicates(codes, 3, threads=1)
    order = np.random.default_rng(1).permutation(len(codes))
    other = near_duplicates(codes[order], 3, ids=order, threads=3)
    assert triples(one) == triples(other)


def test_every_plan_finds_the_same(clustered, slow, monkeypatch):
    """From the plain scan to 80 choices of blocks: the cheapest is a matter of time alone."""
    from hashnet.dedup import join as joins

    codes = clustered(400, 64)
    wanted = slow(codes, 3)
    for row_ns, comparison_ns, most in ((1e9, 1e-9, 1), (1e-9, 1e9, 80), (1e-9, 1e9, 20)):
        monkeypatch.setattr(joins, "ROW_NS", row_ns)
        monkeypatch.setattr(joins, "COMPARISON_NS", comparison_ns)
        n_choices = len(joins.plan_join(joins.as_words(codes), 64, 3))
        assert n_choices == 1 if most == 1 else n_choices > 1
        assert triples(near_duplicates(codes, 3)) == wanted
        monkeypatch.setattr(joins, "SMALL", 500)  # buckets are cut, too
        assert triples(near_duplicates(codes, 3)) == wanted


def test_as_faiss_finds_them(tmp_path):
    """100,000 codes of 64 bits in 2,000 clusters; FAISS in a process of its own, by range_search."""
    script = """
import numpy as np, faiss, sys
rng = np.random.default_rng(0)
bits = rng.integers(0, 2, (2000, 64), dtype=np.uint8)[rng.integers(0, 2000, 100_000)]
codes = np.packbits(bits ^ (rng.random((100_000, 64)) < 0.06), axis=1)
np.save(sys.argv[1] + "/codes.npy", codes)
index = faiss.IndexBinaryFlat(64)
index.add(codes)
found = [index.range_search(codes[i : i + 4096], 4) for i in range(0, 100_000, 4096)]  # distance < 4
a = np.repeat(np.arange(100_000), np.concatenate([np.diff(limits) for limits, _, _ in found]).astype(int))
b, d = (np.concatenate([part[place] for part in found]) for place in (2, 1))
keep = a < b
order = np.lexsort((b[keep], a[keep]))
np.save(sys.argv[1] + "/pairs.npy", np.stack([a[keep], b[keep], d[keep].astype(np.int64)])[:, order])
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    codes, (a, b, distances) = np.load(tmp_path / "codes.npy"), np.load(tmp_path / "pairs.npy")
    found = near_duplicates(codes, 3)
    assert len(found) > 10_000
    np.testing.assert_array_equal(found.a, a)
    np.testing.assert_array_equal(found.b, b)
    np.testing.assert_array_equal(found.distances, distances)


@pytest.mark.parametrize("radius", [0, 1, 3, 20])
def test_pairs_of_two_sets_are_those_of_a_loop(clustered, radius):
    one, other = clustered(150, 32, seed=1), clustered(200, 32, seed=1)[50:]
    other = np.concatenate([other, one[:20]])
    found = cross_duplicates(one, other, radius)
    wanted = [
        (i, j, d)
        for i, x in enumerate(one)
        for j, y in enumerate(other)
        if (d := (int.from_bytes(bytes(x), "big") ^ int.from_bytes(bytes(y), "big")).bit_count()) <= radius
    ]
    assert triples(found) == wanted


def test_two_sets_one_of_them_empty(clustered):
    assert len(cross_duplicates(clustered(5, 16), np.zeros((0, 2), np.uint8), 2)) == 0
    assert len(near_duplicates(np.zeros((0, 2), np.uint8))) == 0
    assert len(near_duplicates(np.zeros((1, 2), np.uint8))) == 0


def test_a_store_is_taken_with_its_ids(tmp_path, clustered, slow):
    codes = clustered(100, 24)
    ids = np.random.default_rng(0).permutation(1000)[:100]
    store = write_store(str(tmp_path / "codes"), codes, ids=ids, rows_per_shard=30)
    assert triples(hashnet.near_duplicates(store, radius=2)) == slow(codes, 2, ids)


def test_a_result_that_does_not_fit_is_refused_before_any_work(clustered, monkeypatch):
    monkeypatch.setattr(pairs_module, "join", lambda *_, **__: pytest.fail("no work"))
    equal = np.zeros((20_000, 8), np.uint8)
    with pytest.raises(DataError, match=r"199,990,000 pairs of 20,000 codes lie within radius 0.*max_pairs"):
        near_duplicates(equal, 0)
    codes = np.random.default_rng(0).integers(0, 256, (20_000, 8), dtype=np.uint8)
    with pytest.raises(DataError, match=r"about 199,990,000 pairs .* radius 64.*smaller radius"):
        near_duplicates(codes, 64)
    with pytest.raises(DataError, match="about 400,000,000"):
        cross_duplicates(codes, codes, 64)


def test_of_too_many_equal_codes_the_first_pairs_are_kept():
    cut = near_duplicates(np.zeros((20_000, 8), np.uint8), 2, max_pairs=3)
    assert triples(cut) == [(0, 1, 0), (0, 2, 0), (0, 3, 0)]
    assert (cut.truncated, cut.complete_radius) == (True, -1)


def test_bad_input_is_told(clustered):
    codes = clustered(10, 16)
    for call, error, words in (
        (lambda: near_duplicates(codes, -1), ConfigError, "radius"),
        (lambda: near_duplicates(codes, 1.5), ConfigError, "radius"),
        (lambda: near_duplicates(codes.astype(int)), CodeError, "packed uint8"),
        (lambda: near_duplicates(codes, ids=[1, 2]), CodeError, "10 codes came with 2 ids"),
        (lambda: near_duplicates(codes, ids=[2**63 + i for i in range(10)]), CodeError, "fit into int64"),
        (lambda: near_duplicates(codes, ids=[1] * 10), CodeError, "1 comes more than once"),
        (lambda: near_duplicates(codes, max_pairs=0), ConfigError, "max_pairs"),
        (lambda: cross_duplicates(codes, clustered(10, 24)), CodeError, "16 bits, right codes 24"),
    ):
        with pytest.raises(error, match=words):
            call()
