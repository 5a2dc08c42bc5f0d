"""A job shows its own words; what others write, and the details of a failure, are in a log. No Ray."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import os, signal, sys, time
from dataclasses import dataclass
from cluster.runtime import run_job
from hashnet.errors import StorageError
from hashnet.io import REQUIRED, key

@dataclass(frozen=True)
class Settings:
    run: str = key(REQUIRED, "run folder", path=True)

def work(settings):
    os.write(2, b"core_worker.cc: noise\\n")
    print("our words", file=sys.stderr)
    {do}
    return {{"done": True}}

run_job(Settings, work)
"""


@pytest.fixture
def start(tmp_path, repo):
    """Starts a job that does ``do``."""

    def make(do: str) -> subprocess.Popen:
        script = tmp_path / "work.py"
        script.write_text(SCRIPT.format(do=do))
        env = os.environ | {"PYTHONPATH": str(repo), "TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, str(script), "run=/r"],
            env=env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
        )

    return make


def log_of(error: str) -> str:
    return Path(error.rpartition("details: ")[2].strip()).read_text()


def test_a_job_that_succeeds_leaves_its_result_and_no_log(start, tmp_path):
    job = start("pass")
    out, err = job.communicate(timeout=120)
    assert (job.returncode, out, err) == (0, '{"done": true}\n', "our words\n")
    assert not list(tmp_path.glob("hashnet-*.log"))


def test_a_failure_is_a_sentence_and_its_details_are_in_a_log(start):
    job = start("raise RuntimeError('surprise')")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert err.startswith("our words\nerror: RuntimeError: surprise\ndetails: ")
    assert len(err.splitlines()) == 3
    assert "core_worker.cc: noise" in log_of(err)
    assert "Traceback" in log_of(err)


def test_a_full_disk_says_what_to_do(start):
    job = start("raise StorageError('cannot write /r/x: [Errno 28] No space left on device')")
    _, err = job.communicate(timeout=120)
    assert "left on device; free some space there, then run the same command again to continue\n" in err


@pytest.mark.parametrize(
    ("last_words", "end", "sentence"),
    [
        ("Failed to connect to GCS within 60 seconds", "os._exit(1)", "the head of the Ray cluster does not"),
        ("The raylet exited unexpectedly", "os._exit(1)", "Ray on this machine stopped (its raylet died)"),
        ("", "os.abort()", "the job was ended by SIGABRT"),
        ("", "os._exit(3)", "the job was ended with exit code 3"),
        ("", "os.kill(os.getpid(), signal.SIGKILL)", "the job was killed, perhaps because the machine ran"),
    ],
)
def test_a_process_that_ray_ends_is_explained_by_its_parent(start, last_words, end, sentence):
    job = start(f"os.write(2, {last_words.encode()!r}); {end}")
    _, err = job.communicate(timeout=120)
    assert job.returncode != 0
    assert err.startswith(f"our words\nerror: {sentence}")
    assert "run the same command again to continue\ndetails: " in err
    assert last_words in log_of(err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_job_once(start, tmp_path, number):
    job = start("time.sleep(600)")
    assert job.stderr.readline() == "our words\n"
    job.send_signal(number)
    _, err = job.communicate(timeout=120)
    assert (job.returncode, err) == (130, "stopped; run the same command again to continue\n")
    assert not list(tmp_path.glob("hashnet-*.log"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_the_job_does_not_outlive_its_parent(start):
    job = start("time.sleep(600)")
    assert job.stderr.readline() == "our words\n"
    (child,) = psutil.Process(job.pid).children()
    job.kill()
    job.wait()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
