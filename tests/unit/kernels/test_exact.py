"""The kernel: equal to plain loops and to FAISS Flat, to the last id, at every width and odd size."""

import os
import subprocess
import sys
import threading

import faiss
import numpy as np
import pytest

from hashnet.index import faiss_search
from hashnet.kernels import exact
from hashnet.kernels.exact import merge_top_k

WIDTHS = (8, 16, 24, 32, 48, 64, 72, 128, 192, 248, 256, 264, 512, 776, 1024, 3072, 4096)
SORTS = ("random", "clustered", "duplicated", "equal")


def as_lists(positions, distances):
    return [
        [(int(d), int(p)) for p, d in zip(ps, ds, strict=True) if p >= 0]
        for ps, ds in zip(positions, distances, strict=True)
    ]


@pytest.mark.parametrize("n_bits", WIDTHS)
@pytest.mark.parametrize("sort", SORTS)
def test_top_k_equals_plain_loops(codes_of, slow, n_bits, sort):
    for n in (1, 63, 64, 65, 130):
        codes = codes_of(sort, n, n_bits, seed=n)
        queries = np.concatenate([codes[:2], ~codes[-1:], codes_of("random", 2, n_bits, seed=9)])
        truth = [slow(query, dict(enumerate(codes))) for query in queries]
        for k in (1, 7, n, n + 3):
            positions, distances = exact.top_k(codes, queries, k)
            assert positions.shape == distances.shape == (len(queries), k)
            assert positions.dtype == np.int64
            assert distances.dtype == np.int32
            assert as_lists(positions, distances) == [hits[:k] for hits in truth]
            assert (positions[:, n:] == -1).all()
            assert (distances[:, n:] == -1).all()


@pytest.mark.parametrize("n_bits", WIDTHS)
@pytest.mark.parametrize("n", [4096, 9001])  # one block of the kernel, and three with a rest
def test_top_k_equals_faiss(codes_of, n_bits, n):
    codes = codes_of("clustered", n, n_bits, seed=n)
    queries = codes_of("clustered", 35, n_bits, seed=n)  # more than one group of queries
    flat = faiss.IndexBinaryFlat(n_bits)
    flat.add(codes)
    for k in (1, 10, 100, 1000):
        far, near = flat.search(queries, k)
        positions, distances = exact.top_k(codes, queries, k)
        assert (positions == near).all()
        assert (distances == far).all()


def test_worst_order_for_the_bound(codes_of, slow):
    """Codes that come ever nearer: every one of them becomes a candidate and buffers are compacted."""
    rng = np.random.default_rng(0)
    query = np.zeros((1, 8), dtype=np.uint8)
    ones = np.sort(rng.integers(0, 65, 6000))[::-1]
    codes = np.packbits(np.arange(64)[None, :] < ones[:, None], axis=1)
    truth = slow(query[0], dict(enumerate(codes)))
    for k in (1, 3, 50, 700, 6000):
        assert as_lists(*exact.top_k(codes, query, k)) == [truth[:k]]


def test_every_long_width(codes_of):
    """33 to 512 bytes: whole words and odd ends, fewer and more than the eights that are added up at once."""
    for n_bytes in range(33, 513):
        codes = codes_of("random", 75, 8 * n_bytes, seed=n_bytes)
        queries = np.concatenate([codes[:2], ~codes[-2:], codes_of("random", 3, 8 * n_bytes, seed=9)])
        truth = np.bitwise_count(codes[None] ^ queries[:, None]).sum(axis=2)
        order = np.argsort(truth, axis=1, kind="stable")
        for few in (1, len(queries)):  # rows are read as they lie for one, interleaved for a batch
            positions, distances = exact.top_k(codes, queries[:few], 80)
            assert (positions[:, :75] == order[:few]).all()
            assert (distances[:, :75] == np.take_along_axis(truth, order, axis=1)[:few]).all()


@pytest.mark.parametrize("counting", [False, True])
def test_long_codes_on_other_machines(repo, tmp_path, counting):
    """Without wide registers, and on a machine that counts the ones of words."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)} | (
        {} if counting else {"NUMBA_CPU_NAME": "generic"}
    )
    script = OTHER_MACHINE.replace("COUNTING", str(counting))
    subprocess.check_output([sys.executable, "-c", script], env=env, cwd=repo)


OTHER_MACHINE = """
import numpy as np
from hashnet.kernels import exact, jit

if COUNTING:
    jit._host_has = lambda feature: feature == "avx512vpopcntdq"  # LLVM finds other instructions for it
else:
    assert not jit.has_avx2()
