"""What is read from Ray's private parts; no Ray is started."""

import json
import os
from types import SimpleNamespace

import ray

import cluster.runtime  # noqa: F401  it sends events to Ray's log folder
from hashnet.io import events


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
