"""Hosts, processes, disks, the network and the storage fail while a job runs: the result is the same.

Each case adds a row to the table that `make test-cluster` ends with. Results are compared with those of an
undisturbed run by fingerprints that cover every row: one that is lost or duplicated would change them.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import Running
from tests.support.hosts import DESK, Hosts
from tests.support.local_cluster import job_result
from tests.support.wait import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(1800)]

RUN, MANIFEST = "s3://runs/calm", "s3://runs/pictures/manifest.parquet"
ROWS = 1_500
CUT_S = 10
DISK_FULL = "disk of a host full"
FAKE_TIME = next(map(str, Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), "")

# So few queries are otherwise counted by the job's own process.
EVALUATE_IN_TASKS = """
import sys
sys.path.insert(0, "")
from cluster import evaluate, runtime
evaluate.LOCAL_PAIRS = 0
runtime.run_job(evaluate.EvaluateConfig, evaluate.evaluate_run)
"""


@dataclass(frozen=True)
class Stage:
    """A job, and when in its course a fault strikes."""

    settings: tuple[str, ...]
    at_work: str  # requests to the storage for such a path show that the job is at work
    strike_at: int  # this many of them
    process: str  # title of a process that does the work
    equal: tuple[str, ...] = ()  # what must be the same in the job's result
    late_s: float = 0.0  # each of these requests is answered late, so that the job lasts long enough
    command: tuple[str, ...] = ()
    driver_works: bool = False  # no worker but the job's own process, on a host with CPUs

    def words(self, name: str, out: str) -> list[str]:
        where = [f"run={out}"] if name == "train" else [f"run={RUN}", f"out={out}"]
        return [*(self.command or ("python", f"jobs/{name}.py")), *where, *self.settings]

    def start(self, name: str, cluster: Hosts, out: str) -> Running:
        options = ("--entrypoint-num-cpus", "1") if self.driver_works else ()
        return Running(cluster.start_job(self.words(name, out), *options))


STAGES = {
    "train": Stage(
        (
            *(f"manifest={MANIFEST}", "backbone=small_cnn", "resize=16", "crop=16", "n_bits=32"),
            *("measure_rows=0", "num_workers=2", "cpus_per_worker=1", "device=cpu"),
            *("stages=4", "first_epochs=2", "stage_epochs=2", "checkpoint_every=2"),
        ),
        at_work="/checkpoints/step", strike_at=30, process="^ray::.*TrainWorker", late_s=0.2,
        equal=("sha256", "steps"),
    ),
    "encode_db": Stage(
        ("rows_per_shard=50", "chunk_rows=25", "num_actors=2", "compile=false", "device=cpu"),
        at_work="/_records/", strike_at=6, process="^ray::.*Map", equal=("sha256", "rows"),
    ),
    "build_index": Stage(
        (), at_work="/calm/codes/codes-", strike_at=10, process="jobs/build_index.py", equal=("rows",),
        late_s=2.0, driver_works=True,
    ),
    "evaluate": Stage(
        ("k=100", "rows_per_task=100", "figures=false"),
        at_work="/calm/codes/codes-", strike_at=6, process="^ray::_count", late_s=1.0,
        equal=("map", "map_asymmetric", "map_tie_aware", "n_queries", "n_database"),
        command=("python", "-c", EVALUATE_IN_TASKS),
    ),
    "dedup": Stage(
        ("rows_per_block=200", "figures=false"),
        at_work="/calm/codes/codes-", strike_at=12, process="^ray::_run_task", late_s=0.3,
        equal=("n_rows", "n_pairs", "n_clusters", "n_removed"),
    ),
}  # fmt: skip
FILES = {"build_index": "index", "dedup": "duplicates"}  # whose files must be the same, too

WATCH = """
import httpx, sys, time
while True:
    print(httpx.get(sys.argv[1] + "/_faults", timeout=60).json()["matched"], flush=True)
    time.sleep(0.3)
