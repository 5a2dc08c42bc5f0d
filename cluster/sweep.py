"""Choose a learning rate by validation MAP, on training rows that are held out. Queries are never used.

Each trial is a training run of its own in SWEEP/trials, so a sweep that is started again resumes: finished
trials are read, interrupted ones continue from their checkpoint. More values may be added to the grid later.
Trials run and are ranked as those of a comparison's ``tune=true``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.compare import CellResources, CellRunner
from cluster.runtime import connection
from hashnet.comparison import (
    Cell,
    CellResult,
    CellTask,
    SettingsScore,
    TunedSettings,
    finished_cell,
    mean_over_seeds,
)
from hashnet.data import Manifest
from hashnet.errors import ClusterError, ConfigError
from hashnet.io import key, storage
from hashnet.losses import METHODS
from hashnet.metrics import validation_k
from hashnet.run import Run
from hashnet.training import (
    EXECUTION_KEYS,
    TrainConfig,
    prepare_manifest,
    read_config,
    record_data,
    refuse_other_config,
)

logger = logging.getLogger(__name__)
PAPER_GRID = [1e-5, 3.16e-5, 1e-4, 3.16e-4, 1e-3]  # 1e-5 … 1e-3 in factors of sqrt(10)


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """A TrainConfig whose lr, variant and seed come from lists."""

    lrs: list[float] = key(PAPER_GRID, "learning rates to try", low=0)
    variants: list[str] | None = key(
        None, "variants to try each rate with; none: the one in `variant`", choices=tuple(METHODS)
    )
    seeds: list[int] | None = key(None, "seeds to average over; none: the one in `seed`", low=0)
    validation: float = key(0.2, "share of the training rows that the MAP is measured on", low=0.01, high=0.9)
    max_concurrent: int | None = key(None, "trials at once; none: as many as the cluster holds", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lrs:
            raise ConfigError("lrs is empty: there is nothing to try")


def trial_configs(config: SweepConfig) -> list[TrainConfig]:
    """The training configuration of every point of the grid, in a fixed order, each with a run of its own."""
    base = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    found = []
    for variant in dict.fromkeys(config.variants or [config.variant]):
        for lr in sorted(set(config.lrs)):
            for seed in dict.fromkeys(config.seeds or [config.seed]):
                folder = Run(config.run).trial(f"{variant}-lr{lr:g}-seed{seed}")
                changed = {"run": folder, "variant": variant, "lr": lr, "seed": seed}
                found.append(TrainConfig(**{**base, **changed, "num_workers": 1, "min_workers": None}))
    return found


def sweep(config: SweepConfig) -> dict[str, Any]:
    """Trains every trial that is not finished, logs the table and writes the winning configurations."""
    grid = trial_configs(config)
    for trial in grid:
        if storage.exists(Run(trial.run).config):
            refuse_other_config(trial, read_config(trial.run))
    manifest = prepare_manifest(config)
    record_data(config.run, manifest)
    tasks = [trial_task(trial, manifest) for trial in grid]
    n_left = sum(finished_cell(task) is None for task in tasks)
    if n_left:
        connection.connect()
    results = _runner(config).run(tasks)
    scores = mean_over_seeds(results)
    logger.info("%s", as_text(scores))
    best = {variant: _best(scores, variant) for variant in dict.fromkeys(score.method for score in scores)}
    for variant, score in best.items():
        _warn_at_edge(score, config.lrs)
        _write_config(config, score, Run(config.run).best(variant))
    overall = max(best.values(), key=lambda score: score.rank)
    target = Run(config.run).best()
    _write_config(config, overall, target)
    TunedSettings.choose(scores).save(Run(config.run).tuned)  # settings= of jobs/compare.py
    storage.write_json(
        Run(config.run).sweep,
        {
            "kind": "sweep",
            "format_version": 1,
            "trials": [_trial_row(result) for result in results],
            "table": [_score_row(score) for score in scores],
            "best": {variant: _score_row(score) for variant, score in best.items()},
        },
    )
    return {
        "run": config.run,
        "trials": len(grid),
        "trained": n_left,
        "best": _score_row(overall),
        "config": target,
    }


def trial_task(trial: TrainConfig, manifest: Manifest) -> CellTask:
    """The trial as a cell: its settings are the learning rate."""
    cell = Cell("tune", trial.variant, trial.n_bits, trial.seed, {"lr": trial.lr})
    k = validation_k(round(trial.validation * manifest.count("train")))
    return CellTask(cell, trial.run, manifest.uri, manifest.sha256, k, trial, trial.validation)


def _runner(config: SweepConfig) -> CellRunner:
    resources = CellResources(
        cpus=config.cpus_per_worker or 1,
        device=config.device,
        max_concurrent=config.max_concurrent,
        max_retries=config.max_failures,
        fix="lower cpus_per_worker",
    )
    return CellRunner("sweep", resources, unit="trials")


def _best(scores: list[SettingsScore], variant: str) -> SettingsScore:
    """The variant's score with the highest validation MAP; ClusterError when every rate diverged."""
    best = max((score for score in scores if score.method == variant), key=lambda score: score.rank)
    if best.validation_map is None:
        raise ClusterError(f"no trial of {variant} finished: {best.error}; try lower learning rates")
    return best


