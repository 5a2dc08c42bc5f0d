"""Training the hash layer alone on pictures: the frozen backbone sees each picture once, not once an epoch.

A model of the backbone ``features`` with the same head learns on the backbone's features; then the picture
model takes its head and its standardisation over. With ``freeze_backbone`` that is all. Before a
pretrained backbone is trained it comes first, too: gradients through a random hash layer would only spoil
what the backbone knows.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import distributed

from hashnet.io import Progress
from hashnet.losses import Loss
from hashnet.models import HashModel, build_model
from hashnet.training.config import KINDS, TrainConfig
from hashnet.training.feature_scaling import standardise
from hashnet.training.gather import world
from hashnet.training.loop import fit
from hashnet.training.sampling import Sampler
from hashnet.training.schedule import plain
from hashnet.training.sources import ArraySource, Source

BATCH = 64
HEAD_STEPS = 500  # at least, on few pictures


def train_head_first(
    model: HashModel,
    source: Source,
    loss: Loss,
    config: TrainConfig,
    sampler: Sampler | None,
    device: str | torch.device,
) -> dict[str, float | None]:
    """Trains the head on the frozen backbone's features at beta = 1; returns the last epoch's J and L.

    None where no step of it was logged, as on every worker but the first.
    """
    probe, features = probe_of(model), backbone_features(model, source, device)
    if config.standardise and world()[0] == 0:
        standardise(probe, features)
    n_rows = sampler.steps_per_epoch * config.batch_size if sampler else len(features)  # of an epoch
    epochs = max(int(config.head_epochs or 0), -(-HEAD_STEPS * config.batch_size // max(n_rows, 1)))
    settings = dataclasses.replace(
        config.fit_settings(), lr=KINDS["features"]["lr"], train_batchnorm=False, checkpoint_every=0
    )
    history = fit(probe, features, loss, plain(epochs), settings, sampler=sampler, device=device)
    adopt(model, probe)
    return {name: history.stages[-1][name] for name in ("J", "L")}


def probe_of(model: HashModel) -> HashModel:
    """A model of vectors with the head, dropout and code length of a picture model."""
    arguments = model.arguments
    return build_model(
        "features",
        model.n_bits,
        n_features=model.spec.n_features,
        dropout=arguments["dropout"],
        head=arguments["head"],
    )


def adopt(model: HashModel, probe: HashModel) -> None:
    """Gives the picture model what the probe has learnt."""
    model.head.load_state_dict(probe.head.state_dict())
    model.set_standardisation(probe.feature_mean, probe.feature_std)


@torch.no_grad()
def backbone_features(model: HashModel, source: Source, device: str | torch.device) -> ArraySource:
    """The backbone's features of every picture's centre, each worker computing its share.

    Pictures that cannot be read have zeros, and stay marked as unusable.
    """
    rank, n_workers = world()
    per_worker = -(-len(source) // n_workers)
    rows = np.arange(rank * per_worker, (rank + 1) * per_worker)
    model.to(device).eval()
    features = torch.zeros(per_worker, model.spec.n_features + 1)  # the last column says whether it is usable
    # one worker speaks, for all: they advance together
    progress = Progress(len(source), "pictures", "features of the frozen backbone") if rank == 0 else None
    for start in range(0, per_worker, BATCH):
        chosen = rows[start : start + BATCH]
        chosen = chosen[chosen < len(source)]
        if len(chosen):
            inputs, usable = source.batch(chosen, epoch=0)
            place = slice(start, start + len(chosen))
            features[place, :-1] = model.raw_features(inputs.to(device)).float().cpu()
            features[place, -1] = torch.from_numpy(usable).float()
            if progress:
                progress.update(min(n_workers * len(chosen), len(source) - progress.done))
    if progress:
        progress.close()
    if n_workers > 1:
        on = features.to(device) if distributed.get_backend() == "nccl" else features
        parts = [torch.empty_like(on) for _ in range(n_workers)]
        distributed.all_gather(parts, on)
        features = torch.cat(parts).cpu()
    features = features[: len(source)]
    usable = features[:, -1].numpy() > 0.5
    return ArraySource((features[:, :-1] * features[:, -1:]).numpy(), usable)
