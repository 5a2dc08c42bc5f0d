"""A worker without a GPU sees none, and device=cpu is obeyed wherever work is handed to workers.

GPUs are logical here: nodes say that they have two, and CUDA_VISIBLE_DEVICES names both, as on a GPU node.
"""

from __future__ import annotations

import json

import pytest
import torch

from cluster.compare import CellResources
from cluster.compare import runner as cells
from cluster.encode import EncodeConfig, job, pipeline
from cluster.runtime import connection
from cluster.train import _device
from hashnet.errors import DeviceMemoryError
from hashnet.training import TrainConfig
from tests.support.local_cluster import LocalCluster

LOOK = """
    import json, os
    from cluster.runtime import connection
    connection.hide_gpus_of_driver()  # where a job starts
    connection.connect()
    import ray

    def visible():
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    class Actor:
        def visible(self):
            return visible()

    @ray.remote(num_cpus=0.1)
    def nested():  # a task that starts tasks, as the controller of a training does
        return ray.get(ray.remote(num_cpus=0.1)(visible).remote())

    few = {"num_cpus": 0.1}
    found = {
        "driver": visible(),
        "task": ray.get([ray.remote(**few)(visible).remote() for _ in range(4)]),
        "actor": [ray.get(ray.remote(**few)(Actor).remote().visible.remote())],
        "nested": [ray.get(nested.remote())],
        "data": ray.data.range(1).map(lambda row: {"seen": visible()}, num_cpus=0.1).take_all()[0]["seen"],
    }
    if ray.cluster_resources().get("GPU"):
        found["gpu"] = ray.get(ray.remote(num_gpus=1, **few)(visible).remote())
        from cluster.runtime import capacity
        for gpu in (False, True):
            work = capacity.task(lambda: os.getpid(), cpus=0.1, gpu=gpu)
            found[f"processes, gpu={gpu}"] = len({ray.get(work.remote()) for _ in range(3)})
    print(json.dumps(found))
"""


