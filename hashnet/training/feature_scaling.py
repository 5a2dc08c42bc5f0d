"""The training features' mean and standard deviation, kept inside the model."""

from __future__ import annotations

import numpy as np
import torch

from hashnet.models import HashModel
from hashnet.training.sources import ArraySource, Source

SAMPLE_ROWS, BATCH = 2048, 64  # of pictures: enough for a mean, seconds even on a CPU


def standardise(
    model: HashModel, source: Source | np.ndarray, *, seed: int = 0, device: str | torch.device = "cpu"
) -> None:
    """Sets the model's feature mean and std from its training rows.

    Vectors are all looked at. Of pictures, a seeded sample of 2,048 goes through the backbone.
    """
    source = ArraySource(source) if isinstance(source, np.ndarray) else source
    if model.modality == "features" and isinstance(source, ArraySource):
        mean, std = source.moments()
    else:
        mean, std = _sampled(model, source, seed, device)
    like = model.feature_mean
    model.set_standardisation(mean.to(like), std.to(like))


@torch.no_grad()
def _sampled(
    model: HashModel, source: Source, seed: int, device: str | torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    order = np.random.default_rng([seed, 0]).permutation(len(source))
    rows = np.sort(order[:SAMPLE_ROWS])  # near one another in storage
    was_training = model.training
    model.to(device).eval()
    found = []
    for start in range(0, len(rows), BATCH):
        inputs, usable = source.batch(rows[start : start + BATCH], epoch=0)
        features = model.raw_features(inputs.to(device)).double().cpu()
        found.append(features[torch.from_numpy(usable)])
    model.train(was_training)
    features = torch.cat(found)
    return features.mean(dim=0), features.std(dim=0, correction=0)
