"""Actors, nodes and drivers die at random moments; the store comes out byte for byte the same."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from hashnet import CodeStore
from hashnet.data.sources import make_manifest
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster(new_cluster):
    """Three nodes with one CPU each."""
    made = new_cluster(object_store_mb=200)
    for name in ("head", "one", "two"):
        made.add_node(name, cpus=1)
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    run = tmp_path_factory.mktemp("pictures")
    about = {"n_images": 6000, "side": 48, "store": "tar", "n_query": 100, "n_train": 100, "broken": 0.003}
    make_manifest("synthetic", str(run / "manifest.parquet"), **about)
    torch.manual_seed(0)
    save_bundle(str(run / "model"), build_model("small_cnn", 48))
    return run


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    run = tmp_path_factory.mktemp("features")
    n = 300_000
    values = np.random.default_rng(0).normal(size=(n, 64)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 64)
    table = pa.table({"uri": pa.nulls(n, pa.string()), "feature": column})
    rows = SourceRows(n, lambda a, b: table[a:b], modality="features", n_features=64)
    write_manifest(str(run / "manifest.parquet"), rows, np.full(n, 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(run / "model"), build_model("features", 64, n_features=64, hidden=512))
    return run


class Driver:
    """`python jobs/encode_db.py` on the cluster, as a process that can be killed."""

    def __init__(self, cluster, python, repo, run, out, **keys) -> None:
        self.records = out / "_records"
        words = [
            f"run={run}",
            f"out={out}",
            "device=cpu",
            "compile=false",
            *(f"{k}={v}" for k, v in keys.items()),
        ]
        self.process = subprocess.Popen(
            [python, "jobs/encode_db.py", *words],
            cwd=repo, env=cluster.env | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(repo)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def wait_for_records(self, n: int, timeout_s: float = 120) -> bool:
        """Whether that many shards are there while the driver still runs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.records.exists() and len(list(self.records.glob("*.json"))) >= n:
                return True
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def result(self) -> dict:
        out, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, out
        return json.loads(out.splitlines()[-1])


def kill_actor(cluster, name: str) -> bool:
    """SIGKILL to one encoder actor of this cluster."""
    for node in cluster.nodes.values():
        for process in psutil.Process(node.pid).children(recursive=True):
            try:
                if name in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)
                    return True
            except psutil.NoSuchProcess:
                continue
    return False


def fingerprints(folder) -> list[tuple[str, str]]:
    store = CodeStore.open(str(folder))
    store.verify()
    ids = store.ids()
    assert len(np.unique(ids)) == len(ids) == len(store)
    return [(shard.name, shard.sha256) for shard in store.shards]


@pytest.mark.parametrize(
    ("kind", "actor", "keys"),
    [
        ("pictures", "PictureEncoder", {"rows_per_shard": 250, "chunk_rows": 32}),
        ("pictures", "Committer", {"rows_per_shard": 250, "chunk_rows": 32}),
        ("features", "FeatureEncoder", {}),
    ],
)
def test_whatever_dies_the_store_is_the_same(cluster, python, repo, tmp_path, request, kind, actor, keys):
    run = request.getfixturevalue(kind)
    if kind == "features":
        keys = {"rows_per_shard": 4000}
    calm = Driver(cluster, python, repo, run, tmp_path / "calm", **keys).result()
    wanted = fingerprints(tmp_path / "calm")
    assert calm["nodes"] >= 2  # several nodes share the work

    rng = random.Random(7)
    chaos = tmp_path / "chaos"
    done = 0
    for _ in range(4):  # the driver dies at random moments
        driver = Driver(cluster, python, repo, run, chaos, **keys)
        driver.wait_for_records(done + rng.randint(1, max(calm["shards"] // 8, 1)))
        time.sleep(rng.random() * 0.3)
        driver.kill()
        assert not (chaos / "_SUCCESS").exists()
        done = len(list((chaos / "_records").glob("*.json")))
    assert 0 < done < calm["shards"]

    driver = Driver(cluster, python, repo, run, chaos, **keys)  # an actor dies, then a node
    assert driver.wait_for_records(done + 1)
    assert kill_actor(cluster, actor)
    driver.wait_for_records(done + 3)
    cluster.kill_node("two")
    last = driver.result()
    cluster.add_node("two", cpus=1)
    assert last["rows_encoded_now"] < calm["rows_encoded_now"]
    assert fingerprints(chaos) == wanted
    assert CodeStore.open(str(chaos)).quarantine().equals(CodeStore.open(str(tmp_path / "calm")).quarantine())
    assert not list(chaos.rglob("*.tmp-*"))

    again = Driver(cluster, python, repo, run, chaos, **keys).result()
    assert again["rows_encoded_now"] == 0
