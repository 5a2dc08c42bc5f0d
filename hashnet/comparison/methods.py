"""The methods that can be compared, in the paper's order, the settings to try for each, and its numbers.

The numbers (Cao et al., ICCV 2017) are MAP at 16, 32, 48 and 64 bits: MAP@1000 on ImageNet-100, MAP@5000 on
NUS-WIDE and MS COCO, AlexNet; shallow methods on its fc7 features.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

from hashnet.errors import ConfigError
from hashnet.losses import METHODS

HASHNETS = ("hashnet+c", "hashnet", "hashnet-w", "hashnet-sgn")
DEEP = tuple(METHODS)
TITLES = {  # every method in the order of the paper's tables
    **{name: method.title for name, method in METHODS.items()},
    "sdh": "SDH",
    "ksh": "KSH",
    "itq-cca": "ITQ-CCA",
    "itq": "ITQ",
    "bre": "BRE",
    "sh": "SH",
    "lsh": "LSH",
    "rotation": "random rotation",
    "sign": "sign",
    "pq": "PQ",
}
FULL_NAMES = {  # for the reader who meets a title for the first time
    **{name: method.full_name for name, method in METHODS.items()},
    "sdh": "Supervised Discrete Hashing (Shen et al., 2015)",
    "ksh": "Supervised Hashing with Kernels (Liu et al., 2012)",
    "itq-cca": "ITQ after canonical correlation analysis with the labels (Gong and Lazebnik, 2011)",
    "itq": "Iterative Quantisation, without labels (Gong and Lazebnik, 2011)",
    "bre": "Binary Reconstructive Embeddings (Kulis and Darrell, 2009)",
    "sh": "Spectral Hashing (Weiss et al., 2008)",
    "lsh": "Locality-Sensitive Hashing: signs of random projections (Charikar, 2002)",
    "rotation": "signs of the vectors after a random rotation",
    "sign": "signs of the vectors' own columns with the greatest variance",
    "pq": "product quantisation by FAISS to as many bytes, ranked by distance to the quantised vectors",
}
FROM_NEIGHBOURS = "HashNet from neighbours"  # what HashNet is where there are no labels
OWN = tuple(name for name, method in METHODS.items() if method.own)  # not in the paper, nor in its tables
PQ = "pq"  # product quantisation: no binary codes, so it is measured by neighbour recall alone
VECTOR_METHODS = ("rotation", "sign", PQ)  # what vector databases do; not in the paper either
SHALLOW = tuple(name for name in TITLES if name not in (*DEEP, *VECTOR_METHODS))
UNLABELLED = ("hashnet", "itq", "sh", "lsh", *VECTOR_METHODS)  # those that need no labels
GROUPS = {
    "all": tuple(name for name in TITLES if name not in (*OWN, *VECTOR_METHODS)),
    "deep": tuple(name for name in DEEP if name not in OWN),
    "shallow": SHALLOW,
    "unlabelled": UNLABELLED,
    "ablation": HASHNETS,
    "own": OWN,
}
TABLE_METHODS = {  # table → its methods, in order
    1: ("hashnet", "dhn", "dnnh", "cnnh", "sdh", "ksh", "itq-cca", "itq", "bre", "sh", "lsh"),
    2: ("hashnet", "dhn"),
    3: HASHNETS,
    4: ("hashnet+c", "hashnet", "dhn", *OWN),
}


def expand_methods(names: list[str]) -> list[str]:
    """Method names in the paper's order; ``all``, ``deep``, ``shallow``, ``ablation`` … are groups.

    >>> expand_methods(["lsh", "ablation"])
    ['hashnet+c', 'hashnet', 'hashnet-w', 'hashnet-sgn', 'lsh']
    """
    requested: set[str] = set()
    mistakes = []
    for name in names:
        if name in GROUPS:
            requested.update(GROUPS[name])
        elif name in TITLES:
            requested.add(name)
        else:
            near = difflib.get_close_matches(name, [*TITLES, *GROUPS], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*GROUPS, *TITLES])}"
            mistakes.append(f"methods: there is no method {name!r}; {hint}")
    if not names:
        mistakes.append("methods: give at least one")
    if mistakes:
        raise ConfigError(mistakes)
    return [name for name in TITLES if name in requested]


def candidates(method: str, lrs: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Every combination of the method's grid; one empty dict where the method has nothing to choose.

    A deep method is tried without a learning rate, so that tuned settings are no worse than the defaults, and
    with each of ``lrs``, those of its kind of backbone. ``unscaled_lr``, unlike ``lr``, suits other lengths
    and other values of alpha, too: see ``deep_config``.

    >>> candidates("lsh"), len(candidates("itq-cca"))
    ([{}], 5)
    >>> candidates("cnnh", [0.01, 0.03])
    [{}, {'unscaled_lr': 0.01}, {'unscaled_lr': 0.03}]
    """
    from hashnet.baselines import REGISTRY  # loads torch, which drivers do without

    rates: list[dict[str, Any]] = [{}]
    if method in METHODS:
        grid = METHODS[method].grid
        rates += [{"unscaled_lr": lr} for lr in lrs]
    else:
        grid = REGISTRY[method].grid
    others = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [rate | other for rate in rates for other in others]


