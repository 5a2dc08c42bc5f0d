"""`ray job submit` of the four jobs from a fresh clone, to a cluster of several nodes, with a token."""

import json
import os
import shutil
import subprocess

import pytest

from hashnet.models.bundle import bundle_info

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def clone(repo, tmp_path_factory):
    """What a new user has: the project's files as they are now, nothing that lies around."""
    folder = tmp_path_factory.mktemp("clone") / "hashnet"
    if not (repo / ".git").exists():
        ignored = shutil.ignore_patterns(".venv", "runs", ".bench", "__pycache__")
        return shutil.copytree(repo, folder, ignore=ignored)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=repo, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (repo / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repo / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def cluster(new_cluster):
    made = new_cluster()
    made.add_node("head", cpus=1)
    made.add_node("node-1", cpus=1)
    return made


def last_line(done):
    """The last line of the job's own log; after it the CLI only says that the job ended."""
    return [line for line in done.stdout.splitlines() if line and " -- " not in line[:60]][-1]


TRAIN = [
    *("--config", "jobs/configs/digits.yaml", "n_bits=16", "num_workers=2", "cpus_per_worker=1"),
    *("stages=2", "first_epochs=2", "stage_epochs=1", "measure_rows=0"),
]


def submit(cluster, clone, job, run, settings):
    """The result that a job prints, which ended well and, where it needs workers, on both nodes."""
    done = cluster.submit(["python", f"jobs/{job}.py", f"run={run}", *settings], working_dir=str(clone))
    assert done.returncode == 0, done.stdout
    result = json.loads(last_line(done))
    if job in ("train", "encode_db"):  # the driver alone indexes, and compares so few rows
        assert (result["cluster"]["nodes"], result["cluster"]["lost"]) == (2, 0)
    return result


def test_training_on_two_nodes(cluster, clone, tmp_path):
    run = str(tmp_path / "run")
    submit(cluster, clone, "train", run, TRAIN)
    assert bundle_info(f"{run}/model").summary["n_workers"] == 2
    token = (cluster.folder / "token").read_bytes()
    logs = [path for path in cluster.folder.rglob("*") if path.suffix in (".log", ".out", ".err", ".jsonl")]
    assert len(logs) > 10
    assert not [path for path in logs if path.is_file() and token in path.read_bytes()]


@pytest.mark.slow
def test_the_four_jobs_one_after_another(cluster, clone, tmp_path):
    run = str(tmp_path / "run")
    jobs = {
        "train": TRAIN,
        "encode_db": ["device=cpu", "compile=false", "num_actors=2"],
        "build_index": ["kind=flat"],
        "evaluate": ["k=100"],
    }
    results = {name: submit(cluster, clone, name, run, settings) for name, settings in jobs.items()}
    assert results["encode_db"]["rows"] == 1600
    assert results["encode_db"]["n_bits"] == 16
    assert 0 < results["evaluate"]["map"] <= 1
    assert {"model", "codes", "index", "report"} <= set(os.listdir(run))


def test_exit_codes_follow_failure_and_a_relative_run_is_refused(cluster, clone):
    done = cluster.submit(["python", "jobs/encode_db.py", "run=runs/demo"], working_dir=str(clone))
    assert done.returncode == 1
    assert "run=runs/demo is relative" in done.stdout
    assert "Traceback" not in done.stdout
