"""A host, process, disk, network or storage fails under a server: no response is wrong, no item is lost.

A client searches and adds items all the time. While a part of the server is missing it may be refused; what
it is told must be right, and what was acknowledged must be there in the end, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from tests.cluster.conftest import Running
from tests.support.hosts import CHECKOUT, DESK, Hosts
from tests.support.wait import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(1800)]

RUN, ROWS = "s3://runs/served", 1_000
READ, WRITE = "r" * 24, "w" * 24
CUT_S = 10
ENOUGH = 20  # rounds of the client in a row that went well
WORKERS = ("host-1", "host-2")

PREPARE = f"""
import numpy, sys
import hashnet
from hashnet.store import CodesOptions, import_codes
codes = numpy.random.default_rng(0).integers(0, 256, ({ROWS}, 4), dtype=numpy.uint8)
numpy.save(sys.argv[1], codes)
run = hashnet.Run({RUN!r})
store = import_codes(CodesOptions(path=sys.argv[1]), run.codes.uri)
hashnet.BinaryIndex.build(store, kind="flat").save(run.index.uri)
"""

# Each round prints when it began, whether it went well, and the item whose addition was acknowledged. What it
# adds is as far from the query as can be, so that the right hits stay the same.
CLIENT = f"""
import json, pathlib, sys, time
import hashnet
store = hashnet.Run({RUN!r}).codes.open()
query = store.codes()[:1]
right = hashnet.BinaryIndex.build(store, kind="flat").search(query, k=10)
clients, item = {{}}, 10**6
while True:
    row = {{"at": time.monotonic(), "ok": False, "right": True, "added": None, "why": ""}}
    item += 1
    for address in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        if address not in clients:
            url = f"http://{{address}}:8010"
            clients[address] = hashnet.Client(url, token={WRITE!r}, timeout_s=3, retry_s=0)
        try:
            hits = clients[address].search(query, k=10)
            row["right"] = bool((hits.ids == right.ids).all() and (hits.distances == right.distances).all())
            clients[address].add(~query, ids=[item])
            row |= {{"ok": True, "added": item}}
            break
        except Exception as error:
            row["why"] += f"{{address}}: {{error!r}} "
    print(json.dumps(row), flush=True)
    time.sleep(0.1)
"""


class Client:
    """A client on the desk that searches and adds until it is closed."""

    def __init__(self, cluster: Hosts) -> None:
        self.cluster, self.rows = cluster, []
        self.addresses = cluster.folder / "addresses.json"
        self.find_hosts()
        words = [sys.executable, "-c", CLIENT, str(self.addresses)]
        self._process = cluster.popen(DESK, words, stdout=subprocess.PIPE, env={"PYTHONPATH": CHECKOUT})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def find_hosts(self) -> None:
        """Tells the client where hosts are, as a name service does."""
        found = [self.cluster.hosts[name].address for name in WORKERS if name in self.cluster.hosts]
        self.addresses.write_text(json.dumps(found))

    def _read(self) -> None:
        for line in self._process.stdout:
            self.rows.append(json.loads(line))

    def since(self, moment: float) -> list[dict]:
        return [row for row in self.rows if row["at"] >= moment]

    def is_well(self, since: float) -> bool:
        rows = self.since(since)[-ENOUGH:]
        return len(rows) == ENOUGH and all(row["ok"] for row in rows)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


@pytest.fixture(scope="module")
def served(cluster):
    """A server of two slices, on two hosts neither of which has room for all of it, and a client of it."""
    prepared = cluster.run(
        DESK, [sys.executable, "-c", PREPARE, str(cluster.folder / "codes.npy")], PYTHONPATH="."
    )
    assert prepared.returncode == 0, prepared.stdout
    env = json.dumps({"env_vars": {"HASHNET_TOKEN": READ, "HASHNET_WRITE_TOKEN": WRITE}})
    settings = (f"run={RUN}", "host=0.0.0.0", "port=8010", "slices=2", "model=off")
    job = Running(cluster.start_job(["python", "jobs/serve.py", *settings], "--runtime-env-json", env))
    job.wait_for("Ctrl-C stops it")
    client = Client(cluster)
    wait_until(lambda: client.is_well(0))
    yield client
    client.close()


def _kill_host(cluster: Hosts, client: Client) -> None:
    cluster.kill("host-2")
    cluster.add("host-2", 1)
    client.find_hosts()


def _cut_network(cluster: Hosts, client: Client) -> None:
    cluster.cut("host-2")
    time.sleep(CUT_S)
    cluster.heal("host-2")


def _kill_process(cluster: Hosts, client: Client) -> None:
    host = next(name for name in WORKERS if cluster.processes(name, "^ray::ServeReplica:.*Slice"))
    cluster.kill_process(host, cluster.processes(host, "^ray::ServeReplica:.*Slice")[0])


FAULTS = {
    "process killed (a slice)": _kill_process,
    "storage refuses every 5th request (503)": lambda cluster, client: cluster.faults(every=5, status=503),
    "disk of a host full": lambda cluster, client: cluster.fill_disk("host-2"),
    f"network cut for {CUT_S} s": _cut_network,
    "host killed": _kill_host,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_response_is_wrong_and_no_item_is_lost(cluster, served, outcomes, fault):
    struck = time.monotonic()
    FAULTS[fault](cluster, served)
    over = time.monotonic()  # what is lost is back, or the fault lasts
    wait_until(lambda: served.is_well(over), 300)
    counted = cluster.faults()
    if fault == "disk of a host full":
        cluster.free_disk("host-2")
    rows = served.since(struck)
    assert all(row["right"] for row in rows)
    added = [row["added"] for row in served.rows if row["added"] is not None]
    unsure = sum(row["added"] is None for row in served.rows)  # a refused addition may have been made
    check = f"""
import hashnet
client = hashnet.Client("http://{_address(cluster, served)}:8010", token={WRITE!r})
for first in range(0, {len(added)}, 500):
    client.search(ids={added}[first:first + 500], k=1)  # an id that is not there is refused
print(client.info()["size"])
"""
    size = int(cluster.python(check))
    assert ROWS + len(added) <= size <= ROWS + len(added) + unsure + 50  # the client goes on meanwhile
    failed = [row["at"] for row in rows if not row["ok"]]
    recovered = min((row["at"] for row in rows if failed and row["at"] > failed[-1]), default=struck)
    refused = f"{len(failed)} of {len(rows)} rounds refused" if failed else "nothing refused"
    if counted["refused"]:
        refused += f" ({counted['refused']} of {counted['requests']} requests to the storage)"
    outcomes.append((fault, "serve", refused, "0", f"{recovered - struck:.0f} s until all went well again"))


def _address(cluster: Hosts, client: Client) -> str:
    """Where the HTTP process of the server is."""
    host = next(name for name in WORKERS if cluster.processes(name, "^ray::ServeReplica:.*HttpReplica"))
    return cluster.hosts[host].address
