"""Structured events of every stage, and the nodes that come and go; no Ray is started."""

import json
import os
from types import SimpleNamespace

import pyarrow as pa
import pytest
import ray

from cluster.encode import stages as encode_stages
from cluster.evaluate import job as evaluation
from cluster.evaluate.job import EvaluateConfig
from cluster.runtime import connection, nodes
from cluster.runtime.node_monitor import Watch
from cluster.runtime.nodes import Node
from hashnet.encoding.tasks import EncodeTask
from hashnet.io import events
from hashnet.store.commit import ShardRecord
from hashnet.store.plan import PlannedPart, ShardRange


@pytest.fixture
def told(monkeypatch):
    heard = []
    monkeypatch.setattr(events, "event", lambda message, **fields: heard.append({"event": message, **fields}))
    return heard


def test_events_before_ray_is_there_do_not_keep_later_ones_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    events.event("too early", run="demo")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    for shard in ("codes-00000", "codes-00001"):
        events.event("shard committed", run="demo", shard=shard)
    written = (tmp_path / f"hashnet-{os.getpid()}.jsonl").read_text().splitlines()
    assert [json.loads(line)["shard"] for line in written] == ["codes-00000", "codes-00001"]


def test_an_encoder_of_features_tells_of_the_shards_it_commits(told, monkeypatch):
    shard = ShardRange("codes-00017", PlannedPart("part-0", "00", 8), 0, 8)
    record = ShardRecord("codes-00017", 7, 1, "0a", 100, "part-0", "00", 0, 8, {"not_finite": 1})
    monkeypatch.setattr(encode_stages, "encode_features", lambda *_: iter([(shard, None)]))
    monkeypatch.setattr(encode_stages, "commit_table", lambda *_: record)
    worker = object.__new__(encode_stages.FeatureEncoder)
    worker.refused, worker.encoder, worker.name = None, None, "node/1"
    worker.stage = SimpleNamespace(
        source=None, plan=SimpleNamespace(output="codes"), run="demo", uri="", repair=False
    )
    worker(pa.table({"work": [EncodeTask((shard,), 0, 8).to_json()]}))
    about = {"run": "demo", "stage": "encode", "shard": "codes-00017"}
    assert told == [{"event": "shard committed", **about, "rows": 7, "bad": 1}]


def test_decoding_tells_of_bad_rows_and_of_nothing_else(told):
    reasons = pa.array([None, "empty", None, "truncated", "empty"], pa.string())
    decoded = pa.table({"shard": ["codes-00003"] * 5, "reason": reasons})
    encode_stages.tell_bad("demo", decoded)
    encode_stages.tell_bad("demo", decoded.slice(0, 1))
    about = {"run": "demo", "stage": "encode", "shard": "codes-00003"}
    assert told == [{"event": "bad rows", **about, "reasons": {"empty": 2, "truncated": 1}}]


def test_evaluation_tells_of_each_range_of_queries(told, monkeypatch, tmp_path):
    spans = [(0, 64), (64, 100)]
    monkeypatch.setattr(connection, "connect", lambda: None)
    monkeypatch.setattr(evaluation, "query_ranges", lambda n, k: spans)
    monkeypatch.setattr(evaluation, "shard_groups", lambda store, rows: [])
    monkeypatch.setattr(evaluation, "run_ranges", lambda *_: iter([(span, []) for span in spans]))
    monkeypatch.setattr(evaluation, "to_bytes", lambda blocks: b"{}")
    monkeypatch.setattr(evaluation, "from_bytes", lambda data: [])
    monkeypatch.setattr(evaluation, "join", list)

    class Queries(list):
        def codes(self):
            return None

    config = EvaluateConfig(run=str(tmp_path / "demo"))
    evaluation._measure_all(config, None, Queries(range(100)), None, 10, {})
    about = {"event": "queries measured", "stage": "evaluate", "run": "demo"}
    assert told == [{**about, "first": 0, "stop": 64}, {**about, "first": 64, "stop": 100}]


def test_a_node_that_goes_is_not_called_lost_and_counted_all_the_same(monkeypatch, caplog):
    both = [Node("cpu-1", {"CPU": 4}, id="a"), Node("cpu-2", {"CPU": 4}, id="b")]
    monkeypatch.setattr(nodes, "alive", lambda: both)
    watch = Watch()
    monkeypatch.setattr(nodes, "alive", lambda: both[:1])
    watch.look()
    (said,) = caplog.messages  # an autoscaler that removed an idle node says the same to Ray
    assert said == "node cpu-2 left after 0s; what ran there, if anything, is done again elsewhere"
    summary = watch.stop()
    assert (summary["nodes"], summary["lost"], summary["joined"]) == (2, 1, 0)