# What Serve and Ray Train start themselves. No driver of a RayService calls connect: there nodes hide GPUs.
LOOK_INSIDE = """
    import json, os, sys, tempfile
    import ray
    if os.environ.get("BY_NODE"):
        ray.init(address=os.environ["RAY_ADDRESS"])
    else:
        from cluster.runtime import connection
        connection.connect()
    from ray import serve
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def visible():
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def replica(**options):
        @serve.deployment(ray_actor_options={"num_cpus": 0.1, **options})
        class Replica:
            def visible(self):
                return visible()
        name = f"app-{len(options)}"
        return serve.run(Replica.bind(), name=name, route_prefix=None).visible.remote().result(timeout_s=60)

    def trained(**resources):
        with tempfile.TemporaryDirectory() as folder:
            def work():
                with open(os.path.join(folder, "seen"), "w") as file:
                    json.dump(visible(), file)
            scaling = ScalingConfig(num_workers=1, use_gpu="GPU" in resources, resources_per_worker=resources)
            storage = RunConfig(storage_path=folder)
            TorchTrainer(work, scaling_config=scaling, run_config=storage).fit()
            with open(os.path.join(folder, "seen")) as file:
                return json.load(file)

    serve.start(proxy_location="Disabled")
    found = {"replica": replica(), "replica with a GPU": replica(num_gpus=0.5), "training": trained(CPU=0.1)}
    serve.shutdown()
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def gpu_cluster():
    with LocalCluster() as cluster:
        cluster.env["CUDA_VISIBLE_DEVICES"] = "0,1"
        cluster.add_node("head", cpus=2, gpus=2)
        yield cluster


@pytest.fixture(scope="module")
def hiding_cluster():
    """Its nodes hide GPUs, as ray_cluster.yaml and the Kubernetes files have it."""
    with LocalCluster() as cluster:
        cluster.env |= {"CUDA_VISIBLE_DEVICES": "0,1"} | connection.HIDE_GPUS
        cluster.add_node("head", cpus=2, gpus=2)
        yield cluster


def hidden(out: str) -> dict:
    found = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    assert (set(found["task"]), found["actor"], found["nested"], found["data"]) == ({""}, [""], [""], "")
    return found


def test_only_a_worker_with_a_gpu_sees_one(gpu_cluster, drive):
    done = drive(gpu_cluster, LOOK)
    assert done.returncode == 0, done.stderr
    found = hidden(done.stdout)
    assert found["driver"] == ""
    assert found["gpu"] in ("0", "1")
    assert found["processes, gpu=True"] == 3  # a process keeps the GPU that it began with
    assert found["processes, gpu=False"] < 3


@pytest.mark.parametrize(("where", "by_node"), [("gpu_cluster", ""), ("hiding_cluster", "1")])
def test_what_serve_and_train_start_sees_only_its_own(request, drive, where, by_node):
    cluster = request.getfixturevalue(where)
    done = drive(cluster, LOOK_INSIDE, BY_NODE=by_node)
    assert done.returncode == 0, done.stderr
    found = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert found.pop("replica with a GPU") in ("0", "1")
    assert found == {"replica": "", "training": ""}


def test_a_ray_that_starts_here_hides_them_too(python, repo):
    import os
    import subprocess
    import textwrap

    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(LOOK)],
        cwd=repo,
        env=env | {"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    hidden(done.stdout)


@pytest.fixture
def fake_gpu(monkeypatch):
    """torch says that there is a GPU, and whoever opens it fails."""

    def opened(*_, **__):
        raise AssertionError("a worker without a GPU opened one")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", opened)


@pytest.mark.parametrize(("on_gpu", "device"), [(False, "cpu"), (True, "cuda")])
def test_a_cell_computes_where_it_was_placed(fake_gpu, monkeypatch, on_gpu, device):
    monkeypatch.setattr(cells, "run_cell", lambda task, features, device: device)
    assert cells._run_in_task(None, None, 1, on_gpu) == device


def test_cells_of_device_cpu_get_no_gpu(monkeypatch):
    monkeypatch.setattr(cells.capacity, "workers_that_fit", lambda *_, **__: 8)
    assert CellResources(device="auto").use_gpu()
    assert not CellResources(device="cpu").use_gpu()


def test_a_training_worker_without_a_gpu_stays_on_the_cpu(fake_gpu):
    assert _device(TrainConfig(run="x", device="cpu"), gpus=0) == torch.device("cpu")
    assert _device(TrainConfig(run="x", device="auto"), gpus=0) == torch.device("cpu")


def test_counting_stays_on_the_cpu_unless_cuda_is_requested(fake_gpu):
    import numpy as np

    import hashnet

    codes, labels = np.arange(64, dtype=np.uint8).reshape(-1, 1), np.arange(64) % 4
    report = hashnet.evaluate(codes[:4], labels[:4], codes, labels, k=10)
    assert report.map == hashnet.evaluate(codes[:4], labels[:4], codes, labels, k=10, device="cpu").map
    with pytest.raises(AssertionError, match="opened one"):
        hashnet.evaluate(codes[:4], labels[:4], codes, labels, k=10, device="cuda")


def test_gpus_per_actor_0_means_the_cpu(monkeypatch):
    monkeypatch.setattr(pipeline.capacity, "workers_that_fit", lambda *_, **__: 8)
    config = EncodeConfig(run="x", gpus_per_actor=0)
    assert config.engine_device == "cpu"
    engine = job.requested_engine(config.engine_device, None, begun=None)
    assert pipeline.gpus_of_an_actor(engine, config.gpus_per_actor) == 0
    assert pipeline.gpus_of_an_actor("auto", None) == 1


def test_a_setting_of_the_users_wins(monkeypatch):
    seen = {}
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.delenv(*connection.HIDE_GPUS, raising=False)  # an earlier Ray of this process has set it
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray_internals, "refuse_silent_address", lambda *_: None)

    def init(**options):
        seen.update(options)
        raise ConnectionError("seen enough")

    monkeypatch.setattr("ray.init", init)
    for value, passed in ((None, {"env_vars": connection.HIDE_GPUS}), ("0", {})):
        if value is not None:
            monkeypatch.setenv(*connection.HIDE_GPUS, value)
        with pytest.raises(Exception, match="seen enough"):
            connection.connect()
        assert seen["runtime_env"] == passed


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_running_out_of_device_memory_is_one_of_our_errors(error):
    from hashnet.models import device_memory

    with (
        pytest.raises(
            DeviceMemoryError, match=r"a batch of 256 rows; use a smaller batch_size \(CUDA"
        ) as found,
        device_memory("a batch of 256 rows", "use a smaller batch_size"),
    ):
        raise error
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["CUDA error: device-side assert triggered", "mat1 and mat2 do not fit"])
def test_other_errors_of_a_device_stay_what_they_are(text):
    from hashnet.models import device_memory

    with pytest.raises(RuntimeError, match=text) as found, device_memory("the model", "use device=cpu"):
        raise RuntimeError(text)
    assert not isinstance(found.value, DeviceMemoryError)
