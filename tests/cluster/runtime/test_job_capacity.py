"""Jobs on a cluster with GPUs in name only: booked, placed and shared, while the CPU computes."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(new_cluster):
    made = new_cluster(object_store_mb=200)
    made.add_node("head", cpus=0)
    made.add_node("cpu-1", cpus=1, labels={"hashnet.io/pool": "cpu"})
    for name in ("gpu-1", "gpu-2"):
        made.add_node(name, cpus=1, gpus=1, labels={"hashnet.io/pool": "gpu"})
    return made


def test_training_spread_over_gpus_and_two_encoders_per_gpu(cluster, submit, tmp_path):
    run = f"run={tmp_path}/run"
    short = ("stages=1", "first_epochs=1", "measure_rows=0", "n_bits=16", "cpus_per_worker=1")
    gpus = ("num_workers=2", "device=cuda", "collective=gloo", "placement=strict_spread")
    job = submit(cluster, "train.py", run, "dataset=digits", *short, *gpus)
    assert job.result()["steps"] > 0
    assert "2 × worker {CPU 1, GPU 1}, each on its own node; the cluster has 3 nodes" in "".join(job.lines)

    job = submit(cluster, "encode_db.py", run, "compile=false", "gpus_per_actor=0.5", "chunk_rows=4")
    result = job.result()
    assert "4 × encoder {CPU 0.001, GPU 0.5}" in "".join(job.lines)
    assert (result["rows"], result["nodes"]) == (1600, 2)  # encoders on both GPU nodes, nowhere else


def test_more_workers_than_gpus_fail_in_seconds(cluster, submit, tmp_path):
    job = submit(cluster, "train.py", f"run={tmp_path}/run", "dataset=digits", "num_workers=3", "device=cuda")
    code, log = job.end(120)
    assert code != 0
    assert "train needs 3 × worker" in log
    assert "2 can fit: lower num_workers, or add nodes" in log
    assert "3 nodes with {CPU 3, GPU 2} (the head takes no work), the largest gpu-2 {CPU 1, GPU 1}" in log
    assert "Traceback" not in log