def _trial_row(result: CellResult) -> dict[str, Any]:
    """A trial as in sweep.json."""
    made, training = result.made_from, result.training
    row: dict[str, Any] = {"variant": made.method, "lr": made.settings["lr"], "seed": made.seed}
    row["validation_map"] = result.validation_map
    if training is not None:
        row |= {name: getattr(training, name) for name in ("J", "L", "binary_share", "epochs", "seconds")}
    return row | ({"error": result.error} if result.error else {})


def _score_row(score: SettingsScore) -> dict[str, Any]:
    """A line of the table as in sweep.json."""
    row: dict[str, Any] = {"variant": score.method, "lr": score.settings["lr"], "seeds": score.n_seeds}
    row |= {name: getattr(score, name) for name in ("validation_map", "J", "L", "binary_share", "seconds")}
    return row | ({"error": score.error} if score.error else {})


def as_text(scores: list[SettingsScore]) -> str:
    """The table for people, best first."""
    lines = [
        f"{'variant':<12} {'lr':>9} {'seeds':>5} {'validation MAP':>14} {'J':>7} {'L':>7} {'|g|>.99':>8}"
    ]
    for score in sorted(scores, key=lambda score: (score.method, -score.rank)):
        values = (score.validation_map, score.J, score.L, score.binary_share)
        cells = "".join(
            f" {'-' if value is None else format(value, '.4f'):>{width}}"
            for value, width in zip(values, (14, 7, 7, 8), strict=True)
        )
        head = f"{score.method:<12} {score.settings['lr']:>9.3g} {score.n_seeds:>5}"
        lines.append(f"{head}{cells}  {score.error or ''}".rstrip())
    return "\n".join(lines)


def _warn_at_edge(best: SettingsScore, lrs: list[float]) -> None:
    lr = best.settings["lr"]
    if len(lrs) > 1 and lr in (min(lrs), max(lrs)):
        further = lr * (math.sqrt(10) if lr == max(lrs) else 1 / math.sqrt(10))
        logger.warning(
            "the best rate of %s, %g, is at the edge of the grid: also try lrs=…,%.3g",
            best.method, lr, further,
        )  # fmt: skip


def _write_config(config: SweepConfig, best: SettingsScore, uri: str) -> None:
    """The best settings as a configuration for jobs/train.py, which then trains on all rows."""
    values = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(TrainConfig)
        if f.name not in EXECUTION_KEYS
    }
    values |= {"variant": best.method, "lr": best.settings["lr"], "validation": 0.0}
    if config.manifest is not None:
        values["manifest"] = config.manifest
    storage.write_bytes(uri, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())
