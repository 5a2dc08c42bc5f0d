"""The search for a learning rate: it finds a usable one, keeps it, and does without labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hashnet.models import build_model
from hashnet.training import ArraySource, TrainConfig, standardise
from hashnet.training import rate_search as search
from hashnet.training.train_config import KINDS

DEFAULT = KINDS["features"].lr


@pytest.fixture
def problem(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "STEPS", 40)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 300)
    x = (rng.normal(size=(4, 12))[y] * 2 + rng.normal(size=(300, 12))).astype(np.float32)
    torch.manual_seed(0)
    model = build_model("features", 16, n_features=12)
    standardise(model, x)
    return TrainConfig(run=str(tmp_path), n_bits=16), model, ArraySource(x), np.eye(4, dtype=bool)[y]


def test_the_default_is_kept_where_others_are_no_better(problem, monkeypatch):
    scores = {DEFAULT: 0.5, DEFAULT / 3: 0.505, DEFAULT * 3: 0.4}
    monkeypatch.setattr(search._Trials, "score", lambda self, lr: scores[lr])
    assert search.find_lr(*problem) == DEFAULT


def test_a_clearly_better_rate_is_taken_and_kept(problem, monkeypatch):
    scores = {DEFAULT: 0.5, DEFAULT / 3: 0.6, DEFAULT * 3: -1.0}  # the last one diverged
    monkeypatch.setattr(search._Trials, "score", lambda self, lr: scores[lr])
    assert search.find_lr(*problem) == pytest.approx(DEFAULT / 3)
    monkeypatch.setattr(search._Trials, "score", None)  # a run that goes on does not search again
    assert search.find_lr(*problem) == pytest.approx(DEFAULT / 3)


def test_trials_train_copies_and_measure_held_out_rows(problem):
    config, model, source, labels = problem
    before = model.head.fch.weight.clone()
    trials = search._Trials(config, model, source, labels, "cpu")
    assert not set(trials.rows) & set(trials.held)
    assert trials.score(DEFAULT) > 0.7
    assert trials.score(1e30) == -1  # diverged: never chosen
    assert torch.equal(model.head.fch.weight, before)


def test_without_labels_the_default_is_used(problem):
    config, model, source, _ = problem
    assert search.find_lr(config, model, source, None) == DEFAULT
