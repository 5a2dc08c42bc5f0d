"""Preparing a training run on disk: RUN/{config.yaml, manifest.parquet, checkpoints/, model/}.

The process that starts a run calls ``prepare``: it copies the manifest, checks data and configuration and
finds out whether anything is left to do. Then ``train_run`` trains, in one process or in every worker.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hashnet.data import (
    NEAREST,
    NEIGHBOURS,
    Manifest,
    PairTable,
    lists_neighbours,
    nearest_rows,
    neighbour_pairs,
)
from hashnet.errors import ConfigError, DataError, LineageMismatch
from hashnet.io import config as configs
from hashnet.io import read_sealed, storage, write_sealed
from hashnet.labels import check_pairs, count_pairs
from hashnet.losses import AUTO, variant_for
from hashnet.run import Run
from hashnet.training.train_config import EXECUTION_KEYS, MEASUREMENT_KEYS, TrainConfig

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # of checkpoints/data.json
HELD_OUT, PATIENCE = 0.1, 5  # learning from neighbours stops when held-out rows gain no more
# What ``learn_from_neighbours`` derives from pairs=neighbours.
FOLLOW_PAIRS = ("backbone", "weights", "freeze_backbone", "class_weights", "start", "validation", "patience")
C = TypeVar("C", bound=TrainConfig)
Nearest = Callable[[np.ndarray], np.ndarray]  # vectors (n, d) → rows of the nearest, int64 (n, m)


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to train (``finished`` is None) or finished (its result)."""

    config: TrainConfig
    manifest: Manifest
    finished: dict[str, Any] | None


def prepare(config: TrainConfig, nearest: Nearest | None = None) -> PreparedRun:
    """The run with its manifest copied and its configuration resolved; raises before anything is trained.

    ``nearest`` finds the neighbours of many vectors, where this process should not do it itself.

    The configuration is written to RUN/config.yaml. One that is already there must be the same except for
    keys about how the work is done (workers, threads, …): LineageMismatch names the differences. One of an
    attempt that failed before its first checkpoint is replaced.
    """
    run = Run(config.run)
    config = learn_from_neighbours(config)
    if storage.exists(run.config):
        try:
            refuse_other_config(config, read_config(config.run))
        except LineageMismatch:
            if _has_learnt(run):
                raise
            storage.delete(run.config)
            storage.delete(run.checkpoints)
    manifest = prepare_manifest(config, nearest)
    finished = finished_result(config.run)
    if finished is None:
        record_data(config.run, manifest, config.pairs)
        configs.save(config, run.config)
    # the pairs of a finished run may be gone, and there is nothing left to train
    n_rows = rows_used(config, manifest) if finished is None else manifest.count("train")
    chosen = choose_variant(config, manifest).resolved(manifest.modality, n_rows)
    return PreparedRun(chosen, manifest, finished)


def learn_from_neighbours(config: TrainConfig, manifest: Manifest | None = None) -> TrainConfig:
    """The configuration with what ``pairs=neighbours`` means written out; any other one as it is.

    ``variant=auto`` learns from neighbours where there is no label. Batches are built around similar pairs,
    whose share is then the batch's, not the training set's: weights come from the batch.
    """
    if config.pairs is None and config.variant != AUTO:
        return config
    manifest = manifest or _manifest_of(config)
    if config.pairs is None and manifest is not None and manifest.n_classes is None:
        log.info("there are no labels: learning from neighbours in the embedding (pairs=neighbours)")
        config = dataclasses.replace(config, pairs=NEIGHBOURS)
    if config.pairs is None or not (config.pairs == NEIGHBOURS or lists_neighbours(config.pairs)):
        return config
    if config.pairs == NEIGHBOURS:
        config = dataclasses.replace(config, pairs=Run(config.run).pairs)
    if (config.modality if manifest is None else manifest.modality) == "image":
        config = frozen_pretrained(config)
    return dataclasses.replace(
        config,
        class_weights=config.class_weights or "batch",
        start=config.start or ("random" if config.hidden else "itq"),
        validation=config.validation or HELD_OUT,
        patience=config.patience or PATIENCE,
    )


def _manifest_of(config: TrainConfig) -> Manifest | None:
    """The manifest that is given, or the run's; None for an embedded data set that is not written yet."""
    kept = Run(config.run).manifest
    if config.manifest is not None:
        return Manifest.open(config.manifest)
    return kept.open() if kept.exists() else None


