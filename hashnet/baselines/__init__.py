"""Ten published methods under one contract (see ``base``): ``ITQ(n_bits=48).fit(X).encode(X)``."""

from __future__ import annotations

from hashnet.baselines.base import Baseline, BaselineWarning
from hashnet.baselines.bre import BRE
from hashnet.baselines.cnnh import CNNH
from hashnet.baselines.dhn import DHN
from hashnet.baselines.dnnh import DNNH
from hashnet.baselines.itq import ITQ
from hashnet.baselines.itq_cca import ITQCCA
from hashnet.baselines.ksh import KSH
from hashnet.baselines.lsh import LSH
from hashnet.baselines.sdh import SDH
from hashnet.baselines.sh import SH

REGISTRY: dict[str, type[Baseline]] = {
    "lsh": LSH,
    "sh": SH,
    "itq": ITQ,
    "itq-cca": ITQCCA,
    "bre": BRE,
    "ksh": KSH,
    "sdh": SDH,
    "cnnh": CNNH,
    "dnnh": DNNH,
    "dhn": DHN,
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
]
