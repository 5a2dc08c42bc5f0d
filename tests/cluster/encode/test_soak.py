"""Minutes of encoding on one stable node and one that is killed and added again every 30 seconds."""

import json
import os
import time

import numpy as np
import pytest

from hashnet import CodeStore, Manifest
from hashnet.data.sources import make_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EVERY_S = 30
MINUTES = float(os.environ.get("HASHNET_SOAK_MINUTES", "4"))
IMAGES_A_SECOND = 150  # of a node with one core on 96-px pictures; a wrong guess only changes the length


def test_every_row_exactly_once_and_the_summary_says_what_happened(new_cluster, submit, tmp_path, repo):
    manifest = str(tmp_path / "manifest.parquet")
    n_images = int(MINUTES * 60 * IMAGES_A_SECOND)
    make_manifest("synthetic", manifest, n_images=n_images, side=96, store="tar", n_query=100, n_train=500)
    run = str(tmp_path / "run")
    cluster = new_cluster(object_store_mb=300)
    cluster.add_node("head", cpus=0)
    cluster.add_node("stable", cpus=1)
    cluster.add_node("shaky", cpus=1)
    words = (
        "backbone=resnet18",
        "n_bits=48",
        "stages=1",
        "first_epochs=1",
        "measure_rows=0",
        "crop=64",
        "resize=64",
    )
    submit(cluster, "train.py", f"run={run}", f"manifest={manifest}", *words).result()

    job = submit(cluster, "encode_db.py", f"run={run}", "rows_per_shard=1000")
    job.wait_for("plan: ")
    kills = 0
    next_kill = time.monotonic() + EVERY_S
    while job.process.poll() is None:
        time.sleep(1)
        if time.monotonic() >= next_kill:
            cluster.kill_node("shaky")
            kills += 1
            cluster.add_node("shaky", cpus=1)
            next_kill = time.monotonic() + EVERY_S
    result = job.result()

    expected = Manifest.open(manifest).row_ids("database")
    assert np.array_equal(np.sort(CodeStore.open(f"{run}/codes").ids()), np.sort(expected))
    assert kills >= 2, f"the job took only {result['seconds']} s; raise HASHNET_SOAK_MINUTES"
    seen = result["cluster"]
    assert kills - 1 <= seen["lost"] <= kills  # the last kill may come when the job has ended
    print(json.dumps({"kills": kills, "seconds": result["seconds"], "rows": result["rows"], "cluster": seen}))
    again = submit(cluster, "encode_db.py", f"run={run}").result()
    assert again["rows_encoded_now"] == 0
