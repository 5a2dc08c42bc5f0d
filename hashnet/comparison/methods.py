"""The methods that can be compared, in the paper's order, and the settings to try for each."""

from __future__ import annotations

import difflib
import itertools
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
}
SHALLOW = tuple(name for name in TITLES if name not in DEEP)
GROUPS = {"all": tuple(TITLES), "deep": DEEP, "shallow": SHALLOW, "ablation": HASHNETS}
TABLE_METHODS = {  # table → its methods, in order
    1: ("hashnet", "dhn", "dnnh", "cnnh", "sdh", "ksh", "itq-cca", "itq", "bre", "sh", "lsh"),
    2: ("hashnet", "dhn"),
    3: HASHNETS,
}


def expand_methods(names: list[str]) -> list[str]:
    """Method names in the paper's order; ``all``, ``deep``, ``shallow`` and ``ablation`` are groups.

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


def candidates(method: str) -> list[dict[str, Any]]:
    """Every combination of the method's grid; one empty dict where the method has nothing to choose.

    >>> candidates("lsh"), len(candidates("itq-cca"))
    ([{}], 5)
    """
    from hashnet.baselines import REGISTRY  # loads torch, which drivers do without

    grid = METHODS[method].grid if method in METHODS else REGISTRY[method].grid
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
