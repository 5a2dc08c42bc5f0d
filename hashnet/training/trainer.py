"""Trains a prepared run: what every worker does, which in one process without a cluster is the whole run.

from hashnet.training import TrainConfig, prepare, train_run

prepared = prepare(TrainConfig(run="runs/demo", dataset="digits"))
summary = train_run(prepared.config)
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from hashnet.data import Manifest, PairTable
from hashnet.encoding import BackboneFeatures
from hashnet.io import config as configs
from hashnet.losses import LabelSimilarity, PairwiseLoss, Similarity, TableSimilarity, make_loss
from hashnet.models import DividedBackbone, HashModel, build_model, divide, save_bundle, try_crop
from hashnet.run import Run
from hashnet.training.batches import PairSampler, Sampler, from_first, world
from hashnet.training.checkpoints import (
    HISTORY,
    Checkpoints,
    EpochRecord,
    History,
    StageRecord,
    write_history,
)
from hashnet.training.diagnostics import (
    CodeDiagnostics,
    explain_codes,
    explain_loss,
    held_out_map,
    held_out_score,
    measure_database,
    split_map,
)
from hashnet.training.frozen_backbone import (
    activations,
    adopt_head,
    backbone_features,
    features_of_run,
    head_settings,
    last_blocks,
    probe_of,
    standardise,
    train_head_first,
)
from hashnet.training.inputs import (
    ArraySource,
    InputSource,
    LabelledRows,
    check_features,
    held_out,
    open_rows,
)
from hashnet.training.loop import Callbacks, fit
from hashnet.training.neighbours import HeldOutRecall, start_from_itq
from hashnet.training.recipe_search import find_recipe
from hashnet.training.train_config import KINDS, TrainConfig

logger = logging.getLogger(__name__)
WARN_AFTER_EPOCHS, WARN_AFTER_STEPS = 3, 60  # before that, a network trained from scratch is slow, not stuck


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of a training run; without ``sha256`` it is part of the model bundle."""

    variant: str
    backbone: str | None
    n_bits: int
    steps: int
    epochs: int
    train_rows: int
    n_workers: int
    rows_per_s: float | None
    stages: list[StageRecord]
    manifest_sha256: str
    measured: CodeDiagnostics
    warnings: list[str]
    seconds: float
    validation_map: float | None = None
    validation_recall: float | None = None  # of neighbours, where these were learned from
    start_recall: float | None = None  # the same before training
    sha256: str = field(default="", compare=False)  # of the bundle

    def to_dict(self) -> dict[str, Any]:
        """The summary as a bundle's JSON holds it, with the main diagnostics at its top level."""
        values = dataclasses.asdict(self) | {"stages": [stage.to_dict() for stage in self.stages]}
        del values["sha256"]
        for name in ("validation_map", "validation_recall", "start_recall"):
            if values[name] is None:
                del values[name]
        top = ("quantisation", "binary_share", "distinct", "J", "L")
        return values | {name: getattr(self.measured, name) for name in top}