def frozen_pretrained(config: C) -> C:
    """The configuration for pictures without labels, whose neighbours are those of a trained network.

    Without a backbone it is lite0 with its installed weights. One without trained weights is refused.
    """
    if config.backbone is None:
        config = dataclasses.replace(config, backbone="lite0", weights="pretrained")
    if config.weights == "random":
        raise ConfigError(
            f"neighbours of pictures are those of a trained network, and backbone={config.backbone} has "
            "random weights; use weights=pretrained, for example with backbone=lite0"
        )
    return dataclasses.replace(config, freeze_backbone=True)


def choose_variant(config: TrainConfig, manifest: Manifest) -> TrainConfig:
    """The configuration with ``variant=auto`` replaced by what suits the training rows."""
    if config.variant != AUTO:
        return config
    labels = manifest.labels("train") if config.pairs is None else None
    return dataclasses.replace(config, variant=variant_for(labels))


def rows_used(config: TrainConfig, manifest: Manifest) -> int:
    """The number of training rows per epoch: all of them, or those in the pairs table.

    Held-out rows count: a trial has as many epochs as the run it is made for.
    """
    if config.pairs is None:
        return manifest.count("train")
    table = PairTable.open(config.pairs, manifest)
    return len(np.union1d(table.row_a, table.row_b))


def _has_learnt(run: Run) -> bool:
    checkpoints = storage.list_names(run.checkpoints)
    return storage.exists(run.model.uri) or any(name.startswith("step-") for name in checkpoints)


def read_config(run: str) -> TrainConfig:
    """The configuration a run was trained with."""
    return configs.load(TrainConfig, Run(run).config, [f"run={run}"], saved=True)


def refuse_other_config(
    config: TrainConfig, before: TrainConfig, may_change: tuple[str, ...] = EXECUTION_KEYS + MEASUREMENT_KEYS
) -> None:
    """LineageMismatch when a run folder is used again with settings that would train another model."""
    new, old = configs.to_dict(config), configs.to_dict(before)
    differing = {name for name in new if name not in may_change and new[name] != old[name]}
    if "variant" in differing and AUTO in (new["variant"], old["variant"]):
        differing -= {"pairs", *FOLLOW_PAIRS}  # nobody gave them
    elif "pairs" in differing:
        differing -= set(FOLLOW_PAIRS)
    if differing:
        listed = "; ".join(f"{name} was {old[name]}, now {new[name]}" for name in new if name in differing)
        raise LineageMismatch(
            f"{config.run} was started with another configuration: {listed}. Use another run "
            "folder, or the same settings to continue it"
        )


def finished_result(run: str) -> dict[str, Any] | None:
    """The result of a finished run; None when it has no complete model yet."""
    model = Run(run).model
    if not model.exists():
        return None
    info = model.info()
    return result_of(run, info.sha256, info.summary)


def result_of(run: str, sha256: str, summary: dict[str, Any]) -> dict[str, Any]:
    """The result of a training job, as it prints it: the short form of the bundle's summary."""
    keys = ("n_bits", "variant", "backbone", "steps", "epochs", "J", "L", "quantisation", "binary_share",
            "distinct", "validation_map", "start_recall", "validation_recall", "rows_per_s", "seconds",
            "warnings")  # fmt: skip
    chosen = {name: summary[name] for name in keys if summary.get(name) not in (None, [])}
    return {"run": run, "model": Run(run).model.uri, "sha256": sha256, **chosen}


def prepare_manifest(config: TrainConfig, nearest: Nearest | None = None) -> Manifest:
    """The run's own copy of its manifest, made if it is missing, after a check that it can be trained on.

    Before a run has begun, a copy that a refused attempt left behind is replaced.
    """
    run = Run(config.run)
    kept = run.manifest.open() if run.manifest.exists() else None
    given = Manifest.open(config.manifest) if config.manifest is not None else None
    begun = run.begun()
    # The run's copy may have grown by parts that were appended for encoding.
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
        manifest = _embedded(config, run.manifest.uri)
    config.backbone_for(manifest.modality)  # raises when the backbone takes the other modality
    if finished_result(config.run) is None:
        check_data(config, manifest, nearest)
    if manifest is not given:
        return manifest
    storage.delete(run.manifest.uri)
    return manifest.copy_to(run.manifest.uri)


def _embedded(config: TrainConfig, uri: str) -> Manifest:
    """A manifest of the embedded data set, written to ``uri``."""
    if config.dataset is None:
        raise ConfigError(
            "there is no data: give manifest=PATH (made by `hashnet dataset`) or dataset=digits"
        )
    from hashnet.data import make_manifest

    options: dict[str, Any] = {"modality": config.modality} if config.dataset == "digits" else {}
    return make_manifest(config.dataset, uri, overwrite=True, **options)


