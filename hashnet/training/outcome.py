"""What a training run came to: J, L and |g| on database rows, MAP on rows it has not seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hashnet.codes import pack_signs
from hashnet.data import Manifest
from hashnet.losses import LabelSimilarity
from hashnet.models import HashModel
from hashnet.training.assemble import make_loss
from hashnet.training.config import TrainConfig
from hashnet.training.data import open_rows, sample
from hashnet.training.measure import logits_of, measure


def final_figures(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    beta: float,
    device: str | torch.device,
) -> dict[str, Any]:
    """``measured``: J, L, |g| and bits at the last finite beta on a sample of the database rows."""
    for split in ("database", "train"):  # the second where the first has no row that can be used
        chosen = sample(manifest.count(split), config.measure_rows or 1, config.seed)
        rows = open_rows(manifest, split, model, config, positions=chosen, lenient=True)
        logits, usable = logits_of(model, rows.source, device=device)
        if usable.any():
            break
    labels = rows.labels[usable] if rows.labels is not None else None
    loss, classes = None, None
    if labels is not None:
        classes = int(labels.any(axis=0).sum())
        # CNNH's target codes exist for the training rows alone: there is no loss to measure elsewhere.
        if config.pairs is None and len(labels) > 1 and config.variant != "cnnh":
            known = LabelSimilarity(labels)
            if known.counts.n_similar and known.counts.n_dissimilar:
                loss = make_loss(config, known)
    measured = measure(logits[torch.from_numpy(usable)], beta, loss, classes)
    short = {name: measured[name] for name in ("quantisation", "binary_share", "distinct")}
    return {"measured": {**measured, "split": split}, **short}


def split_map(
    config: TrainConfig, model: HashModel, manifest: Manifest, device: str | torch.device
) -> float | None:
    """MAP@map_k (`retrieved`, 0 for a query without a hit) of the queries against the database.

    None where no row of one of them can be used.
    """
    from hashnet.metrics import evaluate

    query = _codes(config, model, manifest, "query", None, device)
    database = _codes(config, model, manifest, "database", None, device)
    if not (len(query[0]) and len(database[0])):
        return None
    return float(evaluate(*query, *database, config.map_k).map)


def validation_map(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    held: np.ndarray,
    device: str | torch.device,
) -> float | None:
    """Validation MAP (see ``hashnet.metrics.validation_map``) of the held-out training rows."""
    from hashnet.metrics import validation_map as held_out_map

    return held_out_map(*_codes(config, model, manifest, "train", held, device))


def _codes(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    split: str,
    positions: np.ndarray | None,
    device: str | torch.device,
) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and multi-hot labels of the usable rows of a split."""
    rows = open_rows(manifest, split, model, config, positions=positions, lenient=True)
    logits, usable = logits_of(model, rows.source, device=device)
    assert rows.labels is not None
    return pack_signs(logits[torch.from_numpy(usable)]), rows.labels[usable]
