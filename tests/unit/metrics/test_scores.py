"""MAP of the asymmetric ranking, and of long codes, against loops."""

import numpy as np
import pytest

from hashnet.codes import pack_signs, unpack_codes
from hashnet.errors import CodeError
from hashnet.labels import LabelSets
from hashnet.metrics import QueryCounts, Ranking, ScoreShard, evaluate, tie_hash


def slow_map(order_of, query_labels, labels, k):
    """Mean over queries of AP@k, retrieved denominator; ``order_of(q)`` are its rows, best first."""
    values = []
    for q, wanted in enumerate(query_labels):
        hits, total = 0, 0.0
        for rank, row in enumerate(order_of(q)[:k], start=1):
            if (labels[row] & wanted).any():
                hits += 1
                total += hits / rank
        values.append(total / max(hits, 1))
    return float(np.mean(values))


def problem(n_bits, n=230, q=7, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, n_bits // 8), dtype=np.uint8)
    codes[::3] = codes[0]  # ties
    logits = (rng.integers(-40, 40, (q, n_bits)) / 8).astype(np.float32)
    labels, wanted = rng.random((n, 70)) < 0.04, rng.random((q, 70)) < 0.1
    wanted[:, 3] = True
    return codes, logits, labels, wanted, rng.permutation(10_000)[:n]


@pytest.mark.parametrize("k", [1, 25, 500])
def test_the_order_is_score_then_hash(k):
    codes, logits, labels, wanted, ids = problem(48)
    scores, hashes = logits.astype(np.float64) @ unpack_codes(codes).T.astype(np.float64), tie_hash(ids, 5)

    def order_of(q):
        return sorted(range(len(codes)), key=lambda row: (-scores[q, row], hashes[row]))

    report = evaluate(
        pack_signs(logits), wanted, codes, labels, k, database_ids=ids, seed=5, query_logits=logits
    )
    assert report.map_asymmetric == pytest.approx(slow_map(order_of, wanted, labels, k), abs=1e-12)
    assert report.map_asymmetric_interval[0] <= report.map_asymmetric <= report.map_asymmetric_interval[1]
    assert evaluate(pack_signs(logits), wanted, codes, labels, k).map_asymmetric is None


def test_pieces_merge_to_the_whole():
    codes, logits, labels, wanted, ids = problem(32)
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
def test_long_codes_are_counted_and_ranked(n_bits):
    codes, logits, labels, wanted, ids = problem(n_bits, n=90, q=4)
    queries = pack_signs(logits)
    queries[0] = ~codes[0]  # a distance of n_bits itself
    distances = np.bitwise_count(queries[:, None] ^ codes[None]).sum(axis=2, dtype=np.int64)
    hashes = tie_hash(ids, 0)

    def order_of(q):
        return sorted(range(len(codes)), key=lambda row: (distances[q, row], hashes[row]))

    report = evaluate(queries, wanted, codes, labels, 30, database_ids=ids)
    assert report.map == pytest.approx(slow_map(order_of, wanted, labels, 30), abs=1e-12)
    counted = np.bincount(distances.ravel(), minlength=n_bits + 1)
    assert (np.array(report.similar) + np.array(report.dissimilar)).tolist() == counted.tolist()


def test_logits_of_the_wrong_width_are_refused():
    codes, logits, labels, wanted, _ = problem(48)
    for wrong in (logits[:, 1:], logits[1:], logits * np.nan):
        with pytest.raises(CodeError, match=r"query logits must be finite numbers of shape \(7, 48\)"):
            evaluate(pack_signs(logits), wanted, codes, labels, query_logits=wrong)
    assert QueryCounts.merge([QueryCounts(np.zeros((2, 1, 9)), np.zeros((1, 0)))], 3).ranking is None
