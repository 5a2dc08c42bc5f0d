"""Hosts die or lose the network, and the storage fails, while a job runs: the result is the same.

Each test adds a row to the table that `make test-cluster` ends with. Shards are compared by the sha256 of the
store, which covers ids and codes: one row lost or duplicated would change it.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import time

import pytest

from tests.support.hosts import CHECKOUT, DESK, Hosts
from tests.support.local_cluster import job_result
from tests.support.wait import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(1800)]

RUN, MANIFEST = "s3://runs/calm", "s3://runs/pictures/manifest.parquet"
ROWS, SHARD = 1_500, 50
TRAIN = (
    *(f"manifest={MANIFEST}", "backbone=small_cnn", "resize=16", "crop=16", "n_bits=32", "measure_rows=0"),
    *("num_workers=2", "cpus_per_worker=1", "device=cpu"),
    *("stages=4", "first_epochs=2", "stage_epochs=2", "checkpoint_every=5"),
)
ENCODE = (f"rows_per_shard={SHARD}", "chunk_rows=25", "num_actors=2", "compile=false", "device=cpu")
WATCH = """
import boto3, sys, time
client = boto3.client("s3")
while True:
    print(client.list_objects_v2(Bucket="runs", Prefix=sys.argv[1]).get("KeyCount", 0), flush=True)
    time.sleep(0.3)
"""


class Commits:
    """When shards of a store were committed, as seen on the storage."""

    def __init__(self, cluster: Hosts, out: str) -> None:
        prefix = f"{out.removeprefix('s3://runs/')}/_records/"
        words = [sys.executable, "-c", WATCH, prefix]
        self._watch = cluster.popen(DESK, words, stdout=subprocess.PIPE, env={"PYTHONPATH": CHECKOUT})
        self.times: list[float] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._watch.stdout:
            self.times += [time.monotonic()] * (int(line) - len(self.times))

    def longest_gap(self, since: float) -> float:
        """Seconds without a commit, at most, after ``since``."""
        later = [since, *(moment for moment in self.times if moment > since)]
        return max((b - a for a, b in itertools.pairwise(later)), default=0.0)

    def close(self) -> None:
        self._watch.kill()
        self._watch.wait()
        self._reader.join()


@pytest.fixture(scope="module")
def calm(cluster):
    """The results of a run that nothing happens to."""
    code = f"""
from hashnet.data.sources import make_manifest
make_manifest("synthetic", {MANIFEST!r}, n_images={ROWS}, side=16, store="tar", n_query=100, n_train=300)
"""
    cluster.python(code)
    jobs = {"train": TRAIN, "encode_db": ENCODE}
    found = {}
    for name, settings in jobs.items():
        done = cluster.submit(["python", f"jobs/{name}.py", f"run={RUN}", *settings])
        assert done.returncode == 0, done.stdout
        found[name] = job_result(done.stdout)
    return found


@pytest.fixture
def encoding(whole, calm, submit_here, request):
    """Starts an encoding into a folder of its own; ``check`` waits for it and compares the outcome."""
    out = "s3://runs/" + re.sub(r"\W+", "-", request.node.name)
    commits = Commits(whole, out)

    class Encoding:
        def start(self) -> Encoding:
            self.job = submit_here(whole, "encode_db.py", f"run={RUN}", f"out={out}", *ENCODE)
            return self

        def after_shards(self, n: int) -> None:
            wait_until(lambda: len(commits.times) >= n or self.job.process.poll() is not None)
            assert self.job.process.poll() is None, "".join(self.job.lines)
            self.struck = time.monotonic()

        def check(self) -> dict:
            result, expected = self.job.result(), calm["encode_db"]
            assert (result["rows"], result["sha256"]) == (expected["rows"], expected["sha256"])
            pause = commits.longest_gap(self.struck) if hasattr(self, "struck") else None
            return result | {"pause": pause}

    yield Encoding()
    commits.close()


def _row(outcomes, calm, stage, fault, result, what):
    seconds = f"{result['seconds']:.0f} s instead of {calm[stage]['seconds']:.0f}"
    if result.get("pause"):
        seconds += f", at most {result['pause']:.0f} without a commit"
    outcomes.append((fault, stage, what, "0", seconds))


def test_a_host_is_killed_while_it_encodes(whole, encoding, calm, outcomes):
    encoding.start().after_shards(3)
    whole.kill("host-2")
    result = encoding.check()
    assert result["cluster"]["lost"] == 1
    _row(outcomes, calm, "encode_db", "host killed", result, "the other host encodes what was lost")


@pytest.mark.parametrize("seconds", [10, 120])
def test_a_host_is_cut_off_and_comes_back_while_it_encodes(whole, encoding, calm, outcomes, seconds):
    encoding.start().after_shards(3)
    whole.cut("host-2")
    healed = threading.Timer(seconds, whole.heal, ["host-2"])
    healed.start()
    result = encoding.check()
    healed.join()
    lost = result["cluster"]["lost"]
    what = "Ray gave the host up; the other one encodes" if lost else "both go on"
    _row(outcomes, calm, "encode_db", f"network cut, healed after {seconds} s", result, what)
    if lost:  # its Ray ends when it hears that it was given up
        whole.kill("host-2")


def test_the_storage_refuses_requests_while_hosts_encode(whole, encoding, calm, outcomes):
    whole.faults(every=5, status=503)
    result = encoding.start().check()
    counted = whole.faults()
    assert counted["refused"] > 20
    what = f"repeated ({counted['refused']} of {counted['requests']} requests)"
    _row(outcomes, calm, "encode_db", "storage: every 5th request refused (503)", result, what)