BITS = (16, 32, 48, 64)
PAPER_K = {  # data set → depth of MAP
    "imagenet100": 1000,
    "nuswide": 5000,
    "coco": 5000,
}

_COLUMNS = ("imagenet100", "nuswide", "coco")

_TABLE_1 = {
    "hashnet": (".5059 .6306 .6633 .6835", ".6623 .6988 .7114 .7163", ".6873 .7184 .7301 .7362"),
    "dhn": (".3106 .4717 .5419 .5732", ".6374 .6637 .6692 .6714", ".6774 .7013 .6948 .6944"),
    "dnnh": (".2903 .4605 .5301 .5645", ".5976 .6158 .6345 .6388", ".5932 .6034 .6045 .6099"),
    "cnnh": (".2812 .4498 .5245 .5538", ".5696 .5827 .5926 .5996", ".5642 .5744 .5711 .5671"),
    "sdh": (".2985 .4551 .5549 .5852", ".4756 .5545 .5786 .5812", ".5545 .5642 .5723 .5799"),
    "ksh": (".1599 .2976 .3422 .3943", ".3561 .3327 .3124 .3368", ".5212 .5343 .5343 .5361"),
    "itq-cca": (".2659 .4362 .5479 .5764", ".4598 .4052 .3732 .3467", ".5659 .5624 .5297 .5019"),
    "itq": (".3255 .4620 .5170 .5520", ".5086 .5425 .5580 .5611", ".5818 .6243 .6460 .6574"),
    "bre": (".0628 .2525 .3300 .3578", ".5027 .5290 .5475 .5546", ".5920 .6224 .6300 .6336"),
    "sh": (".2066 .3280 .3951 .4191", ".4058 .4209 .4211 .4104", ".4951 .5071 .5099 .5101"),
    "lsh": (".1007 .2350 .3121 .3596", ".3283 .4227 .4333 .5009", ".4592 .4856 .5440 .5849"),
}
_TABLE_2 = {  # zero-shot, ImageNet only
    "hashnet": (".4411 .5274 .5651 .5756", "", ""),
    "dhn": (".2891 .4421 .5123 .5342", "", ""),
}
_TABLE_3 = {
    "hashnet+c": (".5059 .6306 .6633 .6835", ".6646 .7024 .7209 .7259", ".6876 .7261 .7371 .7419"),
    "hashnet": _TABLE_1["hashnet"],
    "hashnet-w": (".3350 .4852 .5668 .5992", ".6400 .6638 .6788 .6933", ".6853 .7174 .7297 .7348"),
    "hashnet-sgn": (".4249 .5450 .5828 .6061", ".6603 .6770 .6921 .7020", ".6449 .6891 .7056 .7138"),
}
_TABLES = {1: _TABLE_1, 2: _TABLE_2, 3: _TABLE_3}


def reported_map(table: int, method: str, dataset: str | None, n_bits: int) -> float | None:
    """The MAP in one of the paper's tables, None where it has no number.

    >>> reported_map(1, "dhn", "coco", 48)
    0.6948
    """
    row = _TABLES.get(table, {}).get(method)
    if row is None or dataset not in _COLUMNS or n_bits not in BITS:
        return None
    numbers = row[_COLUMNS.index(dataset)].split()
    return float(numbers[BITS.index(n_bits)]) if numbers else None
