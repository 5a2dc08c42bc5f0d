"""Learning from neighbours in an embedding: its vectors, a start from ITQ, and recall on held-out rows.

The hash layer starts as ITQ's hyperplanes, whose codes already keep many neighbours, and learns from there.
Recall of neighbours on held-out rows decides which weights are kept, those of the start included. They are
given up only for weights whose recall is higher by more than its standard error, so that few rows, on which
anything looks better by chance, keep ITQ.
"""

from __future__ import annotations

import warnings

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


class HeldOutRecall:
    """Measures a learner as it is: recall of the nearest ``kept`` rows of ``held`` out ones.

    Made before training; ``start`` is the recall of each held-out row, float (q,), at that point.
    """

    def __init__(
        self, learner: HashModel, kept: ArraySource, held: ArraySource, device: str | torch.device
    ) -> None:
        from hashnet.metrics import exact_neighbours

        self.learner, self.device, self.kept = learner, device, kept
        some = np.flatnonzero(held.usable)[:MAX_QUERIES]
        self.rows = np.flatnonzero(kept.usable)
        if len(some) < 2 or len(self.rows) < K:
            raise DataError(
                f"{len(some)} held-out rows and {len(self.rows)} others are too few to measure recall on"
            )
        self.queries = ArraySource(held.array.numpy()[some])
        self.truth = exact_neighbours(self.queries.array.numpy(), [kept.array.numpy()[self.rows]], K)
        self.within = max(K, min(WITHIN, round(SHARE * len(self.rows))))
        self.weights = {name: value.clone() for name, value in learner.state_dict().items()}
        self.start = self.recalls()

    def recalls(self) -> np.ndarray:
        """float (q,): the recall of each held-out row."""
        from hashnet.metrics import neighbour_report

        sources = (self.queries, self.kept)
        codes = [pack_signs(logits_of(self.learner, source, self.device)[0]) for source in sources]
        return np.array(neighbour_report(codes[0], codes[1][self.rows], self.truth, self.within).recalls)

    def __call__(self) -> float:
        return float(self.recalls().mean())

    def settle(self) -> float:
        """The recall after training; puts the learner back to its start unless it is clearly better."""
        gain = self.recalls() - self.start
        if gain.mean() <= gain.std(ddof=1) / len(gain) ** 0.5:
            self.learner.load_state_dict(self.weights)
        return self()
