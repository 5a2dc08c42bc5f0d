"""Train a run's model data-parallel on Ray Train.

The work is in ``hashnet.training``: each worker runs ``train_run`` inside a torch process group that Ray
sets up. It survives failures by its checkpoints in RUN/checkpoints, from which a worker that replaces a
lost one, a group of another size, or the same command after the driver was killed continues.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.runtime import FULL_DISK, Need, capacity, connection, hashnet_error_in, ray_internals, telemetry
from hashnet import errors
from hashnet.data import nearest_rows
from hashnet.errors import HashnetError, ModelError, StorageError
from hashnet.io import Progress, counted, events, storage
from hashnet.io import config as configs
from hashnet.run import Run
from hashnet.training import TrainConfig, prepare, result_of

if TYPE_CHECKING:
    from hashnet.training import StageRecord, StepRecord, TrainingSummary

logger = logging.getLogger(__name__)
REPORT_EVERY_S = 30.0
MAX_CPUS = 8  # a worker gains little from more threads
NEIGHBOUR_ROWS = 20_000  # whose neighbours one task finds; fewer rows are searched here
ERROR = "error.json"  # why a worker stopped, where a retry would fail in the same way


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains the run and returns what the job prints; a finished run is left as it is."""
    prepared = prepare(config, find_nearest)
    if prepared.finished is not None:
        logger.info("%s is trained already; another run folder starts anew", config.run)
        return {**prepared.finished, "already_finished": True}
    if config.num_workers == 1 and not os.environ.get("RAY_ADDRESS") and not ray_internals.connected():
        return _result(config, _train_here(prepared.config))
    connection.connect()
    if config.num_workers > 1 and prepared.manifest.modality == "features":
        logger.info("a head on vectors trains fastest with num_workers=1: its steps take about a millisecond")
    resources = worker_resources(prepared.config)
    fewest = config.min_workers or config.num_workers
    apart = config.placement == "strict_spread"
    need = Need("worker", config.num_workers, resources, fewest, one_per_node=apart, fix="lower num_workers")
    capacity.require("train", [need])
    capacity.require_shared(config.run)
    storage.delete(storage.join(Run(config.run).checkpoints, ERROR))
    logger.info("starting the workers, which takes some seconds")
    summary = _fit(prepared.config, resources)
    storage.delete(storage.join(Run(config.run).checkpoints, "ray"))
    return _result(config, summary)


