"""Structured events of an evaluation; no Ray is started."""

from cluster.evaluate import job as evaluation
from cluster.evaluate.job import EvaluateConfig
from cluster.evaluate.tasks import Evaluation
from cluster.runtime import connection
from hashnet.io import events
from hashnet.metrics import QueryMeasures


def test_evaluation_reports_each_range_of_queries(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(events, "event", lambda message, **fields: told.append({"event": message, **fields}))
    spans = [(0, 64), (64, 100)]
    monkeypatch.setattr(connection, "connect", lambda: None)
    monkeypatch.setattr(evaluation, "query_ranges", lambda n, k: spans)
    monkeypatch.setattr(evaluation, "shard_groups", lambda store, rows: [])
    monkeypatch.setattr(evaluation, "run_ranges", lambda *_: iter([(span, []) for span in spans]))
    monkeypatch.setattr(QueryMeasures, "dump_blocks", lambda blocks: b"{}")
    monkeypatch.setattr(QueryMeasures, "load_blocks", lambda data: [])
    monkeypatch.setattr(QueryMeasures, "concatenate", list)
    config = EvaluateConfig(run=str(tmp_path / "demo"))
    queries = Evaluation(store=None, codes=range(100), labels=None, k=10, seed=0, device="cpu")
    evaluation._measure_all(config, queries, {})
    about = {"event": "queries measured", "stage": "evaluate", "run": "demo"}
    assert told == [{**about, "first": 0, "stop": 64}, {**about, "first": 64, "stop": 100}]
