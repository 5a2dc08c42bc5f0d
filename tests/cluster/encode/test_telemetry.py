"""What encoding tells Prometheus, seen where it is told: by the driver."""

import pytest

from cluster.encode.job import EncodeConfig, encode_database
from cluster.runtime import telemetry
from tests.support.small_run import make_run

pytestmark = pytest.mark.slow


def test_the_driver_counts_images_rates_shards_and_commits(ray_local, tmp_path, monkeypatch):
    told = {}
    for way in ("count", "gauge", "observe"):
        monkeypatch.setattr(
            telemetry, way, lambda name, value, **tags: told.setdefault(name, []).append((value, tags))
        )
    run = make_run(tmp_path / "demo")
    encode_database(
        EncodeConfig(run=run, out=f"{run}/again", device="cpu", compile=False, rows_per_shard=150)
    )
    assert sum(n for n, tags in told["images"] if tags["status"] == "ok") == 400
    assert told["shards_total"][-1] == told["shards_done"][-1] == (3, {"run": "demo", "stage": "encode"})
    assert told["images_per_second"][-1][0] > 0
    assert 1 <= len(told["commit_seconds"]) <= 3  # one add may complete several shards
    assert all(0 < seconds < 60 for seconds, _ in told["commit_seconds"])
