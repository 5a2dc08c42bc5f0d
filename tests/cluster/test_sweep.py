"""The learning-rate sweep on a real local Ray."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest

from cluster.compare.compare_config import CompareConfig
from cluster.compare.job import PartOfComparison
from cluster.compare.runner import CellRunner
from cluster.sweep import PAPER_GRID, SweepConfig, sweep, trial_configs
from hashnet.comparison.cell import Cell, run_cell
from hashnet.data.manifest import Manifest
from hashnet.data.sources import make_manifest
from hashnet.errors import ClusterError, ConfigError, HashnetError, LineageMismatch, ModelError
from hashnet.io import config as configs
from hashnet.io import storage
from hashnet.training.train_config import TrainConfig


@pytest.fixture
def config(tmp_path) -> SweepConfig:
    uri = str(tmp_path / "manifest.parquet")
    make_manifest("digits", uri, modality="features", n_query=97, n_train=300)
    return SweepConfig(
        run=str(tmp_path / "sweep"), manifest=uri, n_bits=16, batch_size=100, dropout=0.0, stages=2,
        first_epochs=30, stage_epochs=2, lrs=[1e-6, 0.02, 1e30], hidden=0, noise=0, log_every=50,
    )  # fmt: skip


def test_the_grid_is_the_papers(config):
    steps = [math.log10(b) - math.log10(a) for a, b in itertools.pairwise(PAPER_GRID)]
    assert steps == pytest.approx([0.5] * 4, abs=1e-3)
    assert (PAPER_GRID[0], PAPER_GRID[-1]) == (1e-5, 1e-3)
    wide = dataclasses.replace(config, variants=["hashnet", "dhn"], seeds=[0, 1])
    trials = trial_configs(wide)
    assert len(trials) == 2 * 3 * 2
    assert len({trial.run for trial in trials}) == 12
    twice = dataclasses.replace(wide, variants=["hashnet", "dhn", "dhn"], seeds=[0, 1, 0])
    assert trial_configs(twice) == trials
    assert {trial.validation for trial in trials} == {0.2}  # a part of the training set, never queries
    with pytest.raises(ConfigError, match="lrs is empty"):
        dataclasses.replace(config, lrs=[])


def test_sweep_finds_the_rate_resumes_and_writes_a_config(ray_local, config, caplog):
    first = dataclasses.replace(config, lrs=[1e-6, 0.02])
    with caplog.at_level(logging.INFO):
        result = sweep(first)
    assert (result["trained"], result["best"]["lr"]) == (2, 0.02)
    assert "edge of the grid" in caplog.text
    assert "validation MAP" in caplog.text  # the table
    result = sweep(config)  # one rate more, which diverges
    assert (result["trials"], result["trained"], result["best"]["lr"]) == (3, 1, 0.02)
    rows = storage.read_json(f"{config.run}/sweep.json")["trials"]
    assert [row["lr"] for row in rows if row.get("error")] == [1e30]
    assert sweep(config)["trained"] == 0
    best = configs.load(TrainConfig, result["config"], ["run=elsewhere"])
    assert (best.lr, best.validation, best.n_bits, best.manifest) == (0.02, 0.0, 16, config.manifest)
    with pytest.raises(LineageMismatch, match="n_bits was 16, now 24"):
        sweep(dataclasses.replace(config, n_bits=24))


@pytest.fixture
def in_this_process(monkeypatch):
    """Trials run here, one after another, instead of as Ray tasks."""

    def outcomes(runner, tasks, gpu):
        for task in tasks:
            try:
                yield task.cell, run_cell(task)
            except HashnetError as error:
                yield task.cell, error

    monkeypatch.setattr(CellRunner, "_outcomes", outcomes)
    monkeypatch.setattr("cluster.sweep.connection.connect", lambda: None)
    monkeypatch.setattr("cluster.compare.runner.capacity.require", lambda *_: None)
    monkeypatch.setattr("cluster.compare.runner.CellResources.use_gpu", lambda _: False)


def test_a_finished_sweep_is_not_taken_for_one_on_other_data(config, in_this_process, tmp_path):
    config = dataclasses.replace(config, lrs=[0.02])
    assert sweep(config)["trained"] == 1
    best = storage.read_bytes(f"{config.run}/best.yaml")
    other = make_manifest("digits", str(tmp_path / "other"), modality="features", n_query=97, n_train=200)
    with pytest.raises(LineageMismatch, match="was trained on other data"):
        sweep(dataclasses.replace(config, manifest=other.uri))
    assert storage.read_bytes(f"{config.run}/best.yaml") == best


def test_a_mistake_that_can_be_corrected_is_reported_and_tried_again(config, in_this_process, monkeypatch):
    config = dataclasses.replace(config, lrs=[0.02])

    def wrong(*_, **__):
        raise ModelError("no weights to load")

    with monkeypatch.context() as patch:
        patch.setattr("hashnet.training.trainer.make_model", wrong)
        with pytest.raises(ClusterError, match=r"1 of 1 trials failed.*no weights to load"):
            sweep(config)
    assert sweep(config)["trained"] == 1


def test_a_sweep_whose_every_rate_diverges_says_so(config, in_this_process):
    config = dataclasses.replace(config, lrs=[1e30])
    for _ in range(2):  # a rate that diverges is a result: it is not tried again
        with pytest.raises(ClusterError, match=r"no trial of hashnet finished: .*learning rate"):
            sweep(config)


def test_a_sweep_and_a_comparison_rank_by_the_same_number(config, in_this_process):
    """Trials of the same settings have the same validation MAP in both."""
    config = dataclasses.replace(config, lrs=[0.02], seed=0)
    (row,) = (sweep(config), storage.read_json(f"{config.run}/sweep.json")["trials"])[1]
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    values = {name: getattr(config, name) for name in names} | {"run": f"{config.run}-compared"}
    part = PartOfComparison(CompareConfig(**values), "main", Manifest.open(config.manifest), 1000)
    cell = Cell("tune", "hashnet", 16, 0, {"lr": 0.02})
    assert run_cell(part.task(cell, validation=0.2)).validation_map == row["validation_map"]
