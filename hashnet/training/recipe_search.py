"""Noise, learning rate and shape of a head on vectors: the best of a few, each tried for 1,000 steps.

Part of the training rows is held out; every candidate trains a head on others, and the codes of the held-out
rows are scored by MAP. The first candidate, the default noise and rate, stays unless another is better by
more than the standard error of their difference over the held-out rows: with two, little noise lost on 500
rows of digits although it was four points better. Shorter trials prefer too little noise, and so does
precision within Hamming radius 2: see docs/defaults.md.

A hidden layer, which learns best at three times the default rate, is tried last. It is taken where MAP and
that precision together are better, and MAP alone is not lower by more than the standard error. It keeps
improving for longer than one linear layer does: where it loses, and the training itself will be longer than a
trial, both are tried again for up to 3,000 steps.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import dataclass

import numpy as np
import torch

from hashnet.errors import Diverged
from hashnet.io import Progress, storage
from hashnet.labels import count_pairs
from hashnet.losses import LabelSimilarity, make_loss
from hashnet.models import HashModel, build_model
from hashnet.run import Run
from hashnet.training.batches import from_first, world
from hashnet.training.diagnostics import HeldOutScore, held_out_score
from hashnet.training.frozen_backbone import standardise
from hashnet.training.inputs import ArraySource, held_out
from hashnet.training.loop import Callbacks, fit
from hashnet.training.schedule import plain
from hashnet.training.train_config import KINDS, TrainConfig

logger = logging.getLogger(__name__)
FACTOR = 3.0  # rates tried besides the default: this times as large, and as small; noise: as small
HIDDEN = 512  # units of the hidden layer that is tried
LONGER = 3000  # steps of the second trial of a hidden layer
STEPS, MAX_ROWS, MAX_HELD, MIN_ROWS = 1000, 5000, 1000, 100
SHARE = 0.2  # of the rows, held out


@dataclass(frozen=True)
class Recipe:
    """What a search decides."""

    lr: float
    noise: float
    hidden: int = 0  # units of a hidden layer

    def __str__(self) -> str:
        return f"lr {self.lr:.3g}, noise {self.noise:.3g}, hidden {self.hidden}"

    def model(self, like: HashModel, seed: int) -> HashModel:
        """A model like the given one, with this noise; a copy of it where the hidden layer is the same."""
        if self.hidden == (like.arguments.get("hidden") or 0):
            made = copy.deepcopy(like)
        else:
            torch.manual_seed(seed)
            made = build_model(
                **like.arguments | {"hidden": self.hidden or None, "hidden_norm": self.hidden > 0}
            )
        made.noise.level = made.arguments["noise"] = self.noise  # also for the record in its bundle
        return made


def find_recipe(
    config: TrainConfig,
    model: HashModel,
    source: ArraySource | None,
    labels: np.ndarray | None,
    device: str | torch.device = "cpu",
) -> Recipe:
    """The recipe for ``model``, or one like it, on these rows; a resumed run keeps its earlier one.

    What the configuration sets is not searched. The defaults are taken where there are no labels to score by,
    too few rows, or rows of which a trial would see similar pairs only, or none. Every worker calls this.
    """
    default = KINDS["features"].lr * config.lr_scale
    lr = config.lr or default * (FACTOR if config.hidden else 1)
    first = Recipe(lr, model.noise.level, config.hidden or 0)
    kept = storage.join(Run(config.run).checkpoints, "recipe.json")
    if storage.exists(kept):
        found = storage.read_json(kept)
        return Recipe(float(found["lr"]), float(found["noise"]), found.get("hidden", 0))
    rates = [first.lr / FACTOR, first.lr * FACTOR] if config.lr is None else []
    levels = [first.noise / FACTOR] if config.noise is None and first.noise else []
    deeper = config.hidden is None
    if source is None or labels is None or config.pairs is not None or len(source) < MIN_ROWS:
        return first
    if not (rates or levels or deeper):
        return first
    counts = count_pairs(labels[_divided(len(source), config.seed)[0]])
    if not (counts.n_similar and counts.n_dissimilar):
        logger.info("no settings are tried: without held-out rows, no pair is left of one of the two kinds")
        return first
    logger.info("trying settings of noise, learning rate and a hidden layer on held-out rows")
    trials = _Trials(config, model, source, labels, device)
    n_steps = STEPS * (1 + len(levels) + len(rates) + deeper) + 2 * deeper * trials.longer
    with Progress(n_steps, "steps", "trying settings", at_most=True) as progress:
        trials.progress = progress
        best = trials.best([first] + [dataclasses.replace(first, noise=level) for level in levels])
        best = trials.best([best] + [dataclasses.replace(best, lr=lr) for lr in rates])
        if deeper:
            best = trials.deeper(best, Recipe(config.lr or default * FACTOR, best.noise, HIDDEN))
        progress.outcome = f"chose {best}"
    if not progress.said:
        logger.info("%s", progress.outcome)
    values = {"kind": "recipe", "format_version": 1, **dataclasses.asdict(best)}
    storage.write_json(kept, values)
    return best


def _divided(n_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that a trial learns from, and those that score it."""
    rng = np.random.default_rng(seed)
    kept, held = (rng.permutation(rows) for rows in held_out(n_rows, SHARE))
    return kept[:MAX_ROWS], held[:MAX_HELD]


