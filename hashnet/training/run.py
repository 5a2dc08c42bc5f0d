"""A training run on disk: RUN/{config.yaml, manifest.parquet, checkpoints/, model/}.

``prepare`` is for the one process that starts a run: it settles the data, refuses what does not fit and
says whether anything is left to do. Then ``hashnet.training.worker.train_run`` trains, in one process or in
every worker. Neither knows Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.data import Manifest, PairTable
from hashnet.errors import ConfigError, DataError, LineageMismatch
from hashnet.io import config as configs
from hashnet.io import storage
from hashnet.labels import check_pairs, count_pairs
from hashnet.run import Run
from hashnet.training.config import HOW, PUT_UP_WITH, TrainConfig

FORMAT_VERSION = 1  # of checkpoints/data.json


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train (``finished`` is None) or done (what it came to)."""

    config: TrainConfig
    manifest: Manifest
    finished: dict[str, Any] | None


def prepare(config: TrainConfig) -> Prepared:
    """Settles data and configuration of the run; raises before anything is trained.

    The configuration is written to RUN/config.yaml. One that is already there must say the same but
    for the keys about how the work is done (workers, threads, …): LineageMismatch names what differs.
    One of an attempt that failed before its first checkpoint gives way.
    """
    run = Run(config.run)
    if storage.exists(run.config):
        try:
            refuse_other_config(config, read_config(config.run))
        except LineageMismatch:
            if _has_learnt(config.run):
                raise
            for uri in (run.config, run.checkpoints):
                storage.delete(uri)
    manifest = settle_manifest(config)
    finished = finished_result(config.run)
    if finished is None:
        record_data(config.run, manifest, config.pairs)
        configs.save(config, run.config)
    # of a finished run the pairs may be gone, and nothing is left to train
    n_rows = rows_used(config, manifest) if finished is None else manifest.count("train")
    return Prepared(config.resolved(manifest.modality, n_rows), manifest, finished)


def rows_used(config: TrainConfig, manifest: Manifest) -> int:
    """How many training rows there are for an epoch: all of them, or those that the pairs name.

    Held-out ones count: a trial has as many epochs as the run that it stands for.
    """
    if config.pairs is None:
        return manifest.count("train")
    table = PairTable.open(config.pairs, manifest)
    return len(np.union1d(table.row_a, table.row_b))


def _has_learnt(run: str) -> bool:
    checkpoints = storage.list_names(Run(run).checkpoints)
    return storage.exists(Run(run).model.uri) or any(name.startswith("step-") for name in checkpoints)


def read_config(run: str) -> TrainConfig:
    """The configuration a run was trained with."""
    return configs.load(TrainConfig, Run(run).config, [f"run={run}"], saved=True)


def refuse_other_config(
    config: TrainConfig, before: TrainConfig, may_change: tuple[str, ...] = HOW + PUT_UP_WITH
) -> None:
    """LineageMismatch when a run folder is used again with settings that would train another model."""
    new, old = configs.to_dict(config), configs.to_dict(before)
    differing = [
        f"{name} was {old[name]}, now {new[name]}"
        for name in new
        if name not in may_change and new[name] != old[name]
    ]
    if differing:
        raise LineageMismatch(
            f"{config.run} was started with another configuration: {'; '.join(differing)}. Use another run "
            "folder, or the same settings to go on with it"
        )


def finished_result(run: str) -> dict[str, Any] | None:
    """What a finished run came to, None when it has no complete model yet."""
    model = Run(run).model
    if not model.exists():
        return None
    info = model.info()
    return result_of(run, info.sha256, info.summary)


def result_of(run: str, sha256: str, summary: dict[str, Any]) -> dict[str, Any]:
    """The short answer of a training job."""
    keys = ("n_bits", "variant", "backbone", "steps", "epochs", "J", "L", "quantisation", "binary_share",
            "distinct", "validation_map", "rows_per_s", "seconds", "warnings")  # fmt: skip
    chosen = {name: summary[name] for name in keys if summary.get(name) not in (None, [])}
    return {"run": run, "model": Run(run).model.uri, "sha256": sha256, **chosen}