"""


class Requests:
    """When requests that show a job at work reached the storage."""

    def __init__(self, cluster: Hosts) -> None:
        words = [sys.executable, "-c", WATCH, cluster.env["AWS_ENDPOINT_URL"]]
        self._watch = cluster.popen(DESK, words, stdout=subprocess.PIPE)
        self.times: list[float] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._watch.stdout:
            self.times += [time.monotonic()] * (int(line) - len(self.times))

    def longest_pause(self, since: float) -> float:
        """Seconds without a request, at most, after ``since``."""
        later = [since, *(moment for moment in self.times if moment > since)]
        return max((b - a for a, b in itertools.pairwise(later)), default=0.0)

    def close(self) -> None:
        self._watch.kill()
        self._watch.wait()
        self._reader.join()


def _files(cluster: Hosts, artefact: str, out: str) -> str:
    """The files of an artefact with the sha256 of each."""
    opened = f"hashnet.Run({RUN!r}, {artefact}={out!r}).{artefact}"
    return cluster.python(f"import hashnet; one = {opened}; print(sorted(one.files(one.read()).items()))")


class Undisturbed:
    """The results of jobs that nothing happens to; each runs when it is asked for."""

    def __init__(self, cluster: Hosts) -> None:
        self.cluster, self.results, self.files = cluster, {}, {}
        cluster.python(f"""
