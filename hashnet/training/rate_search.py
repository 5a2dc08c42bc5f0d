"""The learning rate of a head on vectors: the best of a few, each tried for some hundred steps.

Part of the training rows is held out; every rate trains a copy of the head on others, and the codes of the
held-out rows are scored by MAP and by precision within Hamming radius 2. The default rate is kept unless
another one is clearly better.
"""

from __future__ import annotations

import copy
import dataclasses
import logging

import numpy as np
import torch

from hashnet.errors import Diverged
from hashnet.io import storage
from hashnet.losses import LabelSimilarity, make_loss
from hashnet.models import HashModel
from hashnet.run import Run
from hashnet.training.batches import from_first
from hashnet.training.diagnostics import held_out_score
from hashnet.training.inputs import ArraySource, held_out
from hashnet.training.loop import fit
from hashnet.training.schedule import plain
from hashnet.training.train_config import KINDS, TrainConfig

logger = logging.getLogger(__name__)
FACTOR = 3.0  # rates tried besides the default: this times as large, and as small
STEPS, MAX_ROWS, MAX_HELD, MIN_ROWS = 300, 5000, 1000, 100
SHARE = 0.2  # of the rows, held out
CLEARLY = 0.03  # better than the default by this much: less says little after so short a trial


def find_lr(
    config: TrainConfig,
    model: HashModel,
    source: ArraySource,
    labels: np.ndarray | None,
    device: str | torch.device = "cpu",
) -> float:
    """The learning rate for ``model`` on these rows; a run that goes on keeps the one it found before.

    The default where there are no labels to score by, or too few rows. Every worker calls this.
    """
    default = KINDS["features"].lr * config.lr_scale
    kept = storage.join(Run(config.run).checkpoints, "rate.json")
    if storage.exists(kept):
        return float(storage.read_json(kept)["lr"])
    if labels is None or config.pairs is not None or len(source) < MIN_ROWS:
        return default
    trials = _Trials(config, model, source, labels, device)
    scores = {lr: from_first(trials.score(lr)) for lr in (default, default / FACTOR, default * FACTOR)}
    best = max(scores, key=lambda lr: scores[lr] - (CLEARLY if lr != default else 0))
    tried = ", ".join(f"{lr:.3g}: {score:.3f}" for lr, score in sorted(scores.items()))
    logger.info("learning rate %.3g (held-out score of %s)", best, tried)
    storage.write_json(kept, {"kind": "learning_rate", "format_version": 1, "lr": best})
    return best


class _Trials:
    """Short trainings on the same rows, scored on the same held-out rows."""

    def __init__(
        self,
        config: TrainConfig,
        model: HashModel,
        source: ArraySource,
        labels: np.ndarray,
        device: str | torch.device,
    ) -> None:
        self.config, self.model, self.device = config, model, device
        rng = np.random.default_rng(config.seed)
        kept, held = (rng.permutation(rows) for rows in held_out(len(source), SHARE))
        self.rows, self.held = kept[:MAX_ROWS], held[:MAX_HELD]
        self.train, self.test = (
            ArraySource(source.array[torch.from_numpy(rows)].numpy(), source.usable[rows])
            for rows in (self.rows, self.held)
        )
        self.labels = labels[self.held]
        self.loss = make_loss(config, LabelSimilarity(labels[self.rows], device))

    def score(self, lr: float) -> float:
        """Held-out MAP and precision in the ball, of a copy of the model trained with this rate."""
        settings = dataclasses.replace(
            self.config.fit_settings(), lr=lr, log_every=1_000_000_000, checkpoint_every=0
        )
        model = copy.deepcopy(self.model).to(self.device)
        epochs = max(1, STEPS * settings.batch_size // len(self.rows))
        try:
            fit(model, self.train, copy.deepcopy(self.loss), plain(epochs), settings)
        except Diverged:
            return -1.0
        return held_out_score(model, self.test, self.labels, self.device)
