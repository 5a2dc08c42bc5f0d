"""Structured events of encoding; no Ray is started."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from cluster.encode import pipeline, summary
from hashnet.encoding.worker import EncodeTask
from hashnet.io import events
from hashnet.store import PlannedPart, ShardRange, ShardRecord


@pytest.fixture
def told(monkeypatch):
    heard = []
    monkeypatch.setattr(events, "event", lambda message, **fields: heard.append({"event": message, **fields}))
    return heard


def test_an_encoder_of_features_reports_the_shards_it_commits(told, monkeypatch):
    shard = ShardRange("codes-00017", PlannedPart("part-0", "00", 8), 0, 8)
    record = ShardRecord("codes-00017", 7, 1, "0a", 100, "part-0", "00", 0, 8, {"not_finite": 1})
    monkeypatch.setattr(pipeline, "encode_features", lambda *_: iter([(shard, None)]))
    monkeypatch.setattr(pipeline, "commit_table", lambda *_: record)
    worker = object.__new__(pipeline.FeatureEncoder)
    worker.refused, worker.encoder, worker.name = None, None, "node/1"
    worker.settings = SimpleNamespace(reader=None, output="codes", targets=(), run="demo", repair=False)
    worker(pa.table({"task": [EncodeTask((shard,), 0, 8).to_json()]}))
    about = {"run": "demo", "stage": "encode", "shard": "codes-00017"}
    assert told == [{"event": "shard committed", **about, "rows": 7, "bad": 1}]


def test_decoding_reports_bad_rows_and_nothing_else(told):
    reasons = pa.array([None, "empty", None, "truncated", "empty"], pa.string())
    decoded = pa.table({"shard": ["codes-00003"] * 5, "reason": reasons})
    summary.report_bad_rows("demo", decoded)
    summary.report_bad_rows("demo", decoded.slice(0, 1))
    about = {"run": "demo", "stage": "encode", "shard": "codes-00003"}
    assert told == [{"event": "bad rows", **about, "reasons": {"empty": 2, "truncated": 1}}]
