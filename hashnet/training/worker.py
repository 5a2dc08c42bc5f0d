"""What every worker of a training run does; also the whole run, in one process without a cluster.

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

import numpy as np
import torch

from hashnet import config as configs
from hashnet import storage
from hashnet.codes import pack_signs
from hashnet.data import Manifest
from hashnet.losses import (
    CNNHLoss,
    DHNLoss,
    DNNHLoss,
    LabelSimilarity,
    Loss,
    PairwiseLoss,
    TableSimilarity,
    similarity_codes,
)
from hashnet.losses.pairwise import Similarity
from hashnet.models import HashModel, build_model
from hashnet.training.bundle import save_bundle
from hashnet.training.checkpoints import Checkpoints
from hashnet.training.collapse import explain_codes, explain_loss
from hashnet.training.config import TrainConfig
from hashnet.training.data import Rows, held_out, open_rows, sample
from hashnet.training.gather import world
from hashnet.training.history import write_history
from hashnet.training.loop import Record, fit
from hashnet.training.measure import logits_of, measure
from hashnet.training.run import CHECKPOINTS, MANIFEST, MODEL
from hashnet.training.sampling import PairSampler, Sampler
from hashnet.training.standardise import standardise

logger = logging.getLogger(__name__)
WARN_AFTER_EPOCHS = 3
VALIDATION_K = 5000
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
    manifest = manifest or Manifest.open(storage.join(config.run, MANIFEST))
    torch.manual_seed(config.seed)
    model = make_model(config, manifest)
    kept, held = held_out(manifest.count("train"), config.validation)
    rows = open_rows(
        manifest, "train", model, config, train=True, positions=kept if config.validation else None
    )
    similarity, sampler = make_similarity(config, manifest, rows, device)
    loss = make_loss(config, similarity)
    checkpoints = Checkpoints(storage.join(config.run, CHECKPOINTS))
    if config.standardise and rank == 0 and not checkpoints.steps():  # the other workers are told by worker 0
        standardise(model, rows.source, seed=config.seed, device=device)
    watch = _Watch(config, model, manifest, device, on_epoch, on_stage)
    history = fit(
        model,
        rows.source,
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
        queries = open_rows(manifest, "train", model, config, positions=held)
        database = open_rows(manifest, "train", model, config, positions=kept)
        summary["validation_map"] = map_between(config, model, queries, database, VALIDATION_K, device)
    guessing = explain_loss(last["J"] or 0.0, summary["steps"]) if config.cross_entropy else None
    summary["warnings"] = [guessing] if guessing else []
    summary["warnings"] += explain_codes(summary["measured"])
    for text in summary["warnings"]:
        logger.warning("%s", text)
    summary["seconds"] = round(time.monotonic() - started, 3)
    target = storage.join(config.run, MODEL)
    write_history(target, history)
    names = list(manifest.class_names) if manifest.class_names else None
    sha256 = save_bundle(target, model, class_names=names, summary=summary, config=configs.to_dict(config))
    return {**summary, "sha256": sha256}


def make_model(config: TrainConfig, manifest: Manifest) -> HashModel:
    """The model a resolved configuration describes, for this manifest's rows."""
    return build_model(
        str(config.backbone),
        config.n_bits,
        n_features=manifest.n_features,
        hidden=config.hidden,
        weights=config.weights,
        download=config.download,
        dropout=float(config.dropout or 0),
        resize=config.resize,
        crop=config.crop,
        flip=config.flip,
        head="slices" if config.variant == "dnnh" else "linear",
    )


def make_similarity(
    config: TrainConfig, manifest: Manifest, rows: Rows, device: str | torch.device
) -> tuple[Similarity, Sampler | None]:
    """Similarity of the training rows by labels, or by the pairs table with batches drawn around pairs."""
    if config.pairs is None:
        assert rows.labels is not None
        return LabelSimilarity(rows.labels, device), None
    from hashnet.data.pairs import PairTable

    table = PairTable.open(config.pairs, manifest)
    a, b = (np.searchsorted(rows.row_ids, ids) for ids in (table.row_a, table.row_b))
    similarity = TableSimilarity(a, b, table.similar, len(rows), device)
    return similarity, PairSampler(a, b, config.batch_size, config.seed)


