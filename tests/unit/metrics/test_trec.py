"""Rankings written for other programs, and their figures beside ours where the definitions agree."""

from __future__ import annotations

import numpy as np
import pytest

import hashnet
from hashnet.errors import CodeError
from hashnet.metrics import write_trec


@pytest.fixture(scope="module")
def case():
    """A multi-label database of 400 rows with many ties, and 30 queries; one has nothing relevant."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (430, 2), dtype=np.uint8)
    labels = rng.random((430, 7)) < 0.2
    labels[:, 0] |= ~labels.any(axis=1)
    labels = np.column_stack([labels, np.zeros(430, bool)])
    labels[0] = np.arange(8) == 7  # a class that no item carries
    return codes[:30], labels[:30], codes[30:], labels[30:]


def read_run(folder):
    """{query: {item: score}} and {query: {item: relevance}} of the two files."""
    run, qrels = {}, {}
    for line in (folder / "run.txt").read_text().splitlines():
        query, _, item, _, score, _ = line.split()
        run.setdefault(query, {})[item] = float(score)
    for line in (folder / "qrels.txt").read_text().splitlines():
        query, _, item, relevance = line.split()
        qrels.setdefault(query, {})[item] = int(relevance)
    return run, qrels


def test_the_order_is_the_one_that_evaluate_measures(case, tmp_path):
    query_codes, query_labels, database_codes, database_labels = case
    ids = np.random.default_rng(1).permutation(1000)[:400] - 20
    write_trec(tmp_path, *case, k=50, database_ids=ids, query_ids=np.arange(30) + 7, seed=3)
    run, qrels = read_run(tmp_path)
    assert list(run) == [str(name) for name in range(7, 37)]
    expected = hashnet.evaluate(*case, k=50, database_ids=ids, seed=3)
    row_of = {str(item): row for row, item in enumerate(ids)}
    for place, items in enumerate(run.values()):
        rows = np.array([row_of[item] for item in items])
        assert len(rows) == 50
        bits = np.unpackbits(query_codes[place] ^ database_codes[rows], axis=1).sum(axis=1)
        assert (np.diff(bits) >= 0).all()
        hits = (query_labels[place] & database_labels[rows]).any(axis=1)
        ranks = np.flatnonzero(hits) + 1
        ap = (np.arange(1, len(ranks) + 1) / ranks).mean() if len(ranks) else 0
        assert expected.ap[place] == pytest.approx(ap)
    for place in range(30):
        relevant = (query_labels[place] & database_labels).any(axis=1)
        assert set(qrels.get(str(place + 7), {})) == {str(item) for item in ids[relevant]}


def test_trec_eval_agrees(case, tmp_path):
    """Over the whole ranking AP has one denominator; P@N and nDCG@N agree at every N."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    write_trec(tmp_path, *case, k=None)
    run, qrels = read_run(tmp_path)
    report = hashnet.evaluate(*case, k=None)
    found = pytrec_eval.RelevanceEvaluator(qrels, {"map", "P", "ndcg", "ndcg_cut"}).evaluate(run)
    assert sorted(map(int, found)) == list(range(1, 30))  # trec_eval leaves out query 0: nothing is relevant

    def mean(name):
        return sum(values[name] for values in found.values()) / 30

    assert report.map_relevant == pytest.approx(mean("map"))
    assert report.precision_at(10) == pytest.approx(mean("P_10"))
    assert report.ndcg == pytest.approx(mean("ndcg"))
    assert hashnet.evaluate(*case, k=20).ndcg == pytest.approx(mean("ndcg_cut_20"))
    for place, value in enumerate(report.ap_relevant[1:], start=1):
        assert value == pytest.approx(found[str(place)]["map"])


def test_ir_measures_agrees_and_where_it_does_not(case, tmp_path):
    ir_measures = pytest.importorskip("ir_measures")
    write_trec(tmp_path, *case, k=100)
    run = list(ir_measures.read_trec_run(str(tmp_path / "run.txt")))
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.txt")))
    measures = [ir_measures.P @ 10, ir_measures.nDCG @ 100, ir_measures.AP @ 100]
    found = ir_measures.calc_aggregate(measures, qrels, run)
    report = hashnet.evaluate(*case, k=100)
    share = 29 / 30  # it leaves out the query that has nothing relevant
    assert report.precision_at(10) == pytest.approx(share * found[ir_measures.P @ 10])
    assert report.ndcg == pytest.approx(share * found[ir_measures.nDCG @ 100])
    # Its AP@k divides by all relevant items, ours by at most k of them: never below it.
    assert report.map_relevant > share * found[ir_measures.AP @ 100]


def test_torchmetrics_agrees_with_the_retrieved_denominator(case):
    torchmetrics = pytest.importorskip("torchmetrics")
    import torch

    query_codes, query_labels, database_codes, database_labels = case
    # Different distances only, so that no tie rule matters: one item per distance.
    item_of = {}
    for row, code in enumerate(database_codes):
        item_of.setdefault(int(np.unpackbits(query_codes[1] ^ code).sum()), row)
    rows = np.array(list(item_of.values()))
    distances = torch.tensor(list(item_of), dtype=torch.float32)
    relevant = torch.tensor((query_labels[1] & database_labels[rows]).any(axis=1))
    for k in (1, 2, len(rows)):
        metric = torchmetrics.retrieval.RetrievalMAP(top_k=k, empty_target_action="neg")
        theirs = metric(-distances, relevant, indexes=torch.zeros(len(rows), dtype=torch.long))
        ours = hashnet.evaluate(
            query_codes[1:2], query_labels[1:2], database_codes[rows], database_labels[rows], k=k
        )
        assert ours.map == pytest.approx(float(theirs))


def test_ids_that_do_not_fit_are_refused(case, tmp_path):
    with pytest.raises(CodeError, match="30 codes came with 29 query ids"):
        write_trec(tmp_path, *case, query_ids=np.arange(29))
    with pytest.raises(CodeError, match=f"query ids must fit into int64, got {2**63}"):
        write_trec(tmp_path, *case, query_ids=np.arange(2**63 - 29, 2**63 + 1, dtype=np.uint64))
