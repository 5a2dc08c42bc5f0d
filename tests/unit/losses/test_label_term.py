"""The label term: what it adds to the pair loss, by loops, and that its classifier learns with the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hashnet.errors import ConfigError
from hashnet.io import config as configs
from hashnet.losses import LabelSimilarity, LabelTermLoss, PairwiseLoss, make_loss, variant_for
from hashnet.models import build_model
from hashnet.training import FitSettings, TrainConfig, fit, plain, standardise
from hashnet.training.checkpoints import Checkpoints

BITS = 16
LABELS = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1], [1, 0, 1]])


def test_value_is_the_pair_loss_and_a_cross_entropy():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, BITS)))
    rows, valid = torch.arange(6), torch.tensor([True] * 5 + [False])
    similarity = LabelSimilarity(LABELS)
    pairs = PairwiseLoss(similarity, BITS)
    loss = LabelTermLoss(pairs, similarity.labels, BITS, weight=0.5)
    loss.module = loss.module.double()
    torch.nn.init.normal_(loss.module.weight)
    total = 0.0
    for i in range(5):
        for c in range(3):
            q = (loss.module.weight[c] @ torch.tanh(2 * logits[i]) + loss.module.bias[c]).item()
            p = 1 / (1 + math.exp(-q))
            total -= math.log(p if LABELS[i, c] else 1 - p)
    per_row = LABELS.sum() / 6
    expected = pairs(logits, rows, valid, 2.0).item() + 0.5 * total / (5 * per_row)
    assert loss(logits, rows, valid, 2.0).item() == pytest.approx(expected)


def _fit(path=None, epochs=6):
    rng = np.random.default_rng(1)
    y = rng.integers(0, 3, 60)
    x = (rng.normal(size=(3, 8))[y] * 2 + rng.normal(size=(60, 8))).astype(np.float32)
    torch.manual_seed(0)
    model = build_model("features", BITS, n_features=8)
    standardise(model, x)
    config = TrainConfig(run="", variant="hashnet+l", n_bits=BITS)
    loss = make_loss(config, LabelSimilarity(y))
    settings = FitSettings(batch_size=20, seed=0)
    stages = plain(epochs)
    fit(model, x, loss, stages, settings, checkpoints=Checkpoints(path) if path else None)
    return model, loss


def test_the_classifier_learns_and_is_part_of_a_checkpoint(tmp_path):
    _, loss = _fit(str(tmp_path / "checkpoints"))
    assert loss.module.weight.abs().max() > 0.01
    _, again = _fit(str(tmp_path / "checkpoints"))  # finished: nothing is trained, the weights are read
    assert torch.equal(again.module.weight, loss.module.weight)


def test_other_rows_are_measured_by_the_pair_loss():
    config = TrainConfig(run="", variant="hashnet+c+l", n_bits=BITS)
    assert isinstance(make_loss(config, LabelSimilarity(LABELS), trained=False), PairwiseLoss)


def test_pairs_alone_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="hashnet\\+l learns from the labels"):
        configs.load(TrainConfig, None, [f"run={tmp_path}", "variant=hashnet+l", f"pairs={tmp_path}/p.csv"])


def test_variant_for_the_data():
    assert variant_for(None) == "hashnet"
    assert variant_for(LABELS[[0, 2, 3]]) == "hashnet+l"
    assert variant_for(LABELS) == "hashnet+c+l"  # 8 labels on 6 rows


@pytest.mark.parametrize(("twice", "variant"), [(1, "hashnet+l"), (20, "hashnet+l"), (21, "hashnet+c+l")])
def test_a_few_rows_with_two_labels_do_not_make_data_multi_label(twice, variant):
    labels = np.eye(4, dtype=np.uint8)[np.arange(240) % 4]
    labels[200:] = 0  # rows without a label do not count: up to 220 labels on 200 rows are 1.1 each
    labels[:twice] |= np.array([1, 0, 0, 0], dtype=np.uint8)
    labels[:twice:4, 1] = 1
    assert labels.sum() == 200 + twice
    assert variant_for(labels) == variant