rng = np.random.default_rng(0)
for n_bytes in (40, 64, 97, 128, 384, 512):
    codes = rng.integers(0, 256, (200, n_bytes), dtype=np.uint8)
    queries = rng.integers(0, 256, (9, n_bytes), dtype=np.uint8)
    truth = np.bitwise_count(codes[None] ^ queries[:, None]).sum(axis=2)
    order = np.argsort(truth, axis=1, kind="stable")
    for few in (1, 9):
        positions, distances = exact.top_k(codes, queries[:few], 200)
        assert (positions == order[:few]).all()
        assert (distances == np.take_along_axis(truth, order, axis=1)[:few]).all()
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_answer(codes_of, threads):
    codes = codes_of("clustered", 200_000, 32)
    for n_queries in (1, 10, 40):  # one scan; the database is cut; the queries are
        queries = codes_of("clustered", n_queries, 32)
        one = exact.top_k(codes, queries, 50, threads=1)
        many = exact.top_k(codes, queries, 50, threads=threads)
        assert all((a == b).all() for a, b in zip(one, many, strict=True))
        near = exact.within_radius(codes, queries, 1, threads=threads)
        for (a, b), (c, d) in zip(exact.within_radius(codes, queries, 1, threads=1), near, strict=True):
            assert (a == c).all()
            assert (b == d).all()


@pytest.mark.parametrize("n_bits", [8, 48, 64, 128, 256, 512, 1064])
def test_filter(codes_of, slow, n_bits):
    rng = np.random.default_rng(n_bits)
    codes = codes_of("duplicated", 300, n_bits)
    queries = codes[:9]
    allowed = (rng.random(300) < 0.5).astype(np.uint8)
    flat = faiss.IndexBinaryFlat(n_bits)
    flat.add(codes)
    truth = []
    for query in queries:
        truth.append(slow(query, {i: codes[i] for i in range(300) if allowed[i]}))
    for k in (1, 20, 300):
        expected = [hits[:k] for hits in truth]
        assert as_lists(*exact.top_k(codes, queries, k, allowed=allowed)) == expected
        assert as_lists(*faiss_search.top_k(flat, queries, k, allowed)) == expected
    for radius in (0, 3, n_bits):
        expected = [[hit for hit in hits if hit[0] <= radius] for hits in truth]
        ours = exact.within_radius(codes, queries, radius, allowed=allowed)
        theirs = faiss_search.within_radius(flat, queries, radius, allowed)
        assert as_lists(*zip(*ours, strict=True)) == as_lists(*zip(*theirs, strict=True)) == expected


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("n_bits", [8, 32, 64, 96, 256, 512, 1064])
def test_radius_equals_plain_loops(codes_of, slow, n_bits, sort):
    codes = codes_of(sort, 150, n_bits)
    queries = codes_of(sort, 40, n_bits, seed=0)
    for radius in (0, 1, n_bits // 3, n_bits, n_bits + 100):
        for query, hits in zip(queries, exact.within_radius(codes, queries, radius), strict=True):
            expected = [hit for hit in slow(query, dict(enumerate(codes))) if hit[0] <= radius]
            assert as_lists([hits[0]], [hits[1]]) == [expected]


def test_odd_addresses_and_read_only_memory(codes_of):
    """A memory-mapped FAISS file has its codes at odd addresses in read-only pages."""
    codes = codes_of("clustered", 5000, 64)
    buffer = bytearray(33 + codes.size)
    buffer[33:] = codes.tobytes()
    odd = np.frombuffer(bytes(buffer), dtype=np.uint8, offset=33).reshape(codes.shape)
    assert not odd.flags.writeable
    expected = exact.top_k(codes, codes[:3], 20)
    assert all((a == b).all() for a, b in zip(exact.top_k(odd, codes[:3], 20), expected, strict=True))


def test_merge_keeps_the_smallest_ids_of_a_tie():
    ids, distances = merge_top_k(
        [np.array([[5, 9, -1]]), np.array([[2, 7, 11]])],
        [np.array([[1, 1, -1]], np.int32), np.array([[1, 1, 3]], np.int32)],
        4,
    )
    assert ids.tolist() == [[2, 5, 7, 9]]
    assert distances.tolist() == [[1, 1, 1, 1]]


def test_many_threads_search_at_once(codes_of):
    codes = codes_of("clustered", 100_000, 64)
    queries = codes[:20]
    expected = exact.top_k(codes, queries, 10)
    wrong = []

    def ask():
        for _ in range(5):
            found = exact.top_k(codes, queries, 10, threads=2)
            if any((a != b).any() for a, b in zip(found, expected, strict=True)):
                wrong.append(1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