def train_run(
    config: TrainConfig,
    *,
    manifest: Manifest | None = None,
    device: str | torch.device = "cpu",
    callbacks: Callbacks | None = None,
) -> TrainingSummary | None:
    """The summary of a run that this trains and whose bundle it writes; None on all workers but the first.

    ``manifest`` None is the run's own copy; many runs on the same rows share one.
    """
    started = time.monotonic()
    run = Run(config.run)
    manifest = manifest or run.manifest.open()
    torch.manual_seed(config.seed)
    model = make_model(config, manifest)
    parts = _divided(config, model)
    kept, held = held_out(manifest.count("train"), config.validation)
    head_only = config.freeze_backbone and model.modality == "image"
    rows = open_rows(manifest, "train", model, config, train=not head_only, positions=_kept(config, kept))
    if isinstance(rows.source, ArraySource):
        check_features(rows.source)
    similarity, sampler = make_similarity(config, manifest, rows, device)
    loss = make_loss(config, similarity)
    learner, source = model, rows.source
    features = features_of_run(config, model, manifest, device)
    if head_only:
        learner, source = probe_of(model), backbone_features(features, rows.source, device)
    checkpoints = Checkpoints(run.checkpoints)
    rank, n_workers = world()
    begun = from_first(float(rank == 0 and checkpoints.newest() is not None)) > 0.5
    itq = config.start == "itq"
    labels = None if begun else rows.labels  # a resumed run has its recipe
    if config.head_epochs and model.modality == "image" and not head_only:
        frozen = None
        if not begun:
            centres = open_rows(manifest, "train", model, config, positions=_kept(config, kept))
            frozen = backbone_features(features, centres.source, device)
        alone = head_settings(config)
        recipe = find_recipe(alone, probe_of(model), frozen, labels, device)
        probe = recipe.model(probe_of(model), config.seed)
        if frozen is None:
            adopt_head(model, probe)  # its layers: their weights are in the checkpoint
        else:
            first = train_head_first(model, probe, recipe.lr, frozen, loss, alone, sampler, device)
            if first.J is not None:
                logger.info("head alone: J %.4f, L %.4f", first.J, first.L)
    elif isinstance(source, ArraySource):
        recipe = find_recipe(config, learner, source, labels, device)
        config = dataclasses.replace(config, lr=recipe.lr, hidden=recipe.hidden)
        learner = recipe.model(learner, config.seed)
        if not head_only:
            model = learner
        if config.scaling and rank == 0 and (not begun or itq):  # others get worker 0's weights
            standardise(learner, source, seed=config.seed, device=device)
    elif config.scaling and rank == 0 and not begun:
        standardise(learner, source, seed=config.seed, device=device)
    if parts is not None:
        kept_views = activations(config, model, parts, manifest, rows.source, device)
        if kept_views is not None:
            learner, source = last_blocks(model.to(device), parts), kept_views
    if itq and rank == 0:  # a resumed run is measured against its start, too
        assert isinstance(source, ArraySource)
        start_from_itq(learner, source, config.seed)
    monitor = _Monitor(
        config, model, learner, manifest, loss.guessing, device, callbacks or Callbacks(), features, head_only
    )
    score: Callable[[], float] | None = None
    recall: HeldOutRecall | None = None
    if config.validation and (config.patience or config.pairs):
        waiting = open_rows(manifest, "train", model, config, positions=held, lenient=True)
        inputs = backbone_features(features, waiting.source, device) if head_only else waiting.source
        if config.pairs is not None:
            assert isinstance(source, ArraySource)
            assert isinstance(inputs, ArraySource)
            score = recall = HeldOutRecall(learner.to(device), source, inputs, device)
        else:
            assert waiting.labels is not None
            followed = learner if head_only else model
            score = partial(_held_out_value, followed, inputs, waiting.labels, device)
    history = fit(
        learner.to(device),
        source,
        loss,
        config.make_stages(),
        config.fit_settings(),
        sampler=sampler,
        checkpoints=checkpoints,
        callbacks=Callbacks(
            monitor.callbacks.step, monitor.epoch, monitor.stage, score, keep_start=recall is not None
        ),
        yardstick=None if config.variant == "hashnet" else PairwiseLoss(similarity, config.n_bits),
    )
    if rank != 0:
        return None
    recalled = recall.settle() if recall else None
    if head_only:
        adopt_head(model, learner)
    model.eval()
    if not head_only:  # the backbone has learnt
        features = features_of_run(config, model, manifest, device, keep=False)
    measured = measure_database(config, model, manifest, history.stages[-1].beta, device, features)
    last = history.stages[-1]
    summary = TrainingSummary(
        variant=config.variant,
        backbone=config.backbone,
        n_bits=config.n_bits,
        steps=last.first_step + last.steps,
        epochs=sum(stage.epochs for stage in history.stages),
        train_rows=len(rows),
        n_workers=n_workers,
        rows_per_s=last.rows_per_s,
        stages=history.stages,
        manifest_sha256=manifest.sha256,
        measured=measured,
        warnings=_warnings(history.stages, measured, loss.guessing),
        validation_map=held_out_map(config, model, manifest, held, device, features)
        if config.validation and not recall
        else None,
        validation_recall=recalled,
        start_recall=float(recall.start.mean()) if recall else None,
        seconds=round(time.monotonic() - started, 3),
    )
    return _save(config, manifest, model, history, summary)


def _divided(config: TrainConfig, model: HashModel) -> DividedBackbone | None:
    """The last ``train_last`` blocks and what lies below, which is frozen; None where all learn, or none."""
    if config.train_last is None or model.spec.preprocess is None:
        return None
    parts = divide(model.backbone, config.train_last, model.spec.preprocess.crop)
    parts.lower.requires_grad_(False)
    return parts


def _held_out_value(
    model: HashModel, source: InputSource, labels: np.ndarray, device: str | torch.device
) -> float:
    return held_out_score(model, source, labels, device).value


def _kept(config: TrainConfig, kept: np.ndarray) -> np.ndarray | None:
    """Positions of the rows to train on; None for all."""
    return kept if config.validation else None


