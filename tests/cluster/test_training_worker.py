"""What a training worker tells, and what it leaves behind when it stops; no Ray is started."""

import logging
import sys
from types import SimpleNamespace

import pytest
import ray.train
import ray.train.torch
import torch
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from cluster import train as training
from cluster.runtime import telemetry
from hashnet.errors import Diverged, StorageError
from hashnet.io import config as configs
from hashnet.io import events, storage
from hashnet.training.checkpoints import StageRecord, StepRecord
from hashnet.training.train_config import TrainConfig

STEP = StepRecord(step=10, total_steps=100, epoch=1, stage=1, beta=2.0, lr=0.5, J=0.3, L=0.4,
                  rows_per_s=900.0, quantisation=0.2, distinct=64, balance=0.6, entropy=0.9)  # fmt: skip


def test_a_step_is_told_to_prometheus(monkeypatch):
    told = {}
    for way in ("count", "gauge"):
        monkeypatch.setattr(
            telemetry, way, lambda name, value, way=way, **tags: told.update({name: (way, value, tags)})
        )
    training._Report(TrainConfig("/runs/demo", log_every=5, head_lr_scale=10), rank=0).step(STEP)
    run = {"run": "demo"}
    assert told == {
        "train_steps": ("count", 1, run),  # the first row: later ones count the steps since the last
        "train_J": ("gauge", 0.3, run),
        "train_L": ("gauge", 0.4, run),
        "train_beta": ("gauge", 2.0, run),
        "train_learning_rate": ("gauge", 5.0, run),  # the hash layer's: ten times the backbone's
        "train_quantisation": ("gauge", 0.2, run),
        "train_distinct_codes": ("gauge", 64, run),
        "train_bit_balance": ("gauge", 0.6, run),
        "train_bit_entropy": ("gauge", 0.9, run),
        "images_per_second": ("gauge", 900.0, {**run, "stage": "train"}),
    }
    assert all(telemetry.METRICS[name].kind.startswith(way) for name, (way, _, _) in told.items())


def test_a_stage_is_an_event_of_the_first_worker(monkeypatch):
    told = []
    monkeypatch.setattr(events, "event", lambda message, **fields: told.append((message, fields)))
    record = StageRecord(3, 8.0, 0.1, first_step=9, steps=4, epochs=2, seconds=1.0, J=0.1, L=0.2)
    for rank in (0, 1):
        training._Report(TrainConfig("/runs/demo"), rank).stage(record)
    fields = {"run": "demo", "stage": "train", "number": 3, "beta": 8.0, "epochs": 2, "J": 0.1, "L": 0.2}
    assert told == [("stage done", fields)]


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (Diverged("at step 3"), True),
        (StorageError("put"), False),
        (StorageError("cannot write x: No space left on device"), True),
    ],
)
def test_only_a_mistake_that_would_repeat_itself_is_final(tmp_path, monkeypatch, error, left):
    shown = []

    def stop(*_, **__):
        shown.append(sys.stderr is sys.stdout)
        raise error

    monkeypatch.setattr("hashnet.training.train_run", stop)
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
    for name in ("hashnet", "cluster"):  # put back at the end
        project_logger = logging.getLogger(name)
        monkeypatch.setattr(project_logger, "handlers", project_logger.handlers)
        monkeypatch.setattr(project_logger, "propagate", True)
    monkeypatch.setattr(training, "_device", lambda *_: "cpu")
    config, before = TrainConfig(str(tmp_path)), sys.stderr
    with pytest.raises(type(error)):
        training._work({"config": configs.to_dict(config), "cpus": torch.get_num_threads(), "gpus": 0})
    assert storage.exists(f"{tmp_path}/checkpoints/error.json") == left
    assert shown == [True]
    assert sys.stderr is before  # where Ray Train writes the stack trace: it is recorded, not shown


def test_training_that_failed_is_explained_by_its_workers_or_raised_as_it_is(tmp_path, monkeypatch):
    raised = []

    class Trainer:
        def __init__(self, *_, **__):
            pass

        def fit(self):
            raise raised[-1]

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Trainer)
    config = TrainConfig(str(tmp_path))
    raised.append(WorkerGroupError("a worker", {0: RuntimeError("reset"), 1: StorageError("put failed")}))
    with pytest.raises(StorageError, match="put failed") as caught:
        training._fit(config, {"CPU": 1})
    assert caught.value.__cause__ is raised[-1]
    raised.append(TrainingFailedError("who knows"))
    with pytest.raises(TrainingFailedError, match="who knows") as caught:
        training._fit(config, {"CPU": 1})
    assert caught.value.__cause__ is None  # not itself: whoever followed its causes would find no end
