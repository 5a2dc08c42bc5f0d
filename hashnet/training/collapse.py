"""Has training collapsed? Said in sentences, with what to change."""

from __future__ import annotations

import math
from typing import Any

LN2 = math.log(2)
NEAR = 0.97  # a loss above this share of guessing's means that relaxed codes are still near 0
FAR_ABOVE = 1.1
ENOUGH_ROWS = 50  # on fewer rows, bits that are equal prove nothing
MANY_DEAD = 0.25  # share of dead bits from which on it is a failure, not a detail


def explain_loss(j: float, step: int, guessing: float = LN2) -> str | None:
    """A sentence when the loss says that nothing is learnt: ``guessing`` is that of codes of 0."""
    if not math.isfinite(j) or j < NEAR * guessing:
        return None
    if j > FAR_ABOVE * guessing:
        return (
            f"the loss is {j:.3f} at step {step}, worse than guessing ({guessing:.3f}): codes of different "
            "things run together; use a smaller lr or head_lr_scale, or a larger batch_size"
        )
    return (
        f"nothing is learnt so far: the loss is {j:.3f} at step {step}, and {guessing:.3f} means codes "
        "near 0; raise lr, train longer, and check that features are standardised and labels fit their rows"
    )


def explain_codes(measured: dict[str, Any]) -> list[str]:
    """Sentences about codes measured on many rows (see ``measure``)."""
    found = []
    rows, distinct, classes = measured["rows"], measured["distinct"], measured.get("classes") or 2
    if rows > classes and distinct < min(classes, rows):
        found.append(
            f"only {distinct} different codes on {rows:,} rows of {classes} classes: classes share a code; "
            "use a smaller lr or more bits, a longer first stage, or class_weights=global for rare pairs"
        )
    n_bits, dead = measured["n_bits"], measured["dead_bits"]
    if rows >= ENOUGH_ROWS and dead >= max(1, MANY_DEAD * n_bits):
        found.append(
            f"{dead} of {n_bits} bits are equal on nearly all rows and carry nothing: use a smaller lr, "
            "fewer bits, or class_weights=global"
        )
    return found
