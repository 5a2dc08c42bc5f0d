"""The continuation schedule: beta and the learning rate, stage by stage (Algorithm 1).

``staged``   1 = beta_0 < … < beta_m = infinity, here beta_t = 2^t for t = 0..m-1. The step on z grows with
             beta, so the learning rate is scaled by 1 / beta_t. A stage ends when its loss stops improving,
             at the latest after its maximum of epochs; with ``patience=0`` it has a fixed length. The stage
             beta = infinity is sgn itself: there is nothing to train, it is only measured.
``smooth``   one stage with beta = sqrt(1 + growth * step), refreshed every ``refresh`` steps, as in the
             authors' public code. It never gets near infinity.
``plain``    one stage with beta = 1: HashNet-sgn, DHN and the other deep baselines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hashnet.errors import ConfigError

SCHEDULES = ("staged", "smooth", "plain")
ANNEALING = ("cosine", "step", "constant")
STEP_SHARE, STEP_FACTOR = 1 / 3, 0.1  # step annealing: a tenth after each third
N_STAGES, STAGE_LR_SCALE = 10, 0.3  # of staged
BETA_GROWTH, BETA_REFRESH = 0.005, 200  # of smooth


@dataclass(frozen=True)
class ContinuationStage:
    """One stage of at most ``epochs``; ``patience`` epochs without improvement end it (0: never)."""

    beta: float
    epochs: int
    lr_scale: float = 1.0
    patience: int = 0
    growth: float = 0.0  # > 0: beta grows inside the stage
    refresh: int = BETA_REFRESH

    def beta_at(self, step: int) -> float:
        """beta at a step of this stage, counted from 0."""
        if self.growth == 0:
            return self.beta
        return self.beta * math.sqrt(1 + self.growth * (step // self.refresh * self.refresh))


def staged(
    n_stages: int = N_STAGES,
    first_epochs: int = 60,
    stage_epochs: int = 2,
    patience: int = 0,
    stage_lr_scale: float = STAGE_LR_SCALE,
) -> list[ContinuationStage]:
    """Algorithm 1: beta = 1, 2, 4, …; the learning rate is scaled by 1 / beta.

    A later stage starts from good codes: ``stage_lr_scale`` keeps its first steps from undoing them.
    """
    if n_stages < 1:
        raise ConfigError(f"stages must be at least 1, got {n_stages}")
    first = ContinuationStage(beta=1.0, epochs=first_epochs, patience=patience)
    later = [
        ContinuationStage(
            beta=2.0**t, epochs=stage_epochs, lr_scale=stage_lr_scale * 2.0**-t, patience=patience
        )
        for t in range(1, n_stages)
    ]
    return [first, *later]


def smooth(epochs: int, growth: float = BETA_GROWTH, refresh: int = BETA_REFRESH) -> list[ContinuationStage]:
    """The authors' public schedule: beta = sqrt(1 + 0.005 step), refreshed every 200 steps."""
    return [ContinuationStage(beta=1.0, epochs=epochs, growth=growth, refresh=refresh)]


def plain(epochs: int) -> list[ContinuationStage]:
    """beta = 1 from beginning to end."""
    return [ContinuationStage(beta=1.0, epochs=epochs)]


def anneal(
    kind: str, step: int, n_steps: int, step_size: int | None = None, step_factor: float = STEP_FACTOR
) -> float:
    """The factor of the learning rate at a step of a stage of ``n_steps``.

    ``step`` is Caffe's policy of that name: ``step_factor ** floor(step / step_size)``; ``step_size`` None is
    a third of the stage. The authors' COCO runs halve the rate every 2,000 iterations.
    """
    progress = step / n_steps
    if kind == "constant":
        return 1.0
    if kind == "step":
        return step_factor ** (step // step_size if step_size else int(progress / STEP_SHARE + 1e-9))
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    raise ConfigError(f"annealing must be one of {', '.join(ANNEALING)}, got {kind!r}")
