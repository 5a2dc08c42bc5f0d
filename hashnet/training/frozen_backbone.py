"""What is computed with the backbone frozen: standardisation, and training of the hash layer alone.

For the latter a frozen backbone sees each picture once, not once per epoch: a model of the backbone
``features`` (the probe) with the same head learns on the backbone's features, and the picture model takes
over its head and its standardisation. With ``freeze_backbone`` that is the whole training. It also precedes
the training of a pretrained backbone, as gradients through a random hash layer would spoil what it knows.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import distributed

from hashnet.io import Progress
from hashnet.losses import Loss
from hashnet.models import BatchedInference, HashModel, build_model
from hashnet.training.distributed import world
from hashnet.training.history import StageRecord
from hashnet.training.inputs import ArraySource, InputSource
from hashnet.training.loop import fit
from hashnet.training.sampling import Sampler
from hashnet.training.schedule import plain
from hashnet.training.train_config import KINDS, TrainConfig

BATCH_ROWS = 64
SAMPLE_ROWS = 2048  # pictures for mean and standard deviation: enough, and seconds even on a CPU
MIN_HEAD_STEPS = 500  # on few pictures


def standardise(
    model: HashModel, source: InputSource | np.ndarray, *, seed: int = 0, device: str | torch.device = "cpu"
) -> None:
    """Sets the model's feature mean and standard deviation from its training rows.

    All vectors count; of pictures, the backbone's features of a seeded sample of 2,048.
    """
    source = ArraySource(source) if isinstance(source, np.ndarray) else source
    if model.modality == "features":
        assert isinstance(source, ArraySource)
        mean, std = source.moments()
    else:
        order = np.random.default_rng([seed, 0]).permutation(len(source))
        was_training = model.training
        features, usable = _features(
            model, source, np.sort(order[:SAMPLE_ROWS]), device
        )  # sorted: near in storage
        model.train(was_training)
        sample = features[torch.from_numpy(usable)].double()
        mean, std = sample.mean(dim=0), sample.std(dim=0, correction=0)
    like = model.feature_mean
    model.set_standardisation(mean.to(like), std.to(like))


def _features(
    model: HashModel,
    source: InputSource,
    rows: np.ndarray,
    device: str | torch.device,
    progress: Progress | None = None,
    n_workers: int = 1,
) -> tuple[torch.Tensor, np.ndarray]:
    """The backbone's features, float32 (n, n_features), and bool (n,): rows whose picture can be read.

    ``progress`` counts for all workers, which advance together.
    """
    usable = np.zeros(len(rows), dtype=bool)

    def read(start: int, stop: int) -> torch.Tensor:
        inputs, usable[start:stop] = source.batch(rows[start:stop], epoch=0)
        return inputs

    def done(n: int) -> None:
        if progress is not None:
            progress.update(min(n_workers * n, len(source) - progress.done))

    infer = BatchedInference(model, "features", batch_rows=BATCH_ROWS, device=device)
    return infer(read, len(rows), done), usable


def backbone_features(model: HashModel, source: InputSource, device: str | torch.device) -> ArraySource:
    """The backbone's features of every picture's centre crop, of which each worker computes its share.

    A picture that cannot be read has zeros and stays marked as unusable.
    """
    rank, n_workers = world()
    per_worker = -(-len(source) // n_workers)
    rows = np.arange(rank * per_worker, min((rank + 1) * per_worker, len(source)))
    progress = Progress(len(source), "pictures", "features of the frozen backbone") if rank == 0 else None
    values, usable = _features(model, source, rows, device, progress, n_workers)
    if progress:
        progress.close()
    features = torch.zeros(per_worker, model.spec.n_features + 1)  # the last column: 1 for a usable row
    features[: len(rows), :-1] = values
    features[: len(rows), -1] = torch.from_numpy(usable).float()
    if n_workers > 1:
        on = features.to(device) if distributed.get_backend() == "nccl" else features
        shares = [torch.empty_like(on) for _ in range(n_workers)]
        distributed.all_gather(shares, on)
        features = torch.cat(shares).cpu()
    features = features[: len(source)]
    usable = features[:, -1].numpy() > 0.5
    return ArraySource((features[:, :-1] * features[:, -1:]).numpy(), usable)


def train_head_first(
    model: HashModel,
    source: InputSource,
    loss: Loss,
    config: TrainConfig,
    sampler: Sampler | None,
    device: str | torch.device,
) -> StageRecord:
    """Trains the head on the frozen backbone's features at beta = 1; returns the record of that stage.

    Its J and L are None where no step was logged, as on every worker but the first.
    """
    probe, features = probe_of(model), backbone_features(model, source, device)
    if config.standardise and world()[0] == 0:
        standardise(probe, features)
    n_rows = sampler.steps_per_epoch * config.batch_size if sampler else len(features)  # per epoch
    epochs = max(int(config.head_epochs or 0), -(-MIN_HEAD_STEPS * config.batch_size // max(n_rows, 1)))
    settings = dataclasses.replace(
        config.fit_settings(), lr=KINDS["features"].lr, train_batchnorm=False, checkpoint_every=0
    )
    history = fit(probe.to(device), features, loss, plain(epochs), settings, sampler=sampler)
    adopt_head(model, probe)
    return history.stages[-1]


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


def adopt_head(model: HashModel, probe: HashModel) -> None:
    """Gives the picture model the head and the standardisation of the probe."""
    model.head.load_state_dict(probe.head.state_dict())
    model.set_standardisation(probe.feature_mean, probe.feature_std)