def make_loss(config: TrainConfig, similarity: Similarity) -> Loss:
    """The loss of the configured variant."""
    if config.variant == "cnnh":
        assert isinstance(similarity, LabelSimilarity)
        codes, _ = similarity_codes(similarity.labels.cpu().numpy(), config.n_bits, config.seed)
        return CNNHLoss(codes, similarity.labels.device)
    if config.variant == "dnnh":
        return DNNHLoss(similarity, margin=config.margin, epsilon=config.epsilon)
    if config.variant == "dhn":
        return DHNLoss(similarity, config.n_bits, alpha=config.alpha, quantisation=config.quantisation)
    return PairwiseLoss(
        similarity,
        config.n_bits,
        alpha=config.alpha,
        weights=config.pair_weights,
        continuous=config.continuous_on,
    )


def final_figures(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    beta: float,
    device: str | torch.device,
) -> dict[str, Any]:
    """``measured``: J, L, |g| and bits at the last finite beta on a sample of the database rows."""
    split = "database" if manifest.count("database") else "train"
    chosen = sample(manifest.count(split), config.measure_rows or 1, config.seed)
    rows = open_rows(manifest, split, model, config, positions=chosen)
    logits, usable = logits_of(model, rows.source, device=device)
    labels = rows.labels[usable] if rows.labels is not None else None
    loss, classes = None, None
    if labels is not None:
        classes = int(labels.any(axis=0).sum())
        # CNNH's target codes exist for the training rows alone: there is no loss to measure elsewhere.
        if config.pairs is None and len(labels) > 1 and config.variant != "cnnh":
            known = LabelSimilarity(labels)
            if known.counts.n_similar and known.counts.n_dissimilar:
                loss = make_loss(config, known)
    measured = measure(logits[torch.from_numpy(usable)], beta, loss, classes)
    short = {name: measured[name] for name in ("quantisation", "binary_share", "distinct")}
    return {"measured": {**measured, "split": split}, **short}


def map_between(
    config: TrainConfig, model: HashModel, queries: Rows, database: Rows, k: int, device: str | torch.device
) -> float:
    """MAP@k (`retrieved`, 0 for a query without a hit) of the codes of some rows against those of others."""
    from hashnet.metrics import evaluate

    codes, labels = [], []
    for rows in (queries, database):
        logits, usable = logits_of(model, rows.source, device=device)
        assert rows.labels is not None
        codes.append(pack_signs(logits[torch.from_numpy(usable)]))
        labels.append(rows.labels[usable])
    return float(evaluate(codes[0], labels[0], codes[1], labels[1], k=k).map)


class _Watch:
    """Looks at training from outside: collapse, MAP at the end of a stage, the caller's own callbacks."""

    def __init__(
        self,
        config: TrainConfig,
        model: HashModel,
        manifest: Manifest,
        device: str | torch.device,
        on_epoch: Callback | None,
        on_stage: Callback | None,
    ) -> None:
        self.config, self.model, self.manifest, self.device = config, model, manifest, device
        self.on_epoch, self.on_stage = on_epoch, on_stage

    def epoch(self, record: Record) -> None:
        if record["epoch"] == WARN_AFTER_EPOCHS and world()[0] == 0 and self.config.cross_entropy:
            text = explain_loss(record["J"], record["step"])
            if text:
                logger.warning("%s", text)
        if self.on_epoch:
            self.on_epoch(record)

    def stage(self, record: Record) -> None:
        if self.config.map_k and world()[0] == 0:
            queries = open_rows(self.manifest, "query", self.model, self.config)
            database = open_rows(self.manifest, "database", self.model, self.config)
            record["map"] = map_between(
                self.config, self.model, queries, database, self.config.map_k, self.device
            )
        if self.on_stage:
            self.on_stage(record)
