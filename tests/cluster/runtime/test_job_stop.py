"""Jobs that are stopped, lose a part of Ray or fill the disk: a sentence, and the same command goes on."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hashnet import CodeStore, Manifest
from hashnet.data.sources import make_manifest
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TRAIN = (
    *("dataset=digits", "n_bits=16", "num_workers=2", "cpus_per_worker=1", "checkpoint_every=5"),
    *("stages=4", "first_epochs=8", "stage_epochs=4", "measure_rows=0"),
)

OURS = ("train: ", "stage ", "the loss is ")  # what training says on its way


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
    assert "stopped; run the same command again to continue" in log
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


def test_encoding_stops_and_goes_on(cluster, submit, tmp_path):
    run = tmp_path / "run"
    make_manifest("synthetic", f"{run}/manifest.parquet", n_images=12_000, side=32, store="tar", n_query=100)
    torch.manual_seed(0)
    save_bundle(f"{run}/model", build_model("small_cnn", 48))
    words = (f"run={run}", "device=cpu", "compile=false", "rows_per_shard=200", "chunk_rows=64")
    job = submit(cluster, "encode_db.py", *words)
    deadline = time.monotonic() + 120
    while len(list(run.glob("codes/_records/*.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stop(cluster, job).returncode == 0
    _, log = job.end()
    assert "stopped; run the same command again to continue" in log
    assert "Traceback" not in log
    done = len(list(run.glob("codes/_records/*.json")))
    assert 3 <= done < 60
    assert not (run / "codes/_SUCCESS").exists()
    result = submit(cluster, "encode_db.py", *words).result()
    assert result["rows_encoded_now"] == result["rows"] - 200 * done
    expected = Manifest.open(f"{run}/manifest.parquet").row_ids("database")
    assert np.array_equal(np.sort(CodeStore.open(f"{run}/codes").ids()), np.sort(expected))


def test_ctrl_c_of_a_local_job(python, repo, tmp_path):
    command = [python, "jobs/train.py", f"run={tmp_path}/run", *TRAIN]
    job = subprocess.Popen(
        command,
        cwd=repo,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )
    for line in job.stderr:
        if "stage 0 done" in line:
            break
    os.killpg(job.pid, signal.SIGINT)  # what a terminal sends: to the whole foreground group
    rest = job.stderr.read()
    assert job.wait(60) == 130
    assert "stopped; run the same command again to continue" in rest
    assert os.path.isdir(f"{tmp_path}/run/checkpoints")


def start_training(python, repo, run, *words) -> subprocess.Popen:
    """A job that starts Ray itself."""
    command = [python, "jobs/train.py", f"run={run}", *TRAIN, *words]
    env = os.environ | {"PYTHONPATH": str(repo)}
    return subprocess.Popen(command, cwd=repo, stderr=subprocess.PIPE, text=True, env=env)


def part_of_ray(job: subprocess.Popen, name: str) -> psutil.Process:
    family = psutil.Process(job.pid).children(recursive=True)
    return next(process for process in family if process.name() == name)


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("raylet", "error: Ray lost a part of the job and could not replace it|error: Ray on this machine"),
        ("gcs_server", r"error: Ray on this machine stopped \(its head died\)"),
    ],
)
def test_a_local_job_that_loses_a_part_of_ray_ends_in_a_sentence(python, repo, tmp_path, lost, sentence):
    job = start_training(python, repo, f"{tmp_path}/run", "first_epochs=4000", "log_every=1")
    for line in job.stderr:
        if line.startswith("train: "):
            break
    part_of_ray(job, lost).kill()
    lines = job.stderr.read().splitlines()
    assert job.wait(60) == 1
    said = [line for line in lines if not line.startswith(OURS)]
    assert re.match(sentence, said[0])
    assert "run the same command again to continue" in said[0]
    assert len(said) == 2
    log = Path(said[1].removeprefix("details: "))
    assert log.stat().st_size > 0


def test_sigterm_of_a_local_job(python, repo, tmp_path):
    job = start_training(python, repo, f"{tmp_path}/run", "first_epochs=4000", "log_every=1")
    for line in job.stderr:
        if line.startswith("train: "):
            break
    job.terminate()
    said = [line for line in job.stderr if not line.startswith(OURS)]
    assert (job.wait(60), said) == (130, ["stopped; run the same command again to continue\n"])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_at_a_checkpoint(python, repo, tmp_path, workers):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        words = ("backbone=small_cnn", f"num_workers={workers}")
        job = start_training(python, repo, f"{disk}/run", *words)
        _, err = job.communicate(timeout=400)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert job.returncode == 1
    last = [line for line in err.splitlines() if line.startswith(("error: ", "details: "))]
    assert re.match(
        r"error: cannot write .*/checkpoints/.* No space left on device; free some space", last[0]
    )
    assert len(last) == 2
    assert "Traceback" not in err
