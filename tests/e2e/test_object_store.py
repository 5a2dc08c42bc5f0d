"""A whole run on s3://: every artefact is written by one node, read by another, and by us."""

import re

import pytest

import hashnet
from hashnet.cli import entry as cli
from hashnet.io import storage
from tests.support.local_cluster import job_result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(new_cluster, bucket, monkeypatch):
    """Two nodes that know the server of ``bucket`` by the environment, as those of a cloud know theirs."""
    server = re.search(r"endpoint_override=([^&]+)", bucket).group(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server}")
    made = new_cluster()
    made.add_node("head", cpus=0)
    made.add_node("node-1", cpus=1)
    made.add_node("node-2", cpus=1)
    return made


def test_every_artefact_of_a_run_on_an_object_store(cluster, capsys):
    run = "s3://runs/demo"
    short = [
        "stages=2",
        "first_epochs=2",
        "stage_epochs=1",
        "num_workers=2",
        "cpus_per_worker=1",
        "n_bits=16",
    ]
    jobs = {
        "train": ["dataset=digits", "modality=features", *short],
        "encode_db": ["rows_per_shard=500"],
        "build_index": [],
        "evaluate": ["k=100"],
    }
    results = {}
    for name, settings in jobs.items():
        done = cluster.submit(["python", f"jobs/{name}.py", f"run={run}", *settings])
        assert done.returncode == 0, done.stdout
        results[name] = job_result(done.stdout)
    store = hashnet.CodeStore.open(f"{run}/codes")
    assert len(store) == results["encode_db"]["rows"] == 1600
    hits = hashnet.BinaryIndex.load(f"{run}/index").search(store.codes()[:3], k=1)
    assert hits.distances.tolist() == [[0], [0], [0]]
    assert storage.read_json(f"{run}/report/report.json")["map"] == results["evaluate"]["map"]
    assert b"<!doctype html>" in storage.read_bytes(results["evaluate"]["page"])
    assert cli.main(["inspect", run]) == 0, capsys.readouterr().out
    again = cluster.submit(["python", "jobs/encode_db.py", f"run={run}"])
    assert job_result(again.stdout)["rows_encoded_now"] == 0
