"""What a caller passed as an array, or a sentence about why it is none."""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet.errors import CodeError


def as_array(values: Any, name: str) -> np.ndarray:
    """``values`` as they are or as numpy takes them; rows of different lengths are no array.

    >>> as_array([[1], [2, 3]], "labels")
    Traceback (most recent call last):
    hashnet.errors.CodeError: labels are no array: their rows differ in length; give rows of one length
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise CodeError(
            f"{name} are no array: their rows differ in length; give rows of one length"
        ) from error
