"""Every job on hosts that share nothing: what one stage leaves for the next lies on the object store."""

from __future__ import annotations

import json
import sys

import pytest

from tests.cluster.conftest import Running
from tests.support.local_cluster import job_result

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(1800)]

RUN = "s3://runs/digits"
TRAIN = (
    *("dataset=digits", "backbone=small_cnn", "resize=18", "crop=16", "batch_size=128", "n_bits=32"),
    *("stages=2", "first_epochs=2", "stage_epochs=1", "measure_rows=0"),
    *("num_workers=2", "cpus_per_worker=1", "device=cpu"),
)


def test_a_host_has_its_own_disk_processes_and_address(cluster):
    """One host's files are not another's, and nowhere can a host write for others to read."""
    places = ("/tmp", "/var/tmp", "/dev/shm", "/run", "$HOME")
    for place in places:
        assert cluster.run("host-1", ["sh", "-c", f"echo mine >{place}/secret"]).returncode == 0
        assert cluster.run("host-1", ["sh", "-c", f"cat {place}/secret"]).stdout == "mine\n"
        for other in ("head", "host-2"):
            assert cluster.run(other, ["sh", "-c", f"test -e {place}/secret"]).returncode == 1
    for place in ("/", "/usr", "/opt", "/etc", "/var", "/home", "/mnt", "/dev"):
        assert cluster.run("host-1", ["sh", "-c", f"touch {place}/secret 2>/dev/null"]).returncode != 0
    assert cluster.run("host-1", ["python", "-c", "import hashnet"]).returncode != 0  # jobs bring it along
    names = [cluster.run(name, ["hostname"]).stdout.strip() for name in ("head", "host-1", "host-2")]
    assert names == ["head", "host-1", "host-2"]
    assert cluster.run("host-1", ["sh", "-c", "ls /tmp/ray"]).returncode == 0
    assert "10.77.0.12/24" in cluster.run("host-1", ["ip", "-br", "address"]).stdout


@pytest.mark.parametrize("job", ["train", "encode_db"])
def test_a_folder_of_one_hosts_disk_is_refused(cluster, job):
    """Would a host read another one's disk, these jobs would succeed."""
    run = f"/tmp/run-{job}"
    settings = TRAIN
    if job == "encode_db":
        settings = ("num_actors=2",)
        code = f"""
from hashnet.data.sources import make_manifest
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
make_manifest("digits", "{run}/manifest.parquet")
save_bundle("{run}/model", build_model("small_cnn", 32))
"""
        made = cluster.submit(["python", "-c", code])  # the driver of a job runs on the head
        assert made.returncode == 0, made.stdout
    done = cluster.submit(["python", f"jobs/{job}.py", f"run={run}", *settings])
    assert done.returncode == 1, done.stdout
    assert "is on this node's own disk: host-1, host-2 cannot see it" in done.stdout
    assert "AttributeError" not in done.stdout


@pytest.fixture(scope="module")
def results(cluster):
    """What the jobs of one run printed last, in their order."""
    jobs = {
        "train": TRAIN,
        "encode_db": ("rows_per_shard=100", "chunk_rows=32", "num_actors=2", "compile=false"),
        "build_index": (),
        "evaluate": ("k=100",),
        "dedup": ("rows_per_block=400",),
    }
    found = {}
    for name, settings in jobs.items():
        done = cluster.submit(["python", f"jobs/{name}.py", f"run={RUN}", *settings])
        assert done.returncode == 0, f"{name}:\n{done.stdout}"
        found[name] = job_result(done.stdout)
    return found


def test_the_stages_of_a_run(cluster, results):
    assert results["train"]["cluster"] == {"nodes": 3, "lost": 0, "joined": 0}
    assert results["encode_db"]["rows"] == 1600
    assert results["build_index"]["rows"] == 1600
    assert results["evaluate"]["n_queries"] == 197
    assert results["evaluate"]["map"] > 3 * results["evaluate"]["chance"]
    assert results["dedup"]["n_rows"] == 1600
    for name in ("host-1", "host-2"):  # nothing of the run lies on any host
        wanted = "-name '*.parquet' -o -name model.safetensors"
        look = f"find /tmp $HOME -path {sys.prefix} -prune -o '(' {wanted} ')' -print"
        found = cluster.run(name, ["sh", "-c", look])
        assert found.stdout == ""


def test_the_run_is_sound_as_seen_from_the_desk(cluster, results):
    inspect = f"from hashnet.cli import entry; raise SystemExit(entry.main(['inspect', {RUN!r}]))"
    assert "codes" in cluster.python(inspect)
    again = cluster.submit(["python", "jobs/encode_db.py", f"run={RUN}"])
    assert job_result(again.stdout)["rows_encoded_now"] == 0
    duplicates = "import hashnet; run = hashnet.Run('s3://runs/digits'); store = run.codes.open();"
    found = cluster.python(f"{duplicates} print(len(hashnet.near_duplicates(store, radius=2).a))")
    assert int(found) == results["dedup"]["n_pairs"]


def test_a_comparison(cluster):
    settings = ("dataset=digits", "methods=lsh,itq,hashnet", "bits=16", "k=100", "zero_shot=0")
    done = cluster.submit(
        ["python", "jobs/compare.py", "run=s3://runs/table", "modality=features", "device=cpu", *settings]
    )
    assert done.returncode == 0, done.stdout
    result = job_result(done.stdout)
    assert result["cells"] == 3, result
    assert result["cluster"]["nodes"] == 3


def test_a_server_whose_slices_lie_on_two_hosts(cluster, results):
    """Half a CPU each for the HTTP process and two slices: no host holds all three."""
    token = "r" * 24
    env = json.dumps({"env_vars": {"HASHNET_TOKEN": token}})
    options = ("--runtime-env-json", env, "--submission-id", "served")
    settings = (f"run={RUN}", "host=0.0.0.0", "port=8010", "slices=2", "model=off")
    job = Running(cluster.start_job(["python", "jobs/serve.py", *settings], *options))
    job.wait_for("Ctrl-C stops it")
    query = f"""
import httpx, hashnet, sys
from hashnet.errors import HashnetError
store = hashnet.Run({RUN!r}).codes.open()
found = []
for host in sys.argv[1:]:
    try:
        client = hashnet.Client(f"http://{{host}}:8010", token={token!r})
        hits = client.search(store.codes()[:5], k=10)
    except (httpx.HTTPError, HashnetError) as error:
        print(host, repr(error), file=sys.stderr)
        continue
    found.append(hits)
own = hashnet.BinaryIndex.build(store, kind="flat").search(store.codes()[:5], k=10)
assert found, "no host answers"
assert all((hits.ids == own.ids).all() and (hits.distances == own.distances).all() for hits in found)
print(len(found))
"""
    head, *addresses = [cluster.hosts[name].address for name in ("head", "host-1", "host-2")]
    done = cluster.run("desk", ["python", "-c", query, *addresses], PYTHONPATH=".")
    assert done.returncode == 0, done.stdout
    actors = "ray list actors --filter state=ALIVE --format json"
    listed = cluster.run("head", ["sh", "-c", actors], RAY_ADDRESS=cluster.address).stdout
    nodes = {
        actor["node_id"]
        for actor in json.loads(listed[listed.index("[") :])
        if actor["class_name"].startswith("ServeReplica:")
    }
    assert len(nodes) == 2
    stop = cluster.run("head", ["ray", "job", "stop", "served"], RAY_ADDRESS=f"http://{head}:8265")
    assert stop.returncode == 0, stop.stdout
    job.end(120)
