"""Ten published methods, and two that learn nothing, with one contract (see ``base``):
``ITQ(n_bits=48).fit(X).encode(X)``."""

from __future__ import annotations

from hashnet.baselines.base import Baseline, BaselineWarning
from hashnet.baselines.bre import BRE
from hashnet.baselines.deep import CNNH, DHN, DNNH
from hashnet.baselines.itq import ITQ, ITQCCA
from hashnet.baselines.ksh import KSH
from hashnet.baselines.lsh import LSH, Rotation, Sign
from hashnet.baselines.sdh import SDH
from hashnet.baselines.sh import SH

REGISTRY: dict[str, type[Baseline]] = {  # in the order of the paper's tables
    "dhn": DHN,
    "dnnh": DNNH,
    "cnnh": CNNH,
    "sdh": SDH,
    "ksh": KSH,
    "itq-cca": ITQCCA,
    "itq": ITQ,
    "bre": BRE,
    "sh": SH,
    "lsh": LSH,
    "rotation": Rotation,  # these two are not in the paper
    "sign": Sign,
}

__all__ = [
    "BRE",
    "CNNH",
    "DHN",
    "DNNH",
    "ITQ",
    "ITQCCA",
    "KSH",
    "LSH",
    "REGISTRY",
    "SDH",
    "SH",
    "Baseline",
    "BaselineWarning",
    "Rotation",
    "Sign",
]
