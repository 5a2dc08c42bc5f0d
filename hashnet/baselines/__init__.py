"""Ten published methods under one contract (see ``base``): ``ITQ(n_bits=48).fit(X).encode(X)``."""

from __future__ import annotations

from hashnet.baselines.base import Baseline, BaselineWarning
from hashnet.baselines.itq import ITQ
from hashnet.baselines.lsh import LSH

REGISTRY: dict[str, type[Baseline]] = {
    "lsh": LSH,
    "itq": ITQ,
}

__all__ = ["ITQ", "LSH", "REGISTRY", "Baseline", "BaselineWarning"]
