"""What is computed with the backbone frozen: the scale of the features, training of the head alone, and
what lies below the blocks that learn.

For the latter a frozen backbone sees each picture once, not once per epoch: a model of the backbone
``features`` (the probe) with the same head learns on the backbone's features, and the picture model takes
over its head and its scaling. With ``freeze_backbone`` that is the whole training. It also precedes
the training of a pretrained backbone, as gradients through a random hash layer would spoil what it knows.

With ``train_last`` the blocks below the last ones are frozen, too, and what they give is computed once for
each of a few augmented views of every picture: a model of the last blocks (``last_blocks``), which shares
their weights with the picture model, learns on these activations.
"""

from __future__ import annotations

import copy
import dataclasses
import logging

import numpy as np
import torch
from torch import distributed, nn

from hashnet.data import Manifest
from hashnet.encoding import BackboneFeatures
from hashnet.io import Progress
from hashnet.losses import Loss
from hashnet.models import BackboneSpec, DividedBackbone, HashModel, build_model
from hashnet.run import Run
from hashnet.training.batches import Sampler, world
from hashnet.training.checkpoints import StageRecord
from hashnet.training.inputs import ArraySource, ImageSource, InputSource, ViewSource, picture_reader
from hashnet.training.loop import fit
from hashnet.training.schedule import plain
from hashnet.training.train_config import TrainConfig

logger = logging.getLogger(__name__)
ACTIVATION_BYTES = 4 << 30  # of all views: they are in memory while the last blocks learn
SAMPLE_ROWS = 2048  # for the mean and the scale: enough, and seconds even for pictures on a CPU
GRAM_ROWS = 1024  # of these, for products of all pairs
TYPICAL = 3.0  # deviation that a typical direction of the scaled features has, beside noise of 1
MIN_HEAD_STEPS = 500  # on few pictures


