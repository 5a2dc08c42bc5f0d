"""Validation MAP: the one number by which settings are ranked, measured on held-out training rows."""

from __future__ import annotations

import numpy as np

from hashnet.metrics.evaluation import evaluate

MIN_VALIDATION_K = 100


def validation_k(n_held: int) -> int:
    """The depth of validation MAP: a quarter of the rows searched (half of ``n_held``), at least 100.

    It follows from the held-out rows alone, so that every job ranks settings by the same number.

    >>> validation_k(1920), validation_k(50)
    (240, 100)
    """
    return max(MIN_VALIDATION_K, n_held // 8)


def validation_map(codes: np.ndarray, labels: np.ndarray) -> float | None:
    """MAP@validation_k of held-out rows, each half of them searching the other; the mean of both directions.

    ``codes`` uint8 (n, n_bits / 8), ``labels`` multi-hot (n, n_classes). The rows that are searched were not
    trained on either, as most of a database is not: settings that fit the training rows too well gain
    nothing. Rows without a label are left out, as nothing is relevant to them. None for fewer than two rows.
    """
    labelled = labels.any(axis=1)
    codes, labels = codes[labelled], labels[labelled]
    if len(codes) < 2:
        return None
    one, other = (codes[::2], labels[::2]), (codes[1::2], labels[1::2])
    k = validation_k(len(codes))
    return float((evaluate(*one, *other, k).map + evaluate(*other, *one, k).map) / 2)
