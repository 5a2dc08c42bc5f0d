"""Nodes die while a submitted job runs on several of them; the result is that of an undisturbed run."""

import json
import time

import numpy as np
import psutil
import pytest

from hashnet import CodeStore
from hashnet.data.sources import make_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NODES = {"head": {"cpus": 0}, "stable": {"cpus": 1}, "shaky": {"cpus": 1}}
TRAIN = (
    *("backbone=small_cnn", "resize=32", "crop=32", "n_bits=32", "num_workers=2", "cpus_per_worker=1"),
    *("stages=3", "first_epochs=3", "stage_epochs=2", "checkpoint_every=5", "measure_rows=0"),
)

SHARD = 100
ENCODE = (f"rows_per_shard={SHARD}", "device=cpu", "compile=false", "chunk_rows=64")


@pytest.fixture(scope="module")
def cluster(new_cluster):
    made = new_cluster(object_store_mb=200)
    for name, options in NODES.items():
        made.add_node(name, **options)
    return made


@pytest.fixture
def whole(cluster):
    """The cluster with all its nodes, whatever a test before this one killed."""
    for name, options in NODES.items():
        if name not in cluster.nodes:
            cluster.add_node(name, **options)
    return cluster


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    uri = str(tmp_path_factory.mktemp("data") / "manifest.parquet")
    make_manifest("synthetic", uri, n_images=12_000, side=32, store="tar", n_query=200, n_train=1_500)
    return uri


@pytest.fixture(scope="module")
def calm(cluster, submit, manifest, tmp_path_factory):
    """A run that nothing happened to: its folder and the results of its jobs."""
    run = str(tmp_path_factory.mktemp("calm") / "run")
    results = {
        "train": submit(cluster, "train.py", f"run={run}", f"manifest={manifest}", *TRAIN).result(),
        "encode": submit(cluster, "encode_db.py", f"run={run}", *ENCODE).result(),
        "evaluate": submit(cluster, "evaluate.py", f"run={run}", "k=1000").result(),
    }
    return run, results


def test_training_goes_on_from_its_checkpoint(whole, submit, manifest, calm, tmp_path):
    run = str(tmp_path / "run")
    job = submit(whole, "train.py", f"run={run}", f"manifest={manifest}", *TRAIN)
    job.wait_for("stage 0 done")
    whole.kill_node("shaky")
    whole.add_node("shaky", **NODES["shaky"])
    result = job.result()
    assert result["cluster"]["lost"] == 1
    assert (result["steps"], result["epochs"]) == (calm[1]["train"]["steps"], calm[1]["train"]["epochs"])
    history = json.loads((tmp_path / "run/model/history.json").read_text())
    betas = [stage["beta"] for stage in history["stages"]]
    assert betas == [1, 2, 4]  # not begun again


def test_encoding_gives_the_same_shards(whole, submit, calm, tmp_path):
    run, results = calm
    out = str(tmp_path / "codes")
    job = submit(whole, "encode_db.py", f"run={run}", f"out={out}", *ENCODE)
    _some_shards(tmp_path / "codes")
    whole.kill_node("shaky")
    result = job.result()
    assert result["sha256"] == results["encode"]["sha256"]
    assert result["cluster"]["lost"] == 1
    assert np.array_equal(np.sort(CodeStore.open(out).ids()), np.sort(CodeStore.open(f"{run}/codes").ids()))


def test_a_new_head_encodes_only_what_is_missing(whole, submit, calm, tmp_path):
    run, results = calm
    out = tmp_path / "codes"
    words = (f"run={run}", f"out={out}", *ENCODE)
    job = submit(whole, "encode_db.py", *words)
    _some_shards(out)
    for name in NODES:  # head and nodes lose power at once, and come back on the same ports
        whole.kill_node(name)
    for name, options in NODES.items():
        whole.add_node(name, **options)
    job.process.kill()
    job.end()
    done = {path: path.stat().st_mtime_ns for path in (out / "_records").glob("*.json")}
    assert 0 < len(done) < results["encode"]["shards"]
    result = submit(whole, "encode_db.py", *words).result()
    assert result["sha256"] == results["encode"]["sha256"]
    assert result["rows_encoded_now"] == result["rows"] + result["bad_rows"] - SHARD * len(done)
    assert all(path.stat().st_mtime_ns == then for path, then in done.items())


def _some_shards(codes, timeout=120):
    """Returns when a few shards are committed, and not all."""
    deadline = time.monotonic() + timeout
    while len(list((codes / "_records").glob("*.json"))) < 3:
        assert time.monotonic() < deadline, f"no shards in {codes}"
        time.sleep(0.1)


def _wait_for_work(cluster, node, title, timeout=120):
    """Returns as soon as a worker of the node is busy with a task of this title."""
    owner = psutil.Process(cluster.nodes[node].pid)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for process in owner.children(recursive=True):
            try:
                if process.cmdline()[:1] == [title]:
                    return
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
    pytest.fail(f"{node} never worked on {title}")


def test_the_evaluation_is_the_same(whole, start_driver, calm, tmp_path):
    run, results = calm
    words = [f"run={run}", "k=1000", f"out={tmp_path}/report", f"query_codes={tmp_path}/queries"]
    job = start_driver(
        whole,
        f"""
        import sys
        from cluster import evaluate, runtime
        evaluate.LOCAL_PAIRS = 0  # the driver would count so few by itself
        sys.argv[1:] = {[*words, "rows_per_task=100"]!r}
        runtime.run_job(evaluate.EvaluateConfig, evaluate.evaluate_run)
        """,
    )
    _wait_for_work(whole, "shaky", "ray::_count")
    whole.kill_node("shaky")
    result = job.result()  # it may be over before Ray says that the node is lost, so that is not asked here
    for measure in ("map", "map_relevant", "map_tie_aware", "precision_within_2", "n_queries"):
        assert result[measure] == results["evaluate"][measure]