from hashnet.data.sources import make_manifest
make_manifest("synthetic", {MANIFEST!r}, n_images={ROWS}, side=16, store="tar", n_query=100, n_train=300)
""")

    def __getitem__(self, name: str) -> dict:
        if name not in self.results:
            for earlier in itertools.takewhile(lambda one: one != name, ("train", "encode_db")):
                self[earlier]
            stage = STAGES[name]
            out = RUN if name == "train" else f"{RUN}/{name}" if name != "encode_db" else f"{RUN}/codes"
            self.cluster.faults(every=1, delay_s=stage.late_s, path=stage.at_work)
            started = time.monotonic()
            self.results[name] = stage.start(name, self.cluster, out).result()
            self.results[name]["wall_s"] = time.monotonic() - started
            if name in FILES:
                self.files[name] = _files(self.cluster, FILES[name], out)
            self.cluster.faults()
        return self.results[name]


@pytest.fixture(scope="module")
def undisturbed(cluster):
    return Undisturbed(cluster)


@dataclass
class Case:
    """A job under way, and what strikes it."""

    cluster: Hosts
    stage: Stage
    job: Running
    host: str = "host-2"

    def kill_host(self) -> None:
        """Another one takes its place, as an autoscaler would see to."""
        self.cluster.kill(self.host)
        self.cluster.add(self.host, 1)

    def cut_network(self, seconds: float = CUT_S) -> None:
        self.cluster.cut(self.host)
        assert not self.cluster.reaches_storage(self.host)
        time.sleep(seconds)
        self.cluster.heal(self.host)
        wait_until(lambda: self.cluster.reaches_storage(self.host), 60)

    def fill_disk(self) -> None:
        self.cluster.fill_disk(self.host)
        assert "No space left on device" in self.cluster.write_error(self.host)

    def kill_process(self) -> None:
        wait_until(lambda: self.cluster.processes(self.host, self.stage.process), 60)
        pid = self.cluster.processes(self.host, self.stage.process)[-1]
        self.cluster.kill_process(self.host, pid)
        wait_until(lambda: pid not in self.cluster.processes(self.host, self.stage.process), 10)


FAULTS: dict[str, Callable[[Case], None] | dict] = {
    "host killed": Case.kill_host,
    f"network cut for {CUT_S} s": Case.cut_network,
    DISK_FULL: Case.fill_disk,
    "process killed": Case.kill_process,
    "storage refuses every 5th request (503)": {"every": 5, "status": 503},
}
OTHERS = {  # for one stage
    "network cut for 120 s": lambda case: case.cut_network(120),
    "storage answers every request 0.5 s late": {"every": 1, "delay_s": 0.5},
    "storage never answers every 100th request": {"every": 100, "status": 0},
}
CASES = [(stage, fault) for stage in STAGES for fault in FAULTS] + [("encode_db", fault) for fault in OTHERS]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_the_result_is_that_of_an_undisturbed_job(whole, undisturbed, outcomes, name, fault):
    _compare(name, fault, (FAULTS | OTHERS)[fault], whole, undisturbed, outcomes)


def test_a_host_has_a_slow_link(whole, undisturbed, outcomes):
    undisturbed["encode_db"]
    whole.slow_link("host-2", "4mbit")
    assert "rate 4Mbit" in whole.link_limit("host-2")
    fault = "a host's link carries 4 Mbit/s"
    _compare("encode_db", fault, {"every": 1, "delay_s": 0}, whole, undisturbed, outcomes)
    whole.slow_link("host-2", None)


@pytest.mark.skipif(not FAKE_TIME, reason="clock skew needs libfaketime (Debian: libfaketime)")
def test_a_host_has_a_wrong_clock(whole, undisturbed, outcomes):
    undisturbed["encode_db"]
    whole.kill("host-2")
    whole.add("host-2", 1, LD_PRELOAD=FAKE_TIME, FAKETIME="+600s")
    assert 590 < whole.clock("host-2", "/raylet/raylet") - time.time() < 660
    fault = "a host's clock is 10 minutes ahead"
    _compare("encode_db", fault, {"every": 1, "delay_s": 0}, whole, undisturbed, outcomes)
    whole.kill("host-2")


def _compare(name, fault, strike, whole, undisturbed, outcomes):
    """Runs a job that ``strike`` disturbs: a method of Case, or how the storage misbehaves all the time."""
    stage, expected = STAGES[name], undisturbed[name]
    out = f"s3://runs/{name}-{re.sub(r'[^a-z0-9]+', '-', fault)}"
    at_work = {"every": 1, "delay_s": stage.late_s, "path": stage.at_work}
    sudden = not isinstance(strike, dict)
    whole.faults(**(at_work if sudden else strike))
    requests = Requests(whole)
    started = time.monotonic()
    case = Case(whole, stage, stage.start(name, whole, out))
    pause = 0.0
    if sudden:
        wait_until(lambda: len(requests.times) >= stage.strike_at or case.job.process.poll() is not None)
        assert case.job.process.poll() is None, "".join(case.job.lines)
        if stage.driver_works:  # on the host that Ray chose
            case.host = next(host for host in ("host-1", "host-2") if whole.processes(host, stage.process))
        struck = time.monotonic()
        strike(case)
    code, log = case.job.end()
    seconds = time.monotonic() - started
    if sudden:
        pause = requests.longest_pause(struck)
    requests.close()
    counted = whole.faults()
    if fault == DISK_FULL:
        whole.free_disk(case.host)
    # Where the job's own host is lost, `ray job submit` ends with 0 and without a result.
    result = job_result(log) if code == 0 and '\n{"' in log else None
    if result is not None:
        what = "repeats what the lost host did" if result.get("cluster", {}).get("lost") else "continues"
    else:
        assert stage.driver_works or fault == DISK_FULL, log
        errors = [line.strip() for line in log.splitlines() if line.startswith("error: ")]
        what = f"ends ({errors[0] if errors else f'exit code {code}'}); the same command again completes it"
        if fault == DISK_FULL:  # Ray does not try to unpack a job's files there again for ten minutes
            whole.kill(case.host)
            whole.add(case.host, 1)
        started = time.monotonic()
        result = stage.start(name, whole, out).result()
        seconds += time.monotonic() - started
    hit = counted["refused"] + counted["delayed"]
    if not sudden and "storage" in fault:
        assert hit > 0
        what += f" ({hit} of {counted['requests']} requests)"
    assert {key: result[key] for key in stage.equal} == {key: expected[key] for key in stage.equal}
    if name in FILES:
        assert _files(whole, FILES[name], out) == undisturbed.files[name]
    times = f"{seconds:.0f} s instead of {expected['wall_s']:.0f}"
    outcomes.append((fault, name, what, "0", times + (f", {pause:.0f} s without progress" if pause else "")))
