"""Capacity, telemetry and authentication on a real cluster: a head without CPUs, a CPU node, a GPU node."""

import json
import urllib.error
import urllib.request

import pytest

from tests.support.local_cluster import job_result

pytestmark = pytest.mark.slow  # three nodes and waits of their own


@pytest.fixture(scope="module")
def cluster(new_cluster):
    made = new_cluster()
    made.env["RAY_metrics_report_interval_ms"] = "1000"  # ten seconds otherwise
    made.add_node("head", cpus=0)
    made.add_node("cpu-1", cpus=2, labels={"hashnet.io/pool": "cpu"})
    made.add_node("gpu-1", cpus=2, gpus=1, labels={"hashnet.io/pool": "gpu"})
    return made


CONNECT = """
    import json, logging, os, sys
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from cluster.runtime import Need, capacity, connection, telemetry
    from hashnet.io import events
    connection.connect()
    import ray
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    def where():
        return names[ray.get_runtime_context().get_node_id()]
"""


def test_decoding_stays_on_cpu_nodes_gpus_are_shared_and_the_head_gets_nothing(cluster, drive):
    done = drive(
        cluster,
        CONNECT
        + """
    from collections import Counter
    needs = [Need("decode", 2, {"CPU": 1}), Need("encoder", 2, {"CPU": 0.5, "GPU": 0.5})]
    capacity.require("encode", needs)

    @ray.remote(num_cpus=0.5, num_gpus=0.5)
    class Encoder:
        def where(self):
            return where()

    def slowly(seconds=0.2):
        import time
        time.sleep(seconds)
        return where()

    decode = ray.remote(num_cpus=1)(slowly).options(**capacity.on_cpu_nodes())
    encoders = [Encoder.remote() for _ in range(2)]
    spread = ray.remote(num_cpus=1)(slowly).options(scheduling_strategy="SPREAD")
    print(json.dumps({
        "decode": Counter(name for _ in range(4) for name in ray.get([decode.remote(), decode.remote()])),
        "more than fit": sorted(set(ray.get([decode.remote(2) for _ in range(8)]))),
        "encoders": Counter(ray.get([encoder.where.remote() for encoder in encoders])),
        "anywhere": sorted(set(ray.get([spread.remote(1) for _ in range(8)]))),
    }))
    """,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["decode"] == {"cpu-1": 8}
    assert found["encoders"] == {"gpu-1": 2}
    assert found["more than fit"] == ["cpu-1", "gpu-1"]  # idle cores of GPU nodes help out
    assert "head" not in found["anywhere"]
    assert "plan: encode runs 2 × decode {CPU 1}, 2 × encoder {CPU 0.5, GPU 0.5}" in done.stderr
    assert "2 nodes with {CPU 4, GPU 1} (the head takes no work)" in done.stderr


def test_what_can_never_run_is_refused_with_what_there_is(cluster, drive):
    done = drive(
        cluster,
        CONNECT
        + """
    from hashnet.errors import ClusterError
    try:
        capacity.require("train", [Need("worker", 2, {"CPU": 1, "GPU": 1}, fix="lower num_workers")])
    except ClusterError as error:
        print(error)
    """,
    )
    assert done.stdout.splitlines() == [
        "train needs 2 × worker {CPU 1, GPU 1}, but 1 can fit: lower num_workers, or add nodes. The cluster "
        "has 2 nodes with {CPU 4, GPU 1} (the head takes no work), the largest gpu-1 {CPU 2, GPU 1}"
    ]


def test_what_an_autoscaler_can_add_is_waited_for_with_a_line(cluster, start_driver, drive):
    kinds = json.dumps([{"name": "big", "resources": {"CPU": 3}, "max": 1}])
    driver = start_driver(
        cluster,
        CONNECT
        + """
    capacity.require("train", [Need("worker", 1, {"CPU": 3})])
    print(json.dumps({"nodes": len(capacity.nodes())}))
    """,
        HASHNET_NODE_TYPES=kinds,
        HASHNET_WAIT_S="60",
    )
    # The test plays the autoscaler: it adds the node once the demand shows up.
    driver.wait_for("waiting for the autoscaler (0s so far): 1 × worker {CPU 3}")
    cluster.add_node("big-1", cpus=3)
    code, log = driver.end(90)
    cluster.kill_node("big-1")
    gone = """
    import time
    while "big-1" in {node.name for node in capacity.nodes()}:
        time.sleep(0.2)
    """
    drive(cluster, CONNECT + gone)  # the next test's actor must not be sent there
    assert code == 0, log
    assert job_result(log) == {"nodes": 4}


def test_an_autoscaler_that_never_delivers_is_given_up(cluster, drive):
    kinds = json.dumps([{"name": "big", "resources": {"CPU": 64}, "max": 1}])
    done = drive(
        cluster,
        CONNECT
        + """
    capacity.require("train", [Need("worker", 1, {"CPU": 64})])
    """,
        HASHNET_NODE_TYPES=kinds,
        HASHNET_WAIT_S="3",
    )
    assert "ClusterError: the autoscaler did not add nodes for 1 × worker {CPU 64} within 3s" in done.stderr


def test_metrics_and_events_of_a_worker_are_found(cluster, drive):
    done = drive(
        cluster,
        CONNECT
        + """
    import time, urllib.error, urllib.request
    @ray.remote(num_cpus=1)
    class Worker:  # Ray forgets the metrics of a process that has ended
        def work(self):
            telemetry.count("images", 7, run="demo", stage="encode", status="ok")
            with telemetry.timed("decode_seconds", run="demo", stage="encode"):
                pass
            telemetry.gauge("train_beta", 512, run="demo")
            events.event("shard committed", run="demo", stage="encode", shard="codes-00017", rows=8192)
            return os.getpid()
    worker = Worker.remote()
    pid = ray.get(worker.work.remote())
    deadline, ours = time.monotonic() + 60, []
    while len({line.split("{")[0] for line in ours}) < 3 and time.monotonic() < deadline:
        time.sleep(0.5)
        pages = []
        for port in [node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]]:
            try:
                pages.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
            except urllib.error.URLError:  # the node's agent is still starting
                continue
        names = ("ray_hashnet_images_total", "ray_hashnet_decode_seconds_count", "ray_hashnet_train_beta")
        ours = [line for page in pages for line in page.splitlines() if line.startswith(names)]
    print(json.dumps({"pid": pid, "lines": ours}))
    """,
    )
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout.splitlines()[-1])
    assert _sample(about["lines"], "ray_hashnet_images_total", 'status="ok"') == 7
    assert _sample(about["lines"], "ray_hashnet_decode_seconds_count", 'run="demo"') == 1
    assert _sample(about["lines"], "ray_hashnet_train_beta", 'run="demo"') == 512
    (events,) = cluster.folder.glob(f"session_latest/logs/hashnet-{about['pid']}.jsonl")
    (line,) = events.read_text().splitlines()
    told = json.loads(line)
    assert (told["run"], told["shard"], told["rows"]) == ("demo", "codes-00017", 8192)


def _sample(lines, name, tag):
    (line,) = [line for line in lines if line.startswith(name + "{") and tag in line]
    return float(line.rsplit(" ", 1)[1])


def test_nothing_listens_beyond_loopback(cluster, listeners):
    found = listeners([process.pid for process in cluster.nodes.values()])
    assert len(found) > 10  # GCS, dashboard, raylets, agents
    assert {address for _, address in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_strangers_without_the_token_get_nothing(cluster):
    jobs = f"http://127.0.0.1:{cluster.dashboard_port}/api/jobs/"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(jobs)
    assert refused.value.code == 401
    wrong = urllib.request.Request(jobs, headers={"Authorization": "Bearer " + "0" * 64})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(wrong)
    assert refused.value.code == 403
    assert (cluster.folder / "token").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_driver_with_a_wrong_token_is_turned_away(cluster, drive, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    code = "from cluster.runtime import connection; connection.connect(); print('in')"
    done = drive(cluster, code, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    assert done.returncode != 0
    assert "in" not in done.stdout.split()
