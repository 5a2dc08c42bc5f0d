"""Counts, keys and scores: against loops, merged from any pieces, at the borders of the kernel's blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hashnet.codes import hamming_distances, pack_signs, unpack_codes
from hashnet.errors import CodeError, DeviceMemoryError
from hashnet.kernels.bitslice import ITEMS
from hashnet.labels import LabelSets, share_label
from hashnet.metrics.evaluation import check_labels, evaluate
from hashnet.metrics.shard import HASH_BITS, QueryCounts, Ranking, ScoreShard, Shard, tie_hash
from hashnet.metrics.torch_shard import TorchShard


def expected(queries, query_labels, codes, labels, ids, k, seed=0):
    """Counts and sorted keys by numpy over the whole distance matrix."""
    n_bits = codes.shape[1] * 8
    distances, relevant = hamming_distances(queries, codes), share_label(query_labels, labels)
    counts = np.array(
        [
            [np.bincount(row, minlength=n_bits + 1) for row in distances],
            [
                np.bincount(row[own], minlength=n_bits + 1)
                for row, own in zip(distances, relevant, strict=True)
            ],
        ]
    )
    keys = distances.astype(np.uint64) << np.uint64(53) | tie_hash(ids, seed) << np.uint64(1)
    return QueryCounts(counts, np.sort(keys | relevant.astype(np.uint64), axis=1)[:, :k])


def assert_equal(found: QueryCounts, wanted: QueryCounts) -> None:
    np.testing.assert_array_equal(found.counts, wanted.counts)
    np.testing.assert_array_equal(found.keys, wanted.keys)


def random_case(n_bits, n, classes, q=6, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, n_bits // 8), dtype=np.uint8)
    queries = rng.integers(0, 256, (q, n_bits // 8), dtype=np.uint8)
    queries[0], queries[1] = codes[0], ~codes[n // 2]  # distances 0 and n_bits occur
    query_labels = np.eye(classes, dtype=np.uint8)[rng.integers(0, classes, q)]
    labels = np.eye(classes, dtype=np.uint8)[rng.integers(0, classes, n)]
    return queries, query_labels, codes, labels, rng.permutation(10 * n)[:n]


@pytest.mark.parametrize("n", [1, 63, 64, 65, ITEMS - 1, ITEMS, ITEMS + 1, 2 * ITEMS + 100])
@pytest.mark.parametrize(
    ("n_bits", "classes", "parity"),
    [(16, 3, None), (64, 200, None), (64, 3, 0), (64, 3, 1), (128, 3, None), (200, 200, None), (200, 3, 1)],
)
def test_blocks_and_widths(n, n_bits, classes, parity):
    case = random_case(n_bits, n, classes)
    if parity is not None:  # every code has an even, or an odd, number of ones
        wrong = np.bitwise_count(case[2]).sum(axis=1) % 2 != parity
        case[2][wrong, -1] ^= 1
    queries, database = check_labels(case[1], case[3])
    for k in (1, 50, n):
        found = Shard.build(case[2], database, case[4]).count(case[0], queries, k)
        assert_equal(found, expected(*case, k))


@pytest.mark.parametrize("n_bits", range(8, 1025, 8))
def test_every_code_length(n_bits):
    case = random_case(n_bits, 300, 5)
    queries, database = check_labels(case[1], case[3])
    for shard in (Shard, TorchShard):
        more = {"device": "cpu"} if shard is TorchShard else {}
        found = shard.build(case[2], database, case[4], **more).count(case[0], queries, 100)
        assert_equal(found, expected(*case, 100))


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_merge_to_the_last_bit(pieces, threads):
    queries, query_labels, codes, labels, ids = random_case(24, 20_000, 4, q=40)
    wanted, sets = check_labels(query_labels, labels)
    whole = Shard.build(codes, sets, ids).count(queries, wanted, 500, threads=1)
    cuts = np.linspace(0, 20_000, pieces + 1).astype(int)
    some = [
        Shard.build(codes[a:b], sets.rows(a, b), ids[a:b]).count(queries, wanted, 500, threads=threads)
        for a, b in itertools.pairwise(cuts)
    ]
    merged = QueryCounts.merge(some[::-1], 500)  # in any order
    assert_equal(merged, whole)


def test_a_wrong_guess_of_the_reach_is_made_good():
    # The first block by hash holds all near items and the guess extrapolates them; the rest is far away.
    n, k = 3 * ITEMS, 2000
    codes = np.full((n, 8), 255, dtype=np.uint8)
    first = np.argsort(tie_hash(np.arange(n)))[:1000]
    codes[first] = 0
    labels = np.arange(n) % 5
    queries, database = check_labels([1], labels)
    query = np.zeros((1, 8), dtype=np.uint8)
    found = Shard.build(codes, database).count(query, queries, k)
    assert_equal(found, expected(query, np.eye(5)[[1]], codes, np.eye(5)[labels], np.arange(n), k))
    assert found.counts[0, 0, 0] == 1000


def test_many_ties_do_not_overflow_what_is_kept():
    # distances shrink from block to block, so what was kept early has to be dropped again and again
    n, k = 12 * ITEMS, 3 * ITEMS
    codes = np.zeros((n, 8), dtype=np.uint8)
    order = np.argsort(tie_hash(np.arange(n)))
    for block in range(12):
        ones = np.zeros(64, dtype=np.uint8)
        ones[: 60 - 4 * block] = 1  # even: they stay in one part
        codes[order[block * ITEMS : (block + 1) * ITEMS]] = np.packbits(ones)
    labels = (np.arange(n) % 2).astype(np.int64)
    queries, database = check_labels([1], labels)
    query = np.zeros((1, 8), dtype=np.uint8)
    found = Shard.build(codes, database).count(query, queries, k)
    assert_equal(found, expected(query, np.eye(2)[[1]], codes, np.eye(2)[labels], np.arange(n), k))


def test_torch_says_the_same(monkeypatch):
    monkeypatch.setattr("hashnet.metrics.torch_shard.TILE", 3000)  # several tiles
    queries, _, codes, _, ids = random_case(64, 2000, 4)
    rng = np.random.default_rng(5)
    labels, query_labels = rng.random((2000, 30)) < 0.1, rng.random((6, 30)) < 0.2
    query_labels[:, 3] = True
    wanted, sets = check_labels(query_labels, labels)
    for k in (1, 100, 2000):
        one = Shard.build(codes, sets, ids, seed=4).count(queries, wanted, k)
        other = TorchShard.build(codes, sets, ids, seed=4, device="cpu").count(queries, wanted, k)
        assert_equal(one, other)


def test_too_little_memory_on_the_device_names_the_way_out(monkeypatch):
    def full(*_):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr("hashnet.metrics.torch_shard._multi_hot", full)
    queries, query_labels, codes, labels, ids = random_case(64, 2000, 4)
    wanted, sets = check_labels(query_labels, labels)
    shard = TorchShard.build(codes, sets, ids, device="cpu")
    with pytest.raises(DeviceMemoryError, match=r"6 queries x 2,000 items; use device=cpu \(CUDA error"):
        shard.count(queries, wanted, 10)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a GPU")
def test_cuda_says_the_same():
    queries, query_labels, codes, labels, ids = random_case(64, 50_000, 20, q=300)
    wanted, sets = check_labels(query_labels, labels)
    one = Shard.build(codes, sets, ids).count(queries, wanted, 1000)
    other = TorchShard.build(codes, sets, ids, device="cuda").count(queries, wanted, 1000)
    assert_equal(one, other)


def test_tie_hash_is_the_loop_and_has_no_collision(slow):
    ids = np.array([0, 1, 2, 99, 10**9, 2**51 + 7, 2**52 - 1, -1])
    for seed in (0, 1, 12345):
        assert tie_hash(ids, seed).tolist() == [slow.hash(int(i), seed) for i in ids]
    many = tie_hash(np.arange(300_000), 7)
    assert len(np.unique(many)) == 300_000
    assert many.max() < 2**52
    assert abs(many.mean() / 2**52 - 0.5) < 0.005


def test_keys_hold_distance_and_relevance():
    queries, database = check_labels([1], [1, 0])
    codes = np.array([[255], [1]], dtype=np.uint8)
    keys = Shard.build(codes, database).count(np.zeros((1, 1), np.uint8), queries, 2).keys
    assert (keys >> np.uint64(HASH_BITS + 1)).tolist() == [[1, 8]]
    assert (keys & np.uint64(1)).tolist() == [[0, 1]]


def test_wide_label_lists_cost_what_they_hold():
    # 300,000 classes on 1,000 rows: a multi-hot matrix would take 300 MB
    labels = np.arange(1000) * 300
    sets = LabelSets.of(labels)
    assert sets.n_classes == 299_701
    shard = Shard.build(np.zeros((1000, 1), np.uint8), sets)
    assert shard.classes.masks.nbytes + shard.classes.lists.nbytes < 100_000


def slow_map(slow, order_of, query_labels, labels, k):
    """Mean over queries of AP@k, retrieved denominator; ``order_of(q)`` are its rows, best first."""
    relevant = [(labels & wanted).any(axis=1) for wanted in query_labels]
    return np.mean([slow.ap(own[order_of(q)].tolist(), own.sum(), k)[0] for q, own in enumerate(relevant)])


def score_case(n_bits, n=230, q=7, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, n_bits // 8), dtype=np.uint8)
    codes[::3] = codes[0]  # ties
    logits = (rng.integers(-40, 40, (q, n_bits)) / 8).astype(np.float32)
    labels, wanted = rng.random((n, 70)) < 0.04, rng.random((q, 70)) < 0.1
    wanted[:, 3] = True
    return codes, logits, labels, wanted, rng.permutation(10_000)[:n]


@pytest.mark.parametrize("k", [1, 25, 500])
def test_the_order_is_score_then_hash(slow, k):
    codes, logits, labels, wanted, ids = score_case(48)
    scores, hashes = logits.astype(np.float64) @ unpack_codes(codes).T.astype(np.float64), tie_hash(ids, 5)

    def order_of(q):
        return sorted(range(len(codes)), key=lambda row: (-scores[q, row], hashes[row]))

    report = evaluate(
        pack_signs(logits), wanted, codes, labels, k, database_ids=ids, seed=5, query_logits=logits
    )
    assert report.map_asymmetric == pytest.approx(slow_map(slow, order_of, wanted, labels, k), abs=1e-12)
    assert report.map_asymmetric_interval[0] <= report.map_asymmetric <= report.map_asymmetric_interval[1]
    assert evaluate(pack_signs(logits), wanted, codes, labels, k).map_asymmetric is None


def test_rankings_by_score_merge_to_the_whole():
    codes, logits, labels, wanted, ids = score_case(32)
    sets, queries = LabelSets.of(labels), LabelSets.of(wanted)
    whole = ScoreShard.build(codes, sets, ids, 1).rank(logits, queries, 40)
    cuts = [(0, 90), (90, 91), (91, 230)]
    pieces = [
        ScoreShard.build(codes[a:b], sets.rows(a, b), ids[a:b], 1).rank(logits, queries, 40) for a, b in cuts
    ]
    merged = Ranking.merge(pieces, 40)
    assert np.array_equal(merged.scores, whole.scores)
    assert np.array_equal(merged.keys, whole.keys)


@pytest.mark.parametrize("n_bits", [2040, 2048, 4096])
def test_long_codes_are_counted_and_ranked(slow, n_bits):
    codes, logits, labels, wanted, ids = score_case(n_bits, n=90, q=4)
    queries = pack_signs(logits)
    queries[0] = ~codes[0]  # a distance of n_bits itself
    distances = np.bitwise_count(queries[:, None] ^ codes[None]).sum(axis=2, dtype=np.int64)
    hashes = tie_hash(ids, 0)

    def order_of(q):
        return sorted(range(len(codes)), key=lambda row: (distances[q, row], hashes[row]))

    report = evaluate(queries, wanted, codes, labels, 30, database_ids=ids)
    assert report.map == pytest.approx(slow_map(slow, order_of, wanted, labels, 30), abs=1e-12)
    counted = np.bincount(distances.ravel(), minlength=n_bits + 1)
    assert (np.array(report.similar) + np.array(report.dissimilar)).tolist() == counted.tolist()


def test_logits_of_the_wrong_width_are_refused():
    codes, logits, labels, wanted, _ = score_case(48)
    for wrong in (logits[:, 1:], logits[1:], logits * np.nan):
        with pytest.raises(CodeError, match=r"query logits must be finite numbers of shape \(7, 48\)"):
            evaluate(pack_signs(logits), wanted, codes, labels, query_logits=wrong)
    assert QueryCounts.merge([QueryCounts(np.zeros((2, 1, 9)), np.zeros((1, 0)))], 3).ranking is None
