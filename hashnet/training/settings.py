"""How the loop optimises; ``hashnet.training.config`` fills it in from a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FitSettings:
    """How to optimise. ``lr`` is the backbone's learning rate, the head has ``head_lr_scale`` times it."""

    lr: float = 0.01
    head_lr_scale: float = 10.0
    momentum: float = 0.9
    weight_decay: float = 5e-4
    annealing: str = "cosine"
    batch_size: int = 256  # of all workers together
    seed: int = 0
    min_improvement: float = 1e-3  # relative: an epoch that lowers J by less counts as stale
    train_batchnorm: bool = False  # False: running statistics stay as they are
    freeze_backbone: bool = False
    log_every: int = 1  # steps between rows of the history
    checkpoint_every: int = 0  # steps between checkpoints; 0: only where a stage ends
    prefetch: int = 2  # batches made ahead
