"""What the HashNet paper reports (Cao et al., ICCV 2017): MAP at 16, 32, 48 and 64 bits.

MAP@1000 on ImageNet-100, MAP@5000 on NUS-WIDE and MS COCO, AlexNet; shallow methods on its fc7 features.
"""

from __future__ import annotations

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
    row = _TABLES[table].get(method)
    if row is None or dataset not in _COLUMNS or n_bits not in BITS:
        return None
    numbers = row[_COLUMNS.index(dataset)].split()
    return float(numbers[BITS.index(n_bits)]) if numbers else None