def standardise(
    model: HashModel,
    source: InputSource | np.ndarray,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> None:
    """Sets the model's feature mean and scale from a seeded sample of its training rows.

    Vectors are divided by one number, ``typical_deviation / TYPICAL``, which changes with no rotation. The
    columns of a picture's features are the backbone's own units, and each is divided by its deviation.
    """
    source = ArraySource(source) if isinstance(source, np.ndarray) else source
    order = np.random.default_rng([seed, 0]).permutation(len(source))
    rows = np.sort(order[:SAMPLE_ROWS])  # near each other in storage
    values: torch.Tensor | np.ndarray
    if model.modality == "features":
        values, usable = source.batch(rows, epoch=0)
    else:
        was_training = model.training
        features = BackboneFeatures(model, engine=torch.device(device).type)
        values, usable = features(rows, picture_reader(source, rows))
        model.train(was_training)
    sample = torch.as_tensor(values)[torch.from_numpy(usable)].double()
    mean = sample.mean(dim=0) if len(sample) else torch.zeros(sample.shape[1])
    centred = sample - mean
    if model.modality == "features":
        model.set_scaling(mean, typical_deviation(centred) / TYPICAL)
        return
    deviation = centred.square().mean(dim=0).sqrt()
    # A unit that hardly ever fires stays small: it would outweigh all others when it does.
    model.set_scaling(mean, torch.where(deviation > 1e-7 * mean.abs(), deviation, deviation.max() or 1.0))


def typical_deviation(centred: torch.Tensor) -> float:
    """The deviation of centred rows (n, d) along a typical direction; 1 where they are all equal.

    Its square is sum(w^2) / sum(w) = tr(C^2) / tr(C), the mean of the variances w of the principal
    components, each weighted by itself. So it changes neither with a rotation nor, much, when components of
    little variance are dropped, as the mean variance of the columns would. tr(C^2) is the mean of
    (x_i . x_j)^2 over pairs of rows: no covariance matrix is needed.
    """
    size = float(centred.square().mean()) ** 0.5
    if size == 0:
        return 1.0
    x = (centred[:: max(1, len(centred) // GRAM_ROWS)] / size).float()
    products, own, n = (x @ x.T).square(), x.square().sum(dim=1), len(x)
    pairs = float(products.sum() - own.square().sum()) / max(n * (n - 1), 1)
    return size * (pairs / float(own.mean())) ** 0.5 if pairs > 0 else size


def features_of_run(
    config: TrainConfig, model: HashModel, manifest: Manifest, device: str | torch.device, keep: bool = True
) -> BackboneFeatures | None:
    """The features of the model's backbone as it is now; None for a model of vectors.

    ``keep`` them on disk only where others will need them: before the backbone learns, or if it never does.
    """
    if model.modality == "features":
        return None
    folder = (config.cache or Run(config.run).cache) if keep else None
    engine, base_uri = torch.device(device).type, config.base_uri
    return BackboneFeatures(model, manifest, engine=engine, folder=folder, base_uri=base_uri)


def backbone_features(
    features: BackboneFeatures | None, source: InputSource, device: str | torch.device
) -> ArraySource:
    """The backbone's features of every picture's centre crop, of which each worker computes its share.

    A picture that cannot be read has zeros and stays marked as unusable.
    """
    assert features is not None
    return ArraySource(*_shared(features, source, device, "features of the frozen backbone"))


def _shared(
    features: BackboneFeatures, source: InputSource, device: str | torch.device, what: str, epoch: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(features of all rows, bool usable), of which each worker computes its share."""
    assert isinstance(source, ImageSource)
    rank, n_workers = world()
    per_worker = -(-len(source) // n_workers)
    rows = np.arange(rank * per_worker, min((rank + 1) * per_worker, len(source)))
    progress = Progress(len(source), "pictures", what) if rank == 0 else None

    def done(n: int) -> None:
        if progress is not None:  # it counts for all workers, which advance together
            progress.update(min(n_workers * n, len(source) - progress.done))

    values, usable = features(source.row_ids[rows], picture_reader(source, rows, epoch), done)
    if progress:
        progress.close()
    if n_workers == 1:
        return values, usable
    shared = torch.zeros(per_worker, features.width + 1)  # the last column: 1 for a usable row
    shared[: len(rows), :-1] = torch.from_numpy(values)
    shared[: len(rows), -1] = torch.from_numpy(usable).float()
    on = shared.to(device) if distributed.get_backend() == "nccl" else shared
    shares = [torch.empty_like(on) for _ in range(n_workers)]
    distributed.all_gather(shares, on)
    shared = torch.cat(shares).cpu()[: len(source)]
    return shared[:, :-1].numpy().astype(values.dtype), shared[:, -1].numpy() > 0.5


def last_blocks(model: HashModel, parts: DividedBackbone) -> HashModel:
    """A model of activations whose backbone is the last blocks; its tensors are the picture model's own."""
    arguments = model.arguments
    spec = BackboneSpec("activations", model.spec.n_features)
    learner = HashModel(
        parts.upper,
        spec,
        model.n_bits,
        head=model.head,
        dropout=arguments["dropout"],
        noise=arguments["noise"],
        arguments=arguments,
    )
    for name in ("feature_mean", "feature_std"):
        learner.register_buffer(name, getattr(model, name))
    return learner


def activations(
    config: TrainConfig,
    model: HashModel,
    parts: DividedBackbone,
    manifest: Manifest,
    source: InputSource,
    device: str | torch.device,
) -> ViewSource | None:
    """What lies below the last blocks, of ``config.views`` augmented views of every picture, kept on disk.

    View v is the picture as epoch v would show it. Fewer views where they would not fit in
    ``ACTIVATION_BYTES``; None where not even one does.
    """
    width = int(np.prod(parts.shape))
    n_views = min(config.views, ACTIVATION_BYTES // (2 * width * max(len(source), 1)))
    if n_views < 1:
        logger.warning("the activations of %d pictures are not kept: too large", len(source))
        return None
    if n_views < config.views:
        logger.warning("%d views of each picture instead of %d: more would not fit", n_views, config.views)
    assert model.spec.preprocess is not None
    preprocess = dataclasses.replace(model.spec.preprocess, average_flip=False)
    with torch.random.fork_rng(devices=[]):  # its head is never used
        below = HashModel(
            nn.Sequential(parts.lower, nn.Flatten()),
            BackboneSpec("image", width, preprocess=preprocess),
            n_bits=8,
        )
    features = BackboneFeatures(
        below,
        manifest,
        engine=torch.device(device).type,
        folder=config.cache or Run(config.run).cache,
        base_uri=config.base_uri,
        dtype=np.float16,
        max_bytes=ACTIVATION_BYTES,
    )
    views = np.zeros((n_views, len(source), width), dtype=np.float16)
    usable = np.ones(len(source), dtype=bool)
    for view in range(n_views):
        what = f"activations, view {view + 1} of {n_views}"
        views[view], good = _shared(features.of_view(config.seed, view), source, device, what, view)
        usable &= good
    return ViewSource(views, parts.shape, usable)


def head_settings(config: TrainConfig) -> TrainConfig:
    """The configuration that the head learns with before its backbone does: that of a frozen backbone, whose
    rate is searched. Warm-up and averaged weights are for blocks that learn."""
    return dataclasses.replace(config, lr=None, warmup=0.0, averaging=0.0)


def train_head_first(
    model: HashModel,
    probe: HashModel,
    lr: float,
    features: ArraySource,
    loss: Loss,
    config: TrainConfig,
    sampler: Sampler | None,
    device: str | torch.device,
) -> StageRecord:
    """Trains ``probe`` on the frozen backbone's features at beta = 1, and gives the model its head; returns
    the record of that stage.

    Its J and L are None where no step was logged, as on every worker but the first.
    """
    if config.scaling and world()[0] == 0:
        standardise(probe, features, seed=config.seed)
    n_rows = sampler.steps_per_epoch * config.batch_size if sampler else len(features)  # per epoch
    epochs = max(int(config.head_epochs or 0), -(-MIN_HEAD_STEPS * config.batch_size // max(n_rows, 1)))
    settings = dataclasses.replace(
        config.fit_settings(),
        lr=lr,
        train_batchnorm=False,
        checkpoint_every=0,
    )
    history = fit(probe.to(device), features, loss, plain(epochs), settings, sampler=sampler)
    adopt_head(model, probe)
    return history.stages[-1]


def probe_of(model: HashModel) -> HashModel:
    """A model of vectors with the kind of head, dropout and code length of a picture model."""
    same = ("hidden", "hidden_norm", "dropout", "noise", "head")
    return build_model(
        "features",
        model.n_bits,
        n_features=model.spec.n_features,
        **{name: model.arguments[name] for name in same},
    )


def adopt_head(model: HashModel, probe: HashModel) -> None:
    """Gives the picture model the head of the probe, which may have got a hidden layer, its noise and its
    scaling."""
    model.head = copy.deepcopy(probe.head).to(model.feature_mean.device)
    model.noise.level = probe.noise.level
    model.arguments |= {name: probe.arguments[name] for name in ("hidden", "hidden_norm", "noise")}
    model.set_scaling(probe.feature_mean, probe.feature_std)
