"""Neighbour recall and distance correlation: against loops, every tie order, scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import spearmanr

from hashnet.codes import hamming_distances, pack_signs, unpack_codes
from hashnet.errors import CodeError, DataError
from hashnet.metrics import (
    NeighbourReport,
    VectorSample,
    exact_neighbours,
    neighbour_report,
    ranked_report,
)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(300, 8)).astype(np.float32)
    return vectors[:20], vectors[20:], pack_signs(vectors[:20]), pack_signs(vectors[20:])


def test_true_neighbours_are_those_of_a_loop(data, monkeypatch):
    from hashnet.metrics import neighbours

    queries, database, _, _ = data
    wanted = [
        [j for _, j in sorted((float(((q - x) ** 2).sum()), j) for j, x in enumerate(database))[:7]]
        for q in queries.astype(np.float64)
    ]
    monkeypatch.setattr(neighbours, "BLOCK", 50)
    assert exact_neighbours(queries, [database[:33], database[33:]], 7).tolist() == wanted


def test_a_row_does_not_find_itself(data):
    _, database, _, _ = data
    own = np.arange(len(database))
    found = exact_neighbours(database, [database], 3, skip=own)
    assert not (found == own[:, None]).any()
    assert (exact_neighbours(database, [database], 1)[:, 0] == own).all()


def test_recall_is_the_mean_over_every_order_of_ties():
    # distances 1, 1, 1, 2: two of the three nearest are true; within 2, each is inside with probability 2/3
    codes = np.array([[1], [2], [4], [3]], dtype=np.uint8)
    truth = np.array([[0, 3]])
    distances = [1, 1, 1, 2]
    values = []
    for order in itertools.permutations(range(4)):
        if all(distances[a] <= distances[b] for a, b in itertools.pairwise(order)):
            values.append(len({0, 3} & set(order[:2])) / 2)
    report = neighbour_report(np.zeros((1, 1), np.uint8), codes, truth, within=2)
    assert report.recall == pytest.approx(np.mean(values)) == pytest.approx(1 / 3)


def test_recall_against_many_random_tie_orders(data):
    queries, database, query_codes, codes = data
    truth = exact_neighbours(queries, [database], 5)
    report = neighbour_report(query_codes, codes, truth, within=30)
    distances = hamming_distances(query_codes, codes)
    rng = np.random.default_rng(1)
    found = []
    for _ in range(300):
        order = np.lexsort((rng.random(distances.shape), distances), axis=1)[:, :30]
        found.append(
            np.mean([len(set(a) & set(b)) / 5 for a, b in zip(order.tolist(), truth.tolist(), strict=True)])
        )
    assert report.recall == pytest.approx(np.mean(found), abs=0.01)
    assert report.recall_interval[0] < report.recall < report.recall_interval[1]
    assert report.recall_within[report.ranks.index(30)] == pytest.approx(report.recall)
    assert list(report.recall_within) == sorted(report.recall_within)
    assert np.mean(report.recalls) == pytest.approx(report.recall)


def test_asymmetric_recall_is_that_of_a_loop(data, monkeypatch):
    from hashnet.metrics import neighbours

    queries, database, query_codes, codes = data
    truth = exact_neighbours(queries, [database], 5)
    logits = np.random.default_rng(3).normal(size=(len(queries), codes.shape[1] * 8)).round(1)
    scores = logits.astype(np.float32) @ unpack_codes(codes).T.astype(np.float32)
    wanted = []
    for row, true in zip(scores, truth, strict=True):
        inside = [(30 - (row > row[t]).sum()) / (row == row[t]).sum() for t in true]
        wanted.append(np.clip(inside, 0, 1).mean())
    monkeypatch.setattr(neighbours, "BLOCK", 64)
    report = neighbour_report(query_codes, codes, truth, within=30, logits=logits)
    assert report.asymmetric == pytest.approx(np.mean(wanted), abs=0.003)  # sums of floats in another order
    assert report.asymmetric_interval[0] < report.asymmetric < report.asymmetric_interval[1]
    again = NeighbourReport.from_dict(report.to_dict())
    assert again == report
    older = {name: value for name, value in report.to_dict().items() if "asymmetric" not in name}
    assert NeighbourReport.from_dict(older).asymmetric is None


def test_codes_as_logits_rank_like_hamming_distance(data):
    queries, database, query_codes, codes = data
    truth = exact_neighbours(queries, [database], 5)
    report = neighbour_report(query_codes, codes, truth, within=30, logits=unpack_codes(query_codes))
    assert report.asymmetric_within == pytest.approx(report.recall_within)


def test_any_ranking_can_be_measured():
    found, truth = np.array([[3, 1, 2, 0], [0, 1, 2, 3]]), np.array([[1, 0], [3, 2]])
    report = ranked_report(found, truth, n_database=4, n_bits=8, within=3)
    assert report.recall == 0.5  # 1 of 2, and 1 of 2
    assert report.recalls == (0.5, 0.5)


def test_correlation_is_scipy_s(data):
    queries, database, query_codes, codes = data
    truth = exact_neighbours(queries, [database], 5)
    report = neighbour_report(
        query_codes, codes, truth, sample=VectorSample(queries, np.arange(280), database)
    )
    euclidean = ((queries[:, None] - database[None]) ** 2).sum(axis=2)
    hamming = hamming_distances(query_codes, codes)
    wanted = [spearmanr(a, b).statistic for a, b in zip(euclidean, hamming, strict=True)]
    assert report.correlation == pytest.approx(np.mean(wanted), abs=1e-6)
    assert report.correlation_interval[0] < report.correlation < report.correlation_interval[1]


def test_bad_input_is_told(data):
    queries, database, query_codes, codes = data
    with pytest.raises(DataError, match="280 vectors, but 281"):
        exact_neighbours(queries, [database], 281)
    with pytest.raises(CodeError, match="8 values, the database 4"):
        exact_neighbours(queries, [database[:, :4]], 3)
    with pytest.raises(CodeError, match="20 query codes"):
        neighbour_report(query_codes, codes, np.zeros((3, 5), np.int64))
