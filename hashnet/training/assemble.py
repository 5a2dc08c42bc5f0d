"""What a resolved configuration is made of: the model, the similarity of its rows, the loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hashnet.data import Manifest, PairTable
from hashnet.losses import (
    CNNHLoss,
    DHNLoss,
    DNNHLoss,
    LabelSimilarity,
    Loss,
    PairwiseLoss,
    Similarity,
    TableSimilarity,
    similarity_codes,
)
from hashnet.models import HashModel, build_model, try_crop
from hashnet.training.config import TrainConfig
from hashnet.training.data import Rows
from hashnet.training.sampling import PairSampler, Sampler


def make_model(config: TrainConfig, manifest: Manifest) -> HashModel:
    """The model a resolved configuration describes, for this manifest's rows."""
    model = build_model(
        str(config.backbone),
        config.n_bits,
        n_features=manifest.n_features,
        hidden=config.hidden,
        weights=config.weights,
        download=config.download,
        dropout=float(config.dropout or 0),
        resize=config.resize,
        crop=config.crop,
        flip=config.flip,
        head="slices" if config.variant == "dnnh" else "linear",
    )
    if config.crop is not None and manifest.modality == "image":
        try_crop(str(config.backbone), model.backbone, config.crop)  # here, where it can still be another
    return model


def make_similarity(
    config: TrainConfig, manifest: Manifest, rows: Rows, device: str | torch.device
) -> tuple[Similarity, Sampler | None]:
    """Similarity of the training rows by labels, or by the pairs table with batches drawn around pairs."""
    if config.pairs is None:
        assert rows.labels is not None
        return LabelSimilarity(rows.labels, device), None
    table = PairTable.open(config.pairs, manifest)
    a, b = (np.searchsorted(rows.row_ids, ids) for ids in (table.row_a, table.row_b))
    similarity = TableSimilarity(a, b, table.similar, len(rows), device)
    return similarity, PairSampler(a, b, config.batch_size, config.seed)


def make_loss(config: TrainConfig, similarity: Similarity) -> Loss:
    """The loss of the configured variant."""
    return LOSSES[config.variant](config, similarity)


def _pairwise(config: TrainConfig, similarity: Similarity) -> Loss:
    return PairwiseLoss(
        similarity,
        config.n_bits,
        alpha=config.alpha,
        weights=config.pair_weights,
        continuous=config.continuous_on,
    )


def _dhn(config: TrainConfig, similarity: Similarity) -> Loss:
    return DHNLoss(similarity, config.n_bits, alpha=config.alpha, quantisation=config.quantisation)


def _dnnh(config: TrainConfig, similarity: Similarity) -> Loss:
    return DNNHLoss(similarity, margin=config.margin, epsilon=config.epsilon)


def _cnnh(config: TrainConfig, similarity: Similarity) -> Loss:
    assert isinstance(similarity, LabelSimilarity)
    codes, _ = similarity_codes(similarity.labels.cpu().numpy(), config.n_bits, config.seed)
    return CNNHLoss(codes, similarity.labels.device)


LOSSES: dict[str, Callable[[TrainConfig, Similarity], Loss]] = {
    "hashnet": _pairwise,
    "hashnet+c": _pairwise,
    "hashnet-w": _pairwise,
    "hashnet-sgn": _pairwise,
    "dhn": _dhn,
    "dnnh": _dnnh,
    "cnnh": _cnnh,
}