def _warnings(stages: list[StageRecord], measured: CodeDiagnostics, guessing: float | None) -> list[str]:
    """Warnings about the finished training, which are also logged."""
    stuck = None
    if guessing is not None:  # by the best stage: J of a few hard bits may exceed that of codes of 0
        best = min(stages, key=lambda stage: stage.J or 0.0)
        stuck = explain_loss(best.J or 0.0, best.first_step + best.steps, guessing)
    found = ([stuck] if stuck else []) + explain_codes(measured)
    for text in found:
        logger.warning("%s", text)
    return found


def _save(
    config: TrainConfig, manifest: Manifest, model: HashModel, history: History, summary: TrainingSummary
) -> TrainingSummary:
    """Writes the bundle with its history; returns the summary with the bundle's sha256."""
    target = Run(config.run).model.uri
    write_history(target, history)
    sha256 = save_bundle(
        target,
        model,
        class_names=list(manifest.class_names) if manifest.class_names else None,
        summary=summary.to_dict(),
        config=configs.to_dict(config),
        files=[HISTORY],
    )
    return dataclasses.replace(summary, sha256=sha256)


def make_model(config: TrainConfig, manifest: Manifest) -> HashModel:
    """The model that a resolved configuration describes, for this manifest's rows."""
    model = build_model(
        str(config.backbone),
        config.n_bits,
        n_features=manifest.n_features,
        hidden=config.hidden or None,
        hidden_norm=bool(config.hidden),
        weights=config.weights,
        download=config.download,
        dropout=float(config.dropout or 0),
        noise=KINDS["features"].noise if config.noise is None else config.noise,
        resize=config.resize,
        crop=config.crop,
        flip=config.flip,
        min_area=config.min_area,
        average_flip=config.average_flip or None,
        head=config.method.head,
    )
    if config.crop is not None and manifest.modality == "image":
        try_crop(str(config.backbone), model.backbone, config.crop)  # now, while it can still be changed
    return model


def make_similarity(
    config: TrainConfig, manifest: Manifest, rows: LabelledRows, device: str | torch.device
) -> tuple[Similarity, Sampler | None]:
    """Similarity of the training rows: by labels, or by the pairs table, with a sampler of its pairs."""
    if config.pairs is None:
        assert rows.labels is not None
        return LabelSimilarity(rows.labels, device), None
    table = PairTable.open(config.pairs, manifest)
    if config.validation:
        table = table.among(rows.row_ids)
    a, b = (np.searchsorted(rows.row_ids, ids) for ids in (table.row_a, table.row_b))
    complete = table.n_rows is not None  # batches around similar pairs hold dissimilar ones in plenty
    uncertain = table.uncertain if complete else None
    similarity = TableSimilarity(a, b, table.similar, len(rows), device, uncertain)
    some = table.similar if complete else slice(None)
    return similarity, PairSampler(a[some], b[some], config.batch_size, config.seed)


class _Monitor:
    """Follows training: a warning when nothing is learnt, MAP after each stage, the caller's callbacks."""

    def __init__(
        self,
        config: TrainConfig,
        model: HashModel,
        learner: HashModel,
        manifest: Manifest,
        guessing: float | None,
        device: str | torch.device,
        callbacks: Callbacks,
        features: BackboneFeatures | None,
        head_only: bool,
    ) -> None:
        self.features, self.head_only = features, head_only
        self.config, self.model, self.learner, self.manifest = config, model, learner, manifest
        self.guessing, self.device, self.callbacks = guessing, device, callbacks
        self.loss_checked = False

    def epoch(self, record: EpochRecord) -> None:
        due = record.epoch >= WARN_AFTER_EPOCHS and record.step >= WARN_AFTER_STEPS
        if due and not self.loss_checked and world()[0] == 0 and self.guessing is not None:
            self.loss_checked = True
            text = explain_loss(record.J, record.step, self.guessing)
            if text:
                logger.warning("%s", text)
        if self.callbacks.epoch:
            self.callbacks.epoch(record)

    def stage(self, record: StageRecord) -> None:
        if self.config.map_k and world()[0] == 0:
            features = self.features
            if self.head_only:
                adopt_head(self.model, self.learner)
            else:  # the backbone learns
                features = features_of_run(self.config, self.model, self.manifest, self.device, keep=False)
            record.map = split_map(self.config, self.model, self.manifest, self.device, features)
        if self.callbacks.stage:
            self.callbacks.stage(record)