class _Trials:
    """Short trainings on the same rows, scored on the same held-out rows; each recipe is tried once."""

    progress: Progress | None = None

    def __init__(
        self,
        config: TrainConfig,
        model: HashModel,
        source: ArraySource,
        labels: np.ndarray,
        device: str | torch.device,
    ) -> None:
        self.config, self.model, self.device = config, model, device
        self.rows, self.held = _divided(len(source), config.seed)
        self.train, self.test = (
            ArraySource(source.array[torch.from_numpy(rows)].numpy(), source.usable[rows])
            for rows in (self.rows, self.held)
        )
        self.labels = labels[self.held]
        self.loss = make_loss(config, LabelSimilarity(labels[self.rows], device))
        per_epoch = -(-len(source) // config.batch_size)
        self.longer = max(STEPS, min(LONGER, int(config.first_epochs or 0) * per_epoch))  # second trials
        self.scores: dict[tuple[Recipe, int], HeldOutScore | None] = {}  # None: diverged

    def best(self, recipes: list[Recipe]) -> Recipe:
        """The first recipe, or the one that beats it by more than chance, and any other that does."""
        best, *others = recipes
        for other in others:
            if from_first(float(self.beats(other, recipes[0]))) > 0.5 and (
                best == recipes[0] or from_first(float(self._map(other) > self._map(best))) > 0.5
            ):
                best = other
        return best

    def deeper(self, linear: Recipe, hidden: Recipe) -> Recipe:
        """``hidden``, which has a hidden layer, unless ``linear`` is better."""
        if any(from_first(float(self.suits(hidden, linear, n))) > 0.5 for n in sorted({STEPS, self.longer})):
            return hidden
        return linear

    def suits(self, hidden: Recipe, linear: Recipe, steps: int) -> bool:
        """Whether MAP and precision of ``hidden`` are better together, and MAP is not lower beyond chance."""
        challenger, holder = self.score(hidden, steps), self.score(linear, steps)
        if challenger is None or holder is None:
            return challenger is not None
        error = challenger.standard_error(holder)
        return challenger.value > holder.value and challenger.map > holder.map - error

    def beats(self, one: Recipe, other: Recipe) -> bool:
        """Whether the MAP of ``one`` is higher than that of ``other`` by more than a standard error."""
        challenger, holder = self.score(one), self.score(other)
        if challenger is None or holder is None:
            return challenger is not None
        return challenger.map - holder.map > challenger.standard_error(holder)

    def score(self, recipe: Recipe, steps: int | None = None) -> HeldOutScore | None:
        """The held-out score of a model trained with this recipe; None where it diverged."""
        at = recipe, steps or STEPS
        if at not in self.scores:
            self.scores[at] = found = self._train(*at)
            how_good = "it diverged" if found is None else f"MAP {found.map:.3f}"
            logger.info("tried %s for %d steps: %s", *at, how_good)
        return self.scores[at]

    def _map(self, recipe: Recipe) -> float:
        score = self.score(recipe)
        return -1.0 if score is None else score.map

    def _train(self, recipe: Recipe, steps: int) -> HeldOutScore | None:
        settings = dataclasses.replace(
            self.config.fit_settings(), lr=recipe.lr, log_every=1_000_000_000, checkpoint_every=0
        )
        model = recipe.model(self.model, self.config.seed).to(self.device)
        if self.config.scaling:
            standardise(model, self.train, seed=self.config.seed)
        per_epoch = -(-len(self.rows) // settings.batch_size)  # the last batch may be a small one
        epochs = max(1, steps // per_epoch)
        follow = Callbacks(epoch=lambda record: self._count(steps // epochs))
        try:
            fit(model, self.train, copy.deepcopy(self.loss), plain(epochs), settings, callbacks=follow)
        except Diverged:
            return None
        return held_out_score(model, self.test, self.labels, self.device)

    def _count(self, steps: int) -> None:
        if self.progress is not None and world()[0] == 0:
            self.progress.update(steps)
