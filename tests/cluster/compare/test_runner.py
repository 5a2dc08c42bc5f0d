"""Cells as Ray tasks: workers that die, the table so far."""

import dataclasses
import os

import numpy as np
import pytest

from cluster.compare import runner
from cluster.compare.runner import CellResources, CellRunner, table_so_far
from hashnet.comparison.cell import Cell, CellInputs, CellResult, CellTask
from hashnet.errors import ClusterError
from hashnet.metrics.evaluation import evaluate


def test_a_cell_whose_worker_dies_is_a_failed_one(ray_local, monkeypatch):
    cell = Cell("main", "itq", 16, 0)
    dies = ray_local.remote(max_retries=0)(lambda: os._exit(1))
    ((_, outcome),) = runner._completed({dies.remote(): cell})
    assert isinstance(outcome, ClusterError)
    assert "its worker died" in str(outcome)

    def no_memory(ref):
        raise ray_local.exceptions.OutOfMemoryError("killed due to the node running low on memory")

    done = ray_local.put(None)
    monkeypatch.setattr("ray.get", no_memory)
    ((_, outcome),) = runner._completed({done: cell})
    assert isinstance(outcome, ClusterError)
    assert "a larger cpus_per_cell" in str(outcome)


def test_no_more_tasks_run_at_once_than_allowed(monkeypatch):
    running, most = [], []

    class Work:
        def options(self, **_):
            return self

        def remote(self, task, *_):
            running.append(task.cell.seed)
            most.append(len(running))
            return task.cell.seed

    def wait(tasks, **_):
        running.remove(tasks[0])
        return tasks[:1], tasks[1:]

    monkeypatch.setattr("ray.remote", lambda **_: lambda _: Work())
    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", lambda task: None)
    tasks = [CellTask(Cell("tune", "hashnet", 16, seed), "/f", "m", "0", 10) for seed in range(5)]
    for limit, expected in ((2, 2), (None, 5)):
        most.clear()
        ran = CellRunner("sweep", CellResources(max_concurrent=limit))._outcomes(tasks, gpu=False)
        assert [cell.seed for cell, _ in ran] == [0, 1, 2, 3, 4]
        assert max(most) == expected


def measured(part, value):
    """A finished cell whose MAP, or validation MAP, is the value."""
    inputs = CellInputs("itq", 16, 0, {}, 10, 0.2 if part == "tune" else 0.0, "0")
    if part == "tune":
        return CellResult(part, inputs, validation_map=value)
    codes, labels = np.zeros((4, 2), np.uint8), np.arange(4) % 2
    report = evaluate(codes, labels, codes, labels, k=4)
    return CellResult(part, inputs, report=dataclasses.replace(report, map=value))


def test_few_cells_run_in_this_process(monkeypatch):
    ran, loaded = [], []

    def run_cell(task, features, device):
        ran.append((task.cell.method, features))
        return measured("main", 0.5)

    def require(*_):
        raise ClusterError("Ray was asked")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(runner.ray_internals, "connected", lambda: False)
    monkeypatch.setattr(runner, "run_cell", run_cell)
    monkeypatch.setattr(runner, "finished_cell", lambda task: None)
    monkeypatch.setattr(runner.capacity, "require", require)
    monkeypatch.setattr(runner.capacity, "workers_that_fit", lambda *_, **__: 0)
    cells = [Cell("main", name, 16, 0) for name in ("lsh", "itq", "dhn")]
    tasks = [CellTask(cell, "/f", "m", "0", 10) for cell in cells]
    few = CellRunner("compare", CellResources(), lambda: loaded.append(1) or "features")
    assert len(few.run(tasks)) == 3
    assert ran == [("lsh", "features"), ("itq", "features"), ("dhn", None)]
    assert loaded == [1]
    two_networks = [*tasks, CellTask(Cell("main", "hashnet", 16, 0), "/f", "m", "0", 10)]
    with pytest.raises(ClusterError, match="Ray was asked"):
        CellRunner("compare", CellResources(), lambda: "features").run(two_networks)


def test_the_table_so_far_shows_means_best_trials_and_failures():
    table = table_so_far(
        {
            Cell("main", "itq", 16, 0): measured("main", 0.5),
            Cell("main", "itq", 16, 1): measured("main", 0.7),
            Cell("main", "lsh", 32, 0): ClusterError("no"),
            Cell("tune", "sdh", 16, 0, {"width": 1}): measured("tune", 0.3),
            Cell("tune", "sdh", 16, 0, {"width": 2}): measured("tune", 0.4),
        }
    )
    assert table.splitlines() == [
        "method             16       32",
        "SDH            0.4000         ",
        "ITQ            0.6000         ",
        "LSH                     failed",
    ]
