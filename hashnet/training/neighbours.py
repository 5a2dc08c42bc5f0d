"""Learning from neighbours in an embedding: its vectors, a start from ITQ, and recall on held-out rows.

The hash layer starts as ITQ's hyperplanes, whose codes already keep many neighbours, and learns from there.
Recall of neighbours on held-out rows decides which weights are kept, those of the start included: learned
codes are not behind ITQ on those rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch

from hashnet.codes import pack_signs
from hashnet.data import Manifest, feature_matrix
from hashnet.errors import DataError
from hashnet.models import HashModel
from hashnet.training.diagnostics import logits_of
from hashnet.training.frozen_backbone import backbone_features, features_of_run
from hashnet.training.inputs import ArraySource, open_rows
from hashnet.training.train_config import TrainConfig

K, WITHIN, SHARE = 10, 100, 0.1  # recall of the K nearest within 100 rows, of few rows within a tenth
MAX_QUERIES, ITQ_ROWS = 1000, 20_000


def embedding(config: TrainConfig, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """(row ids int64 (n,), vectors float32 (n, d)) of the training rows; unreadable pictures are left out.

    The vectors of a manifest, or the features of a resolved configuration's frozen backbone, which are kept
    for the training.
    """
    if manifest.modality == "features":
        table = manifest.read("train", ["row_id", "feature"])
        return table["row_id"].to_numpy(), feature_matrix(table)
    from hashnet.training.trainer import make_model

    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    model = make_model(config, manifest).to(device).eval()
    rows = open_rows(manifest, "train", model, config)
    source = backbone_features(features_of_run(config, model, manifest, device), rows.source, device)
    return rows.row_ids[source.usable], source.array.numpy()[source.usable]


def start_from_itq(model: HashModel, source: ArraySource, seed: int = 0) -> None:
    """Gives the hash layer of a model of vectors, whose scaling is set, the hyperplanes that ITQ finds.

    Logits are scaled to a mean size of 1, where tanh bends but has not saturated.
    """
    from hashnet.baselines import ITQ, BaselineWarning

    usable = np.flatnonzero(source.usable)
    chosen = np.sort(np.random.default_rng([seed, 1]).permutation(usable)[:ITQ_ROWS])
    with torch.no_grad():
        device = model.feature_mean.device
        x = model.eval().features(source.array[torch.from_numpy(chosen)].to(device)).cpu().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BaselineWarning)  # constant columns, more bits than columns
        itq = ITQ(n_bits=model.n_bits, seed=seed).fit(x)
    directions = np.zeros((x.shape[1], model.n_bits))
    directions[itq.columns_] = itq.directions_
    directions /= np.abs((x - itq.mean_) @ directions).mean()
    layer = model.head.fch
    assert isinstance(layer, torch.nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(directions.T))
        layer.bias.copy_(torch.from_numpy(-itq.mean_ @ directions))


def held_out_recall(
    learner: HashModel, kept: ArraySource, held: ArraySource, device: str | torch.device
) -> Callable[[], float]:
    """A function that measures the learner as it is: recall of the nearest kept rows of held-out rows."""
    from hashnet.metrics import exact_neighbours, neighbour_report

    some = np.flatnonzero(held.usable)[:MAX_QUERIES]
    rows = np.flatnonzero(kept.usable)
    if len(some) < 2 or len(rows) < K:
        raise DataError(f"{len(some)} held-out rows and {len(rows)} others are too few to measure recall on")
    queries = ArraySource(held.array.numpy()[some])
    truth = exact_neighbours(queries.array.numpy(), [kept.array.numpy()[rows]], K)
    within = max(K, min(WITHIN, round(SHARE * len(rows))))

    def measure() -> float:
        codes = [pack_signs(logits_of(learner, source, device)[0]) for source in (queries, kept)]
        return neighbour_report(codes[0], codes[1][rows], truth, within).recall

    return measure
