"""The learning-rate sweep on a real local Ray."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest

from cluster import sweep as sweeping
from cluster.sweep import PAPER_GRID, SweepConfig, averaged, sweep, trials_of
from hashnet.data.sources import make_manifest
from hashnet.errors import ClusterError, ConfigError, LineageMismatch
from hashnet.io import config as configs
from hashnet.io import storage
from hashnet.training.config import TrainConfig


@pytest.fixture
def config(tmp_path) -> SweepConfig:
    uri = str(tmp_path / "manifest.parquet")
    make_manifest("digits", uri, modality="features", n_query=97, n_train=300)
    return SweepConfig(
        run=str(tmp_path / "sweep"), manifest=uri, n_bits=16, batch_size=100, dropout=0.0, stages=2,
        first_epochs=30, stage_epochs=2, lrs=[1e-6, 0.02, 1e30], log_every=50,
    )  # fmt: skip


def test_the_grid_is_the_papers(config):
    steps = [math.log10(b) - math.log10(a) for a, b in itertools.pairwise(PAPER_GRID)]
    assert steps == pytest.approx([0.5] * 4, abs=1e-3)
    assert (PAPER_GRID[0], PAPER_GRID[-1]) == (1e-5, 1e-3)
    wide = dataclasses.replace(config, variants=["hashnet", "dhn"], seeds=[0, 1])
    trials = trials_of(wide)
    assert len(trials) == 2 * 3 * 2
    assert len({trial.config.run for trial in trials}) == 12
    twice = dataclasses.replace(wide, variants=["hashnet", "dhn", "dhn"], seeds=[0, 1, 0])
    assert trials_of(twice) == trials
    assert {trial.config.validation for trial in trials} == {0.2}  # a part of the training set, never queries
    with pytest.raises(ConfigError, match="lrs is empty"):
        dataclasses.replace(config, lrs=[])


def test_seeds_are_averaged_and_a_failed_one_counts():
    good = {"variant": "v", "lr": 1.0, "L": 1.0, "binary_share": 1.0, "seconds": 2.0}
    rows = [
        {**good, "seed": 0, "validation_map": 0.5, "J": 1.0},
        {**good, "seed": 1, "validation_map": 0.7, "J": 2.0},
        {"variant": "v", "lr": 2.0, "seed": 0, "validation_map": None, "error": "diverged"},
    ]
    one, two = averaged(rows)
    assert (one["validation_map"], one["J"], one["seeds"]) == (pytest.approx(0.6), 1.5, 2)
    assert (two["validation_map"], two["error"]) == (None, "diverged")


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


def test_a_finished_sweep_is_not_taken_for_one_on_other_data(config, monkeypatch, tmp_path):
    monkeypatch.setattr("ray.tune.report", lambda score: None)
    config = dataclasses.replace(config, lrs=[0.02])

    def one_after_another(config, left):
        for trial in left:
            about = {"config": configs.to_dict(trial.config), "manifest": config.manifest, "cpus": 1}
            sweeping._trial(about)

    monkeypatch.setattr(sweeping, "_run_trials", one_after_another)
    assert sweep(config)["trained"] == 1
    best = storage.read_bytes(f"{config.run}/best.yaml")
    other = make_manifest("digits", str(tmp_path / "other"), modality="features", n_query=97, n_train=200)
    with pytest.raises(LineageMismatch, match="was trained on other data"):
        sweep(dataclasses.replace(config, manifest=other.uri))
    assert storage.read_bytes(f"{config.run}/best.yaml") == best


def test_a_mistake_that_can_be_mended_is_said_and_tried_again(config, monkeypatch, tmp_path):
    monkeypatch.setattr("ray.tune.report", lambda score: None)
    wrong = dataclasses.replace(config, lrs=[0.02], weights="weights.pth")  # vectors need none
    (trial,) = trials_of(wrong)
    settings = {"config": configs.to_dict(trial.config), "manifest": config.manifest, "cpus": 1}
    sweeping._trial(settings)
    with pytest.raises(ClusterError, match=r"1 of 1 trials failed.*no weights to load"):
        sweeping._refuse_failures([trial])
    assert sweeping._outcome(trial) is None
    diverging = trials_of(dataclasses.replace(config, lrs=[1e30]))[0]  # which is a result
    sweeping._trial(settings | {"config": configs.to_dict(diverging.config)})
    sweeping._refuse_failures([diverging])
    assert "learning rate" in sweeping._outcome(diverging)["error"]