def settle_manifest(config: TrainConfig) -> Manifest:
    """The run's own copy of its manifest, made when it is not there yet, of data that can be trained on.

    Before a run is begun, a manifest that a refused attempt left there gives way to the data given.
    """
    run = Run(config.run)
    mine = run.manifest.uri
    kept = run.manifest.open() if run.manifest.exists() else None
    given = Manifest.open(config.manifest) if config.manifest is not None else None
    begun = run.begun()
    # The run's copy may have grown since by parts appended for encoding.
    if kept is not None and given is not None and kept.parts[: len(given.parts)] == given.parts:
        manifest = kept
    elif kept is not None and given is not None and begun:
        raise LineageMismatch(
            f"{config.run} was trained on other data ({len(kept):,} rows, sha256 {kept.sha256[:12]}…) "
            f"than {config.manifest} ({len(given):,} rows, {given.sha256[:12]}…); use another run folder"
        )
    elif given is not None:
        manifest = given
    elif kept is not None and (begun or config.dataset is None):
        manifest = kept
    else:
        manifest = _embedded(config, mine)
    config.backbone_for(manifest.modality)  # refuses one that takes the other
    if finished_result(config.run) is None:
        check_data(config, manifest)
    if manifest is not given:
        return manifest
    storage.delete(mine)
    return manifest.copy_to(mine)


def _embedded(config: TrainConfig, uri: str) -> Manifest:
    """A manifest of the embedded data set, written to ``uri``."""
    if config.dataset is None:
        raise ConfigError("give the data: manifest=PATH (made by `hashnet dataset`), or dataset=digits")
    from hashnet.data import make_manifest

    options: dict[str, Any] = {"modality": config.modality} if config.dataset == "digits" else {}
    return make_manifest(config.dataset, uri, overwrite=True, **options)


def check_data(config: TrainConfig, manifest: Manifest) -> None:
    """Raises when there is nothing to learn from (no training rows, no labels, only one kind of pair) or
    nothing to measure MAP on (rows without a label, too few that are held out)."""
    n_train = manifest.count("train")
    if n_train < 2:
        raise DataError(
            f"{manifest.uri} has {n_train} training rows; make it with some (splits: {manifest.splits})"
        )
    if config.pairs is None:
        labels = manifest.labels("train")
        if labels is None:
            raise DataError(
                f"{manifest.uri} has no labels; give pairs=TABLE with similar and dissimilar pairs"
            )
        if config.validation:
            from hashnet.training.data import held_out  # and torch with it

            kept, held = held_out(n_train, config.validation)
            refuse_unlabelled(labels[held], "held-out", f"validation={config.validation}")
            labels, n_train = labels[kept], len(kept)
        check_pairs(count_pairs(labels))
    else:
        check_pairs(PairTable.open(config.pairs, manifest).counts())
    if config.map_k:
        labels = manifest.labels("query")
        if labels is None or not (len(labels) and manifest.count("database")):
            raise DataError(
                f"map_k={config.map_k} needs labelled query and database rows, and {manifest.uri} lacks "
                "them; leave map_k out"
            )
        refuse_unlabelled(labels, "query", f"map_k={config.map_k}")
    if min(config.batch_size, n_train) < config.num_workers:
        raise ConfigError(
            f"{n_train} training rows for {config.num_workers} workers: each needs at least one a batch"
        )


def refuse_unlabelled(labels: np.ndarray, which: str, why: str | None = None) -> None:
    """DataError where rows that are to ask for others have no label; ``why`` they are to."""
    without = int((~labels.any(axis=1)).sum())
    if without:
        raise DataError(
            f"{without} of {len(labels)} {which} rows have no label, so nothing can be relevant to them; "
            "label them or leave them out of the manifest" + (f", or leave {why} out" if why else "")
        )


def record_data(run: str, manifest: Manifest, pairs: str | None = None) -> None:
    """Writes down what data a run is begun on; LineageMismatch when it was begun on other data."""
    uri, kind = storage.join(Run(run).checkpoints, "data.json"), "training_data"
    now = {"manifest_sha256": manifest.sha256}
    if pairs is not None:
        now["pairs_sha256"] = storage.sha256_of(pairs)
    if not storage.exists(uri):
        storage.write_json(uri, {"kind": kind, "format_version": FORMAT_VERSION, **now})
        return
    about = {"format_version": 1, **storage.read_json(uri)}  # the first ones did not say it, nor the pairs
    storage.check_format(about, uri, kind, FORMAT_VERSION)
    for name, sha256 in now.items():
        if (before := about.get(name, sha256)) != sha256:
            which = "manifest" if name == "manifest_sha256" else "pairs table"
            raise LineageMismatch(
                f"{run} was begun on data with sha256 {before[:12]}…, its {which} now has {sha256[:12]}…; "
                "use another run folder"
            )
