"""What every worker of a training run does; also the whole run, in one process without a cluster.

from hashnet.run import Run
from hashnet.training.config import TrainConfig
from hashnet.training.run import prepare
from hashnet.training.worker import train_run

prepared = prepare(TrainConfig(run="runs/demo", dataset="digits"))
summary = train_run(prepared.config)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from hashnet.data import Manifest
from hashnet.io import config as configs
from hashnet.models import HashModel, save_bundle
from hashnet.run import Run
from hashnet.training.assemble import make_loss, make_model, make_similarity
from hashnet.training.checkpoints import Checkpoints
from hashnet.training.collapse import explain_codes, explain_loss
from hashnet.training.config import TrainConfig
from hashnet.training.data import held_out, open_rows
from hashnet.training.feature_scaling import standardise
from hashnet.training.frozen import adopt, backbone_features, probe_of, train_head_first
from hashnet.training.gather import from_first, world
from hashnet.training.history import write_history
from hashnet.training.loop import Record, fit
from hashnet.training.outcome import final_figures, split_map, validation_map

logger = logging.getLogger(__name__)
WARN_AFTER_EPOCHS, WARN_AFTER_STEPS = 3, 60  # sooner, a network that starts from nothing is slow, not stuck
Callback = Callable[[Record], None]


def train_run(
    config: TrainConfig,
    *,
    manifest: Manifest | None = None,
    device: str | torch.device = "cpu",
    on_step: Callback | None = None,
    on_epoch: Callback | None = None,
    on_stage: Callback | None = None,
) -> dict[str, Any]:
    """Trains a prepared run and returns its summary with the bundle's ``sha256`` (worker 0; {} elsewhere).

    ``manifest`` is the run's own copy unless another is given, as for many runs on the same rows.
    """
    started = time.monotonic()
    rank, n_workers = world()
    manifest = manifest or Run(config.run).manifest.open()
    torch.manual_seed(config.seed)
    model = make_model(config, manifest)
    kept, held = held_out(manifest.count("train"), config.validation)
    probing = config.freeze_backbone and model.modality == "image"
    rows = open_rows(
        manifest, "train", model, config, train=not probing, positions=kept if config.validation else None
    )
    similarity, sampler = make_similarity(config, manifest, rows, device)
    loss = make_loss(config, similarity)
    learner, source = model, rows.source
    if probing:
        learner, source = probe_of(model), backbone_features(model, rows.source, device)
    checkpoints = Checkpoints(Run(config.run).checkpoints)
    begun = from_first(float(rank == 0 and checkpoints.newest() is not None)) > 0.5
    if config.head_epochs and model.modality == "image" and not probing and not begun:
        centres = open_rows(manifest, "train", model, config, positions=kept if config.validation else None)
        first = train_head_first(model, centres.source, loss, config, sampler, device)
        if first["J"] is not None:
            logger.info("hash layer alone: J %.4f, L %.4f", first["J"], first["L"])
    elif config.standardise and rank == 0 and not begun:  # the other workers are told by worker 0
        standardise(learner, source, seed=config.seed, device=device)
    watch = _Watch(config, model, learner, manifest, device, on_epoch, on_stage)
    history = fit(
        learner,
        source,
        loss,
        config.make_stages(),
        config.fit_settings(),
        sampler=sampler,
        checkpoints=checkpoints,
        on_step=on_step,
        on_epoch=watch.epoch,
        on_stage=watch.stage,
        device=device,
    )
    if rank != 0:
        return {}
    if probing:
        adopt(model, learner)
    model.eval()
    last = history.stages[-1]
    summary: dict[str, Any] = {
        "variant": config.variant,
        "backbone": config.backbone,
        "n_bits": config.n_bits,
        "steps": last["first_step"] + last["steps"],
        "epochs": sum(stage["epochs"] for stage in history.stages),
        "train_rows": len(rows),
        "n_workers": n_workers,
        "rows_per_s": last["rows_per_s"],
        "stages": history.stages,
        "manifest_sha256": manifest.sha256,
    }
    summary |= final_figures(config, model, manifest, last["beta"], device)
    summary["J"], summary["L"] = summary["measured"]["J"], summary["measured"]["L"]
    if config.validation:
        summary["validation_map"] = validation_map(config, model, manifest, held, device)
    stuck = None
    if config.guessing_loss is not None:
        stuck = explain_loss(last["J"] or 0.0, summary["steps"], config.guessing_loss)
    summary["warnings"] = ([stuck] if stuck else []) + explain_codes(summary["measured"])
    for text in summary["warnings"]:
        logger.warning("%s", text)
    summary["seconds"] = round(time.monotonic() - started, 3)
    target = Run(config.run).model.uri
    write_history(target, history)
    names = list(manifest.class_names) if manifest.class_names else None
    sha256 = save_bundle(target, model, class_names=names, summary=summary, config=configs.to_dict(config))
    return {**summary, "sha256": sha256}


class _Watch:
    """Looks at training from outside: collapse, MAP at the end of a stage, the caller's own callbacks."""

    def __init__(
        self,
        config: TrainConfig,
        model: HashModel,
        learner: HashModel,
        manifest: Manifest,
        device: str | torch.device,
        on_epoch: Callback | None,
        on_stage: Callback | None,
    ) -> None:
        self.config, self.model, self.learner = config, model, learner
        self.manifest, self.device = manifest, device
        self.on_epoch, self.on_stage = on_epoch, on_stage
        self.looked = False  # at the loss, for a sentence when nothing is learnt

    def epoch(self, record: Record) -> None:
        due = record["epoch"] >= WARN_AFTER_EPOCHS and record["step"] >= WARN_AFTER_STEPS
        guessing = self.config.guessing_loss
        if due and not self.looked and world()[0] == 0 and guessing is not None:
            self.looked = True
            text = explain_loss(record["J"], record["step"], guessing)
            if text:
                logger.warning("%s", text)
        if self.on_epoch:
            self.on_epoch(record)

    def stage(self, record: Record) -> None:
        if self.config.map_k and world()[0] == 0:
            if self.learner is not self.model:
                adopt(self.model, self.learner)
            record["map"] = split_map(self.config, self.model, self.manifest, self.device)
        if self.on_stage:
            self.on_stage(record)
