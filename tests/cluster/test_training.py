"""Training on a real local Ray: workers and drivers are killed, and nothing is lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from cluster.runtime import connection, ray_internals
from cluster.train import train
from hashnet.data.sources import make_manifest
from hashnet.errors import ClusterError, Diverged, LineageMismatch
from hashnet.io import storage
from hashnet.models.bundle import load_bundle
from hashnet.training.checkpoints import Checkpoints, read_history
from hashnet.training.preparation import prepare
from hashnet.training.train_config import TrainConfig
from hashnet.training.trainer import train_run

# Long enough for a kill in the middle: 4 stages of fixed length, 300 rows in batches of 100.
OPTIONS = {
    "n_bits": 16, "hidden": 64, "noise": 0.4, "dropout": 0.2, "lr": 0.02, "batch_size": 100,
    "first_epochs": 20, "stages": 4, "stage_epochs": 10,
    "checkpoint_every": 15, "log_every": 1, "num_workers": 2, "cpus_per_worker": 1,
}  # fmt: skip
STEPS = (20 + 3 * 10) * 3
KILLED_AT = 75  # in the second stage, which begins at 60


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> str:
    uri = str(tmp_path_factory.mktemp("data") / "manifest.parquet")
    make_manifest("digits", uri, modality="features", n_query=97, n_train=300)
    return uri


def _config(folder, manifest, **options) -> TrainConfig:
    return TrainConfig(run=str(folder), manifest=manifest, **(OPTIONS | options))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, manifest):
    """The same training in one process without Ray."""
    config = _config(tmp_path_factory.mktemp("alone") / "run", manifest, num_workers=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    train_run(prepare(config).config)
    torch.set_num_threads(before)
    return config.run


def _same_training(run: str, undisturbed: str) -> None:
    """Every step once, beta never reset, and the model of an undisturbed run up to rounding."""
    found, expected = (read_history(f"{uri}/model") for uri in (run, undisturbed))
    assert found.steps["step"] == list(range(STEPS))
    assert found.steps["beta"] == expected.steps["beta"] == sorted(found.steps["beta"])
    assert found.steps["lr"] == expected.steps["lr"]
    assert found.steps["J"] == pytest.approx(expected.steps["J"], rel=0.02)
    inputs = torch.rand(50, 64, generator=torch.Generator().manual_seed(0))
    mine, theirs = (load_bundle(f"{uri}/model")[0](inputs) for uri in (run, undisturbed))
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def _wait_for_step(run: str, step: int, alive) -> None:
    checkpoints = Checkpoints(storage.join(run, "checkpoints"))
    while max(checkpoints.steps(), default=0) < step:
        assert alive(), "training ended before it could be disturbed"
        time.sleep(0.02)


@pytest.mark.timeout(900)  # two workers beside other tests on two cores
def test_two_workers_train_what_one_process_does_and_a_killed_one_is_replaced(
    ray_local, tmp_path, manifest, undisturbed
):
    config = _config(tmp_path / "run", manifest)
    outcome: dict = {}
    thread = threading.Thread(target=lambda: outcome.update(train(config)))
    thread.start()
    _wait_for_step(config.run, KILLED_AT, thread.is_alive)
    workers = [
        p for p in psutil.Process().children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline())
    ]
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)
    thread.join()
    assert outcome["steps"] == STEPS
    assert load_bundle(outcome["model"])[1].sha256 == outcome["sha256"]
    _same_training(config.run, undisturbed)
    assert train(config) == {**outcome, "already_finished": True}
    with pytest.raises(LineageMismatch, match="variant was hashnet, now hashnet-w"):
        train(dataclasses.replace(config, variant="hashnet-w"))


@pytest.mark.slow
def test_a_killed_driver_goes_on_with_another_number_of_workers(
    ray_local, repo, tmp_path, manifest, undisturbed
):
    config = _config(tmp_path / "run", manifest)
    words = [f"{k}={v}" for k, v in OPTIONS.items()]
    driver = subprocess.Popen(
        [sys.executable, str(repo / "jobs/train.py"), f"run={config.run}", f"manifest={manifest}", *words],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for_step(config.run, KILLED_AT, lambda: driver.poll() is None)
        driver.kill()
        driver.wait(timeout=30)
    finally:
        _end_group(driver.pid)
    assert not storage.exists(f"{config.run}/model/model.json")
    assert train(dataclasses.replace(config, num_workers=1))["steps"] == STEPS
    _same_training(config.run, undisturbed)


def _end_group(group: int) -> None:
    """Whatever of the driver's own Ray is left; Ray ends with its driver by itself, a little later."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == group:
                process.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


@pytest.mark.slow
def test_what_would_fail_again_is_not_tried_again(ray_local, tmp_path, manifest):
    config = _config(tmp_path / "run", manifest, lr=1e30, max_failures=100)
    with pytest.raises(Diverged, match=r"at step \d+ \(stage 0, beta 1, learning rate"):
        train(config)


def test_a_single_worker_on_this_machine_needs_no_ray(tmp_path, manifest, undisturbed, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_internals, "connected", lambda: False)
    monkeypatch.setattr(connection, "connect", lambda *_: pytest.fail("Ray was started"))
    config = _config(tmp_path / "run", manifest, num_workers=1)
    assert train(config)["steps"] == STEPS
    _same_training(config.run, undisturbed)
    assert train(config)["already_finished"]


def test_more_workers_than_can_be_placed_are_refused(ray_local, tmp_path, manifest):
    config = _config(tmp_path / "run", manifest, num_workers=3)
    with pytest.raises(ClusterError, match=r"train needs 3 × worker \{CPU 1\}.*2 can fit.*CPU 2"):
        train(config)


@pytest.mark.slow
def test_elastic_training_starts_with_what_there_is(ray_local, tmp_path, manifest, undisturbed):
    config = _config(tmp_path / "run", manifest, num_workers=3, min_workers=1)
    assert train(config)["steps"] == STEPS
    _same_training(config.run, undisturbed)