def write_neighbours(
    uri: str,
    config: TrainConfig,
    manifest: Manifest,
    nearest: Nearest | None = None,
    k: int = NEAREST,
) -> PairTable:
    """Writes the pairs table of the training rows' neighbours, with its lineage."""
    from hashnet.training.neighbours import embedding  # imports torch

    log.info("finding the neighbours of %s training rows", f"{manifest.count('train'):,}")
    resolved = config.resolved(manifest.modality, manifest.count("train"))
    row_ids, vectors = embedding(resolved, manifest)
    near = nearest(vectors) if nearest is not None else nearest_rows(vectors, 0, len(vectors), k)
    pairs = neighbour_pairs(vectors, row_ids, k, near=near)
    lineage = {"made_by": NEIGHBOURS, "manifest_sha256": manifest.sha256, "split": "train", "k": k}
    if manifest.modality == "image":
        lineage |= {"backbone": resolved.backbone, "weights": resolved.weights}
    pairs.save(uri, lineage)
    return pairs


def check_data(config: TrainConfig, manifest: Manifest, nearest: Nearest | None = None) -> None:
    """Raises when there is nothing to learn from (no training rows, no labels, only one kind of pair) or
    nothing to measure MAP on (rows without a label, too few held-out rows)."""
    n_train = manifest.count("train")
    if n_train < 2:
        raise DataError(
            f"{manifest.uri} has {n_train} training rows; make it with some (splits: {manifest.splits})"
        )
    if config.pairs is None:
        labels = manifest.labels("train")
        if labels is None:
            raise DataError(
                f"{manifest.uri} has no labels; use variant=auto or pairs=neighbours, or pairs=TABLE with "
                "similar and dissimilar pairs"
            )
        if config.validation:
            from hashnet.training.inputs import held_out  # imports torch

            kept, held = held_out(n_train, config.validation)
            refuse_unlabelled(labels[held], "held-out", f"validation={config.validation}")
            labels, n_train = labels[kept], len(kept)
        check_pairs(count_pairs(labels))
    else:
        run = Run(config.run)
        if config.pairs == run.pairs and not (storage.exists(run.pairs) and run.begun()):
            write_neighbours(run.pairs, config, manifest, nearest)
        table = PairTable.open(config.pairs, manifest)
        check_pairs(table.counts())
        if config.validation and table.n_rows is None:
            raise ConfigError("validation needs labels; a pairs table has none (leave validation out)")
    if config.map_k:
        labels = manifest.labels("query")
        if labels is None or not (len(labels) and manifest.count("database")):
            raise DataError(
                f"map_k={config.map_k} needs labelled query and database rows, and {manifest.uri} lacks "
                "them; leave map_k out"
            )
        refuse_unlabelled(labels, "query", f"map_k={config.map_k}")
    if min(config.batch_size, n_train) < config.num_workers:
        raise DataError(
            f"{n_train} training rows for {config.num_workers} workers: each needs at least one row per batch"
        )


def refuse_unlabelled(labels: np.ndarray, which: str, why: str | None = None) -> None:
    """DataError where rows used as queries have no label; ``why`` is the setting that uses them."""
    without = int((~labels.any(axis=1)).sum())
    if without:
        raise DataError(
            f"{without} of {len(labels)} {which} rows have no label, so nothing can be relevant to them; "
            "label them or leave them out of the manifest" + (f", or leave {why} out" if why else "")
        )


def record_data(run: str, manifest: Manifest, pairs: str | None = None) -> None:
    """Records the data that a run starts on; LineageMismatch when it was started on other data."""
    uri, kind = storage.join(Run(run).checkpoints, "data.json"), "training_data"
    now = {"manifest_sha256": manifest.sha256}
    if pairs is not None:
        now["pairs_sha256"] = storage.sha256_of(pairs)
    if not storage.exists(uri):
        write_sealed(uri, kind, FORMAT_VERSION, now)
        return
    about = read_sealed(uri, kind, FORMAT_VERSION, "use another run folder")
    for name, sha256 in now.items():
        if (before := about.get(name, sha256)) != sha256:
            which = "manifest" if name == "manifest_sha256" else "pairs table"
            raise LineageMismatch(
                f"{run} was started on data with sha256 {before[:12]}…, its {which} now has {sha256[:12]}…; "
                "use another run folder"
            )
