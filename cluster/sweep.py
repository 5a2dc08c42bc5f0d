"""Choose a learning rate on Ray Tune, by MAP on a part of the training set that is held out. Queries are
never looked at.

Each trial is a training run of its own in SWEEP/trials, so a sweep that is started again goes on
where it was: finished trials are read, begun ones go on from their checkpoint. More values may be
added to the grid later.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.runtime import Need, capacity, connection
from cluster.train import worker_resources
from hashnet.data import Manifest
from hashnet.errors import ClusterError, ConfigError, Diverged, HashnetError
from hashnet.io import Progress, key, storage
from hashnet.io import config as configs
from hashnet.models import bundle_info
from hashnet.training import (
    CHECKPOINTS,
    CONFIG,
    HOW,
    MANIFEST,
    MODEL,
    VARIANTS,
    TrainConfig,
    finished_result,
    read_config,
    record_data,
    refuse_other_config,
    settle_manifest,
)

logger = logging.getLogger(__name__)
PAPER_GRID = [1e-5, 3.16e-5, 1e-4, 3.16e-4, 1e-3]  # 1e-5 … 1e-3 in factors of sqrt(10)
FAILED = "failed.json"
LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """A TrainConfig whose lr, variant and seed come from lists."""

    lrs: list[float] = key(PAPER_GRID, "learning rates to try", low=0)
    variants: list[str] = key(
        [], "variants to try each rate with (empty: the one in `variant`)", choices=tuple(VARIANTS)
    )
    seeds: list[int] = key([], "seeds to average over (empty: the one in `seed`)", low=0)
    validation: float = key(0.2, "share of the training rows that the MAP is measured on", low=0.01, high=0.9)
    max_concurrent: int = key(0, "trials at once; 0: as many as the cluster holds", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lrs:
            raise ConfigError("lrs is empty: there is nothing to try")


@dataclass(frozen=True)
class Trial:
    """One point of the grid and the run it is trained in."""

    variant: str
    lr: float
    seed: int
    config: TrainConfig


def trials_of(config: SweepConfig) -> list[Trial]:
    """Every point of the grid, in a fixed order."""
    base = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    found = []
    for variant in dict.fromkeys(config.variants or [config.variant]):
        for lr in sorted(set(config.lrs)):
            for seed in dict.fromkeys(config.seeds or [config.seed]):
                folder = storage.join(config.run, "trials", f"{variant}-lr{lr:g}-seed{seed}")
                changed = {"run": folder, "variant": variant, "lr": lr, "seed": seed}
                one = TrainConfig(**{**base, **changed, "num_workers": 1, "min_workers": None})
                found.append(Trial(variant, lr, seed, one))
    return found


def sweep(config: SweepConfig) -> dict[str, Any]:
    """Trains every trial that is not done yet, prints the table, writes the winning configurations."""
    trials = trials_of(config)
    left = [trial for trial in trials if _outcome(trial) is None]
    manifest = settle_manifest(config)
    record_data(config.run, manifest)
    if left:
        _run_trials(config, left)
        _refuse_failures(left)
    rows = [{"variant": t.variant, "lr": t.lr, "seed": t.seed, **(_outcome(t) or {})} for t in trials]
    table = averaged(rows)
    logger.info("%s", as_text(table))
    best = {}
    for variant in dict.fromkeys(row["variant"] for row in table):
        mine = [row for row in table if row["variant"] == variant]
        winner = max(mine, key=lambda row: _score(row["validation_map"]))
        if winner["validation_map"] is None:
            raise ClusterError(f"no trial of {variant} came to an end; the table above says why")
        best[variant] = winner
        _note_edge(winner, [row["lr"] for row in mine])
        _write_best(config, winner, storage.join(config.run, f"best-{variant}.yaml"))
    overall = max(best.values(), key=lambda row: row["validation_map"])
    target = storage.join(config.run, "best.yaml")
    _write_best(config, overall, target)
    settings = {name: {str(config.n_bits): {"lr": row["lr"]}} for name, row in best.items()}
    tuned = {"kind": "tuned", "format_version": 1, "settings": settings}
    storage.write_json(storage.join(config.run, "tuned.json"), tuned)  # settings= of jobs/compare.py
    storage.write_json(
        storage.join(config.run, "sweep.json"),
        {"kind": "sweep", "format_version": 1, "trials": rows, "table": table, "best": best},
    )
    return {"run": config.run, "trials": len(trials), "trained": len(left), "best": overall, "config": target}


def _run_trials(config: SweepConfig, left: list[Trial]) -> None:
    connection.connect()
    from ray import tune
    from ray.tune import FailureConfig, RunConfig, TuneConfig, Tuner

    resources = worker_resources(
        dataclasses.replace(left[0].config, cpus_per_worker=config.cpus_per_worker or 1)
    )
    n = min(len(left), config.max_concurrent or len(left))
    capacity.require("sweep", [Need("trial", n, resources, at_least=1, fix="lower cpus_per_worker")])
    filesystem, path = storage.resolve(storage.join(config.run, "tune"))
    storage.make_folder(storage.join(config.run, "tune"))
    tuner = Tuner(
        tune.with_resources(_trial, resources),
        param_space={
            "config": tune.grid_search([configs.to_dict(trial.config) for trial in left]),
            "manifest": storage.join(config.run, MANIFEST),
            "cpus": resources["CPU"],
        },
        tune_config=TuneConfig(max_concurrent_trials=config.max_concurrent or None),
        run_config=RunConfig(
            name="sweep",
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=config.max_failures),
            verbose=0,
        ),
    )
    with _counted(left):
        grid = tuner.fit()
    storage.delete(storage.join(config.run, "tune"))
    for error in grid.errors:
        raise ClusterError(f"a trial failed: {error}") from error


@contextmanager
def _counted(trials: list[Trial]) -> Iterator[None]:
    """Says meanwhile how many of the trials have ended, as their folders show it."""
    over = threading.Event()

    def watch() -> None:
        with Progress(len(trials), "trials", "sweep") as progress:
            last_look = False
            while not last_look:
                last_look = over.wait(LOOK_EVERY_S)
                ended = sum(_ended(trial) for trial in trials)
                progress.update(ended - progress.done)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _ended(trial: Trial) -> bool:
    run = trial.config.run
    return storage.exists(storage.join(run, FAILED)) or finished_result(run) is not None


def _trial(settings: dict[str, Any]) -> None:
    """One trial: a run trained in this process. A loss that diverges is a result; other mistakes are kept
    for ``_refuse_failures`` to say."""
    import torch
    from ray import tune

    from hashnet.training import train_run

    logging.getLogger("hashnet").setLevel(logging.ERROR)  # a bad rate's warnings are in the table
    torch.set_num_threads(max(1, int(settings["cpus"])))
    config = configs.from_dict(TrainConfig, settings["config"])
    manifest = Manifest.open(settings["manifest"])
    configs.save(config, storage.join(config.run, CONFIG))
    storage.delete(storage.join(config.run, FAILED))
    try:
        resolved = config.resolved(manifest.modality, manifest.count("train"))
        done = train_run(resolved, manifest=manifest, device="cuda" if torch.cuda.is_available() else "cpu")
        storage.delete(storage.join(config.run, CHECKPOINTS))
        score = {"validation_map": done["validation_map"]}
    except HashnetError as error:
        about = {"kind": "error", "message": str(error), "diverged": isinstance(error, Diverged)}
        storage.write_json(storage.join(config.run, FAILED), about)
        score = {"validation_map": 0.0}
    tune.report(score)


def _outcome(trial: Trial) -> dict[str, Any] | None:
    """What a trial came to, None when it is not done. A trial of another configuration is refused."""
    run = trial.config.run
    if storage.exists(storage.join(run, CONFIG)):
        refuse_other_config(trial.config, read_config(run))
    failed = _failure(trial)
    if failed and failed.get("diverged"):
        return {"validation_map": None, "error": failed["message"]}
    if failed or finished_result(run) is None:
        return None
    summary = bundle_info(storage.join(run, MODEL)).summary
    names = ("validation_map", "J", "L", "binary_share", "epochs", "seconds")
    return {name: summary.get(name) for name in names}


def _failure(trial: Trial) -> dict[str, Any] | None:
    """Why a trial came to nothing: its rate was too high, or something that can be mended."""
    where = storage.join(trial.config.run, FAILED)
    return storage.read_json(where) if storage.exists(where) else None


def _refuse_failures(trials: list[Trial]) -> None:
    """ClusterError when a trial failed for another reason than its rate; it is tried again next time."""
    found = [failed for trial in trials if (failed := _failure(trial)) and not failed.get("diverged")]
    if found:
        raise ClusterError(
            f"{len(found)} of {len(trials)} trials failed; the others are kept. {found[0]['message']}"
        )


def averaged(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each (variant, lr): the mean over seeds, None where a seed failed."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["variant"], row["lr"]), []).append(row)
    table = []
    for (variant, lr), group in groups.items():
        one: dict[str, Any] = {"variant": variant, "lr": lr, "seeds": len(group)}
        for name in ("validation_map", "J", "L", "binary_share", "seconds"):
            values = [row.get(name) for row in group]
            one[name] = None if None in values else math.fsum(values) / len(values)
        errors = [row["error"] for row in group if row.get("error")]
        table.append(one | ({"error": errors[0]} if errors else {}))
    return table


def as_text(table: list[dict[str, Any]]) -> str:
    """The table for people, best first."""
    lines = [
        f"{'variant':<12} {'lr':>9} {'seeds':>5} {'validation MAP':>14} {'J':>7} {'L':>7} {'|g|>.99':>8}"
    ]
    for row in sorted(table, key=lambda row: (row["variant"], -_score(row["validation_map"]))):
        cells = "".join(
            f" {'-' if row[name] is None else format(row[name], '.4f'):>{width}}"
            for name, width in (("validation_map", 14), ("J", 7), ("L", 7), ("binary_share", 8))
        )
        head = f"{row['variant']:<12} {row['lr']:>9.3g} {row['seeds']:>5}"
        lines.append(f"{head}{cells}  {row.get('error', '')}".rstrip())
    return "\n".join(lines)


def _score(value: float | None) -> float:
    return -1.0 if value is None else value


def _note_edge(winner: dict[str, Any], lrs: list[float]) -> None:
    if len(lrs) > 1 and winner["lr"] in (min(lrs), max(lrs)):
        further = winner["lr"] * (math.sqrt(10) if winner["lr"] == max(lrs) else 1 / math.sqrt(10))
        logger.warning(
            "the best rate of %s, %g, is at the edge of the grid: try lrs=…,%.3g, too",
            winner["variant"], winner["lr"], further,
        )  # fmt: skip


def _write_best(config: SweepConfig, winner: dict[str, Any], uri: str) -> None:
    """The winner as a configuration for jobs/train.py, which then trains on all rows."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig) if f.name not in HOW}
    values |= {"variant": winner["variant"], "lr": winner["lr"], "validation": 0.0}
    if config.manifest is not None:
        values["manifest"] = config.manifest
    storage.write_bytes(uri, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())
