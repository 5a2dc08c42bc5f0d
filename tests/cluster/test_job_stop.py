"""`ray job stop` ends a job cleanly, and the same command goes on."""

import json
import os
import signal
import subprocess
import time

import pytest

from hashnet import CodeStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TRAIN = (
    *("dataset=digits", "n_bits=16", "num_workers=2", "cpus_per_worker=1", "checkpoint_every=5"),
    *("stages=4", "first_epochs=8", "stage_epochs=4", "measure_rows=0"),
)


@pytest.fixture(scope="module")
def cluster(new_cluster):
    made = new_cluster(object_store_mb=200)
    made.add_node("head", cpus=0)
    made.add_node("node-1", cpus=2)
    return made


def stop(cluster, job):
    """`ray job stop`, as typed."""
    return subprocess.run(
        ["ray", "job", "stop", job.job_id()], env=cluster.env, capture_output=True, text=True
    )


def test_training_stops_and_goes_on(cluster, submit, tmp_path):
    run = str(tmp_path / "run")
    job = submit(cluster, "train.py", f"run={run}", *TRAIN)
    job.wait_for("stage 0 done")
    assert stop(cluster, job).returncode == 0
    _, log = job.end()  # the CLI of the submitter exits with 0 when somebody stops the job
    assert "stopped; run the same command again to go on" in log
    assert "Traceback" not in log
    assert not os.path.exists(f"{run}/model/model.json")
    result = submit(cluster, "train.py", f"run={run}", *TRAIN).result()
    history = json.loads((tmp_path / "run/model/history.json").read_text())
    betas = [stage["beta"] for stage in history["stages"]]
    assert betas == [1, 2, 4, 8]
    assert result["steps"] > 0
    # Nothing of a stopped job stays behind: the CPUs are free again.
    job = submit(cluster, "encode_db.py", f"run={run}")
    assert job.result()["rows"] == len(CodeStore.open(f"{run}/codes"))


def test_ctrl_c_of_a_local_job(python, repo, tmp_path):
    command = [python, "jobs/train.py", f"run={tmp_path}/run", *TRAIN]
    job = subprocess.Popen(command, cwd=repo, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for line in job.stderr:
        if "stage 0 done" in line:
            break
    os.killpg(job.pid, signal.SIGINT)  # what a terminal sends: to the whole foreground group
    started = time.monotonic()
    rest = job.stderr.read()
    assert job.wait(60) == 130
    assert "stopped; run the same command again to go on" in rest
    assert time.monotonic() - started < 60
    assert os.path.isdir(f"{tmp_path}/run/checkpoints")
