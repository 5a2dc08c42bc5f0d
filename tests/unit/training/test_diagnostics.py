"""Figures of codes, and collapse that is detected and explained."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch

from hashnet.losses.dhn import DHNLoss
from hashnet.losses.methods import METHODS, make_loss
from hashnet.losses.pairwise import LabelSimilarity
from hashnet.models import build_model
from hashnet.training import diagnostics
from hashnet.training.checkpoints import History, StageRecord, StepRecord
from hashnet.training.diagnostics import (
    StepProgress,
    explain_codes,
    explain_loss,
    held_out_score,
    measure,
)
from hashnet.training.inputs import ArraySource
from hashnet.training.train_config import TrainConfig
from hashnet.training.trainer import _warnings


def test_loss_near_ln_2_means_that_nothing_is_learnt():
    assert explain_loss(0.3, 10) is None
    assert "nothing is learnt so far: the loss is 0.690" in explain_loss(0.69, 10)
    assert "raise lr" in explain_loss(0.69, 10)
    assert "smaller lr" in explain_loss(4.0, 10)


def test_the_best_stage_says_whether_something_was_learnt():
    """The loss of a few hard bits may exceed that of codes of 0, although they rank well."""
    codes = measure(torch.eye(16) * 2 - 1, 1.0)
    stages = [StageRecord(n, 2.0**n, 0.1, n * 10, 10, 1, 1.0, J=j) for n, j in enumerate((0.5, 0.74))]
    assert _warnings(stages, codes, math.log(2)) == []
    assert "nothing is learnt" in _warnings(stages[1:], codes, math.log(2))[0]


def test_guessing_includes_the_quantisation_of_dhn():
    similarity = LabelSimilarity([0, 0, 1])
    loss = DHNLoss(similarity, 8, quantisation=0.3)
    at_zero = float(loss(torch.zeros(3, 8), torch.arange(3), torch.ones(3, dtype=torch.bool), 1.0))
    assert loss.guessing == pytest.approx(at_zero)  # ln 2 + 0.3 log cosh 1 = 0.823
    assert explain_loss(0.78, 10, loss.guessing) is None  # better than that
    assert "nothing is learnt" in explain_loss(at_zero, 10, loss.guessing)
    made = {
        name: make_loss(TrainConfig(run="r", variant=name, quantisation=0.3), similarity) for name in METHODS
    }
    assert made["dhn"].guessing == loss.guessing
    assert made["hashnet"].guessing == math.log(2)
    assert (made["dnnh"].guessing, made["cnnh"].guessing) == (None, None)


def test_equal_codes_are_a_collapse():
    measured = measure(torch.ones(100, 16), 1.0, classes=10)
    assert (measured.distinct, measured.dead_bits) == (1, 16)
    texts = explain_codes(measured)
    assert any("only 1 different codes on 100 rows of 10 classes" in text for text in texts)
    assert any("16 of 16 bits are equal" in text for text in texts)


def test_a_single_row_says_nothing_about_bits():
    assert explain_codes(measure(torch.ones(1, 16), 1.0, classes=1)) == []


def test_one_code_per_class_is_no_collapse():
    signs = torch.sign(torch.randn(10, 16, generator=torch.Generator().manual_seed(0)))
    assert explain_codes(measure(signs.repeat(10, 1), 1.0, classes=10)) == []


def test_measure_counts_by_hand():
    logits = torch.tensor([[0.0, 3.0, -3.0, 0.1] + [1.0] * 4, [5.0, -3.0, -3.0, 0.1] + [-1.0] * 4])
    measured = measure(logits, 2.0)
    relaxed = [abs(math.tanh(2 * v)) for v in logits.flatten().tolist()]
    assert measured.quantisation == pytest.approx(sum(1 - g for g in relaxed) / 16, rel=1e-5)
    assert measured.binary_share == sum(g > 0.99 for g in relaxed) / 16
    histogram = [sum(int(min(g * 100, 99.999)) == b for g in relaxed) for b in range(100)]
    assert measured.histogram == histogram
    assert measured.bit_balance == [1, 0.5, 0, 1, 0.5, 0.5, 0.5, 0.5]
    assert measured.dead_bits == 3
    assert measured.entropy == pytest.approx(5 / 8, abs=1e-6)
    assert (measured.J, measured.L) == (None, None)


def test_pictures_are_decoded_while_the_batch_before_them_is_computed(monkeypatch):
    """Each batch is computed only when the reading of the next one has begun; taking turns would never do."""
    monkeypatch.setattr(diagnostics, "BATCH_ROWS", 8)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    labels = np.eye(2, dtype=np.uint8)[np.arange(40) % 2]
    begun = [threading.Event() for _ in range(5)]

    class Decoded:
        def __len__(self):
            return len(x)

        def batch(self, rows, epoch):
            begun[rows[0] // 8].set()
            return torch.from_numpy(x[rows]), rows != 3

    torch.manual_seed(0)
    model = build_model("features", 16, n_features=4)
    expected = held_out_score(model, ArraySource(x, np.arange(40) != 3), labels, "cpu")
    computed = iter(range(5))

    def wait_for_the_next(*_):
        i = next(computed)
        assert i == 4 or begun[i + 1].wait(timeout=30), "nothing was read meanwhile"

    model.register_forward_pre_hook(wait_for_the_next)
    found = held_out_score(model, Decoded(), labels, "cpu")
    assert next(computed, None) is None
    assert (found.value, found.ap.tolist()) == (expected.value, expected.ap.tolist())


def test_progress_shows_means_of_the_last_rows_and_counts_epochs_from_one(monkeypatch, capsys):
    monkeypatch.setattr("hashnet.io.events.LINE_EVERY_S", 0.0)
    with StepProgress() as progress:
        for step, j in enumerate((0.25, 0.0, 0.5)):
            progress.step(StepRecord(step, epoch=step // 2, stage=0, beta=1.0, J=j, L=1.0, total_steps=3))
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "epoch 1, " in first
    assert "J 0.2500, L 1.0000" in first
    assert "epoch 2, " in last
    assert "J 0.2500" in last  # (0.25 + 0 + 0.5) / 3, not 0.5


def test_a_stage_that_ended_between_rows_has_the_figures_of_its_last_one():
    history = History()
    for step, j in ((0, 0.5), (10, 0.25), (20, 0.125)):
        history.add(StepRecord(step, 0, 0, 1.0, J=j))
    assert history.means_since(5, 0)["J"] == 0.1875  # (0.25 + 0.125) / 2
    assert history.means_since(21, 0)["J"] == 0.125
    assert history.means_since(25, 21)["J"] is None  # that row is of the stage before