def find_nearest(vectors: np.ndarray) -> np.ndarray:
    """``hashnet.data.nearest_rows`` of all vectors; of many, in Ray tasks of NEIGHBOUR_ROWS rows each."""
    n = len(vectors)
    if n <= NEIGHBOUR_ROWS:
        return nearest_rows(vectors, 0, n)
    import ray

    connection.connect()
    capacity.require("neighbours", [Need("search", -(-n // NEIGHBOUR_ROWS), {"CPU": 1.0}, at_least=1)])
    shared = ray.put(vectors)
    search = ray.remote(nearest_rows).options(num_cpus=1, max_retries=3)
    starts = range(0, n, NEIGHBOUR_ROWS)
    waiting = [search.remote(shared, start, min(start + NEIGHBOUR_ROWS, n)) for start in starts]
    found = []
    with Progress(n, "rows", "neighbours") as progress:
        for one in waiting:
            found.append(ray.get(one))
            progress.update(len(found[-1]))
    return np.concatenate(found)


def _result(config: TrainConfig, summary: TrainingSummary) -> dict[str, Any]:
    return result_of(config.run, summary.sha256, summary.to_dict())


def _train_here(config: TrainConfig) -> TrainingSummary:
    """Trains in this process: a single worker on this machine needs no Ray, which takes seconds to start."""
    import torch

    from hashnet.training import Callbacks, train_run

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device=cuda was requested, but torch sees no CUDA device here; use device=cpu")
    if config.cpus_per_worker:
        torch.set_num_threads(config.cpus_per_worker)
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    with _Report(config, rank=0, in_ray=False) as report:
        callbacks = Callbacks(step=report.step, stage=report.stage)
        summary = train_run(config, device="cuda" if on_gpu else "cpu", callbacks=callbacks)
    assert summary is not None  # of the first worker
    return summary


def worker_resources(config: TrainConfig) -> dict[str, float]:
    """CPUs of a worker, and a GPU with device=cuda, or with device=auto where the cluster has enough.

    The CPUs are those of the existing nodes; where the workers do not fit on them, of nodes to be added.
    """
    gpu = config.device == "cuda"
    if config.device == "auto":
        gpu = capacity.workers_that_fit({"GPU": 1}, include_addable=True) >= config.num_workers
    extra: dict[str, float] = {"GPU": 1} if gpu else {}
    if config.cpus_per_worker:
        return {"CPU": config.cpus_per_worker, **extra}
    import ray

    free = int(ray.available_resources().get("CPU", 0)) // config.num_workers  # without those in use
    for most, include_addable in ((min(MAX_CPUS, max(1, free)), False), (MAX_CPUS, True)):
        for cpus in range(most, 0, -1):
            if capacity.workers_that_fit({"CPU": cpus, **extra}, include_addable) >= config.num_workers:
                return {"CPU": cpus, **extra}
    return {"CPU": 1, **extra}


def _fit(config: TrainConfig, resources: dict[str, float]) -> TrainingSummary:
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    filesystem, path = storage.resolve(storage.join(Run(config.run).checkpoints, "ray"))
    storage.make_folder(storage.join(Run(config.run).checkpoints, "ray"))
    elastic = (config.min_workers, config.num_workers) if config.min_workers else config.num_workers
    trainer = TorchTrainer(
        _work,
        train_loop_config={
            "config": configs.to_dict(config),
            "cpus": resources["CPU"],
            "gpus": resources.get("GPU", 0),
        },
        torch_config=ray_internals.torch_config(config.collective),
        scaling_config=ScalingConfig(
            num_workers=elastic,
            use_gpu="GPU" in resources,
            resources_per_worker=resources,
            placement_strategy=config.placement.upper(),
        ),
        run_config=RunConfig(
            name="train",
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=config.max_failures),
            logging_config=LoggingConfig(log_level="ERROR"),  # this module logs progress and stages itself
        ),
    )
    ray_internals.leave_interrupts_alone(trainer)
    try:
        summary = trainer.fit().return_value
    except TrainingFailedError as error:
        reason = _reason(config) or hashnet_error_in(error)
        if reason is None:
            raise
        raise reason from error
    reason = _reason(config)
    if reason is not None:
        raise reason
    return summary


def _reason(config: TrainConfig) -> HashnetError | None:
    """The error that a worker recorded before it stopped, as it was raised there; None without one."""
    uri = storage.join(Run(config.run).checkpoints, ERROR)
    if not storage.exists(uri):
        return None
    left = storage.read_json(uri)
    kind = getattr(errors, str(left["type"]), HashnetError)
    return kind(left["message"])


def _work(settings: dict[str, Any]) -> TrainingSummary | None:
    """The summary, of one worker. An error that a retry would repeat, a full disk too, is recorded: a
    restarted group finds it and stops, instead of failing ``max_failures`` times. Other storage errors are
    retried."""
    with _shown_on_the_terminal():
        return _train_in_group(settings)


def _train_in_group(settings: dict[str, Any]) -> TrainingSummary | None:
    import ray.train
    import torch

    from hashnet.training import Callbacks, train_run

    config = configs.from_dict(TrainConfig, settings["config"])
    left = storage.join(Run(config.run).checkpoints, ERROR)
    if storage.exists(left):
        return None
    torch.set_num_threads(max(1, int(settings["cpus"])))
    rank = ray.train.get_context().get_world_rank()
    try:
        with _Report(config, rank) as report:
            callbacks = Callbacks(step=report.step, stage=report.stage)
            return train_run(config, device=_device(config, settings["gpus"]), callbacks=callbacks)
    except HashnetError as error:
        if isinstance(error, StorageError) and FULL_DISK not in str(error):
            logger.warning("a worker stopped: %s", error)
            raise
        about = {"kind": "error", "type": type(error).__name__, "message": str(error)}
        with suppress(StorageError):  # a disk may be too full even for this
            storage.write_json(left, about)
        raise


def _device(config: TrainConfig, gpus: float) -> Any:
    """The worker's GPU or the CPU; the CPU also where GPUs are only logical resources, as in tests."""
    import torch

    if not gpus:  # Ray Train would choose the first GPU that this process sees
        return torch.device("cpu")
    from ray.train.torch import get_device

    logical_only = config.collective == "gloo" and not torch.cuda.is_available()
    return torch.device("cpu") if logical_only else get_device()


@contextmanager
def _shown_on_the_terminal() -> Iterator[None]:
    """Lets a worker print this project's log messages and progress, and no others.

    What a worker prints is shown where the job runs; its standard error is only recorded there. Ray Train
    writes the stack trace of a worker that failed to ``sys.stderr``, when the block is over.
    """
    before, sys.stderr = sys.stderr, sys.stdout
    logging.getLogger().setLevel(logging.WARNING)  # Ray Train logs every report at INFO
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("hashnet", "cluster"):
        project_logger = logging.getLogger(name)
        project_logger.handlers, project_logger.propagate = [handler], False
        project_logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        sys.stderr = before


class _Report:
    """Reports the progress of training to the terminal and, in a worker of Ray, to Ray and Prometheus."""

    def __init__(self, config: TrainConfig, rank: int, in_ray: bool = True) -> None:
        from hashnet.training import StepProgress  # imports torch

        self.config, self.rank, self.in_ray = config, rank, in_ray
        self.last_report = time.monotonic()
        self.run = telemetry.run_name(config.run)
        self.progress = StepProgress(at_most=config.patience > 0)  # stages may end early

    def step(self, row: StepRecord) -> None:  # worker 0 only
        every = self.progress.step(row)
        telemetry.count("train_steps", every, run=self.run)
        telemetry.gauge("train_J", row.J, run=self.run)
        telemetry.gauge("train_L", row.L, run=self.run)
        telemetry.gauge("train_beta", row.beta, run=self.run)
        telemetry.gauge("train_learning_rate", row.lr * self.config.head_lr_scale, run=self.run)
        telemetry.gauge("train_quantisation", row.quantisation, run=self.run)
        telemetry.gauge("train_distinct_codes", row.distinct, run=self.run)
        telemetry.gauge("train_bit_balance", row.balance, run=self.run)
        telemetry.gauge("train_bit_entropy", row.entropy, run=self.run)
        telemetry.gauge("images_per_second", row.rows_per_s, run=self.run, stage="train")

    def stage(self, record: StageRecord) -> None:  # every worker
        from hashnet.training import from_first

        if self.rank == 0:
            logger.info("%s", stage_line(record))
            names = ("beta", "epochs", "J", "L", "map")
            about = {name: value for name in names if (value := getattr(record, name)) is not None}
            events.event("stage done", run=self.run, stage="train", number=record.stage, **about)
        if not self.in_ray:
            return
        import ray.train

        # A report is a barrier that takes seconds: all workers join it, or none.
        if from_first(float(time.monotonic() - self.last_report > REPORT_EVERY_S)) > 0.5:
            self.last_report = time.monotonic()
            ray.train.report({name: value for name, value in record.to_dict().items() if value is not None})

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.progress.close(finished=kind is None)


def stage_line(record: StageRecord) -> str:
    """A finished stage in one line."""
    parts = [f"stage {record.stage} done: beta {record.beta:g}, {counted(record.epochs, 'epoch')}"]
    for name in ("J", "L", "quantisation", "map"):
        if (value := getattr(record, name)) is not None:
            parts.append(f"{name} {value:.4f}")
    return ", ".join(parts)
