"""The search for noise and learning rate: it finds usable ones, keeps them, and does without labels."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch

import hashnet
from hashnet.io import storage
from hashnet.models import build_model
from hashnet.run import Run
from hashnet.training import ArraySource, TrainConfig
from hashnet.training import recipe_search as search
from hashnet.training.diagnostics import HeldOutScore
from hashnet.training.inputs import held_out
from hashnet.training.recipe_search import Recipe
from hashnet.training.train_config import KINDS

LR = KINDS["features"].lr
FIRST = Recipe(LR, 0.0)


def of(ap: list[float]) -> HeldOutScore:
    return HeldOutScore(float(np.mean(ap)), np.array(ap))


@pytest.fixture
def problem(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "STEPS", 40)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 300)
    x = (rng.normal(size=(4, 12))[y] * 2 + rng.normal(size=(300, 12))).astype(np.float32)
    torch.manual_seed(0)
    model = build_model("features", 16, n_features=12)
    config = TrainConfig(run=str(tmp_path), n_bits=16, hidden=0)
    return config, model, ArraySource(x), np.eye(4, dtype=bool)[y]


def trained_with(monkeypatch, scores):
    monkeypatch.setattr(search._Trials, "_train", lambda self, recipe, steps: scores[recipe])


def test_a_recipe_must_win_by_more_than_chance(problem, monkeypatch):
    # ap differs by +0.3 and -0.2: mean 0.05, standard error 0.25 / sqrt(2) = 0.18
    scores = {
        FIRST: of([0.5, 0.5]),
        Recipe(LR / 3, 0.0): of([0.8, 0.3]),
        Recipe(LR * 3, 0.0): None,
    }
    trained_with(monkeypatch, scores)
    assert search.find_recipe(*problem) == FIRST


def test_a_clearly_better_rate_is_taken_and_kept(problem, monkeypatch):
    better = Recipe(LR / 3, 0.0)
    trained_with(monkeypatch, {FIRST: of([0.5, 0.4]), better: of([0.6, 0.5]), Recipe(LR * 3, 0.0): None})
    assert search.find_recipe(*problem) == better
    trained_with(monkeypatch, {})  # a run that goes on does not search again
    assert search.find_recipe(*problem) == better


def test_what_a_search_chose_is_said_in_one_line(problem, monkeypatch, caplog, capsys):
    scores = {
        FIRST: of([0.5, 0.4]),
        (better := Recipe(LR / 3, 0.0)): of([0.6, 0.5]),
        Recipe(LR * 3, 0.0): None,
    }

    def train(self, recipe, steps):
        self._count(steps)
        return scores[recipe]

    monkeypatch.setattr(search._Trials, "_train", train)
    caplog.set_level("INFO", "hashnet.training.recipe_search")
    search.find_recipe(*problem)
    chose = f"chose lr {better.lr:.3g}, noise 0, hidden 0"
    assert caplog.messages.count(chose) == 1  # it was too short for a line of progress
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("hashnet.io.events.LINE_EVERY_S", 0.0)
    shutil.rmtree(problem[0].run)
    caplog.clear()
    search.find_recipe(*problem)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f", {chose}")
    assert chose not in caplog.messages


def test_the_best_of_several_winners_is_taken(problem, monkeypatch):
    scores = {
        FIRST: of([0.5, 0.4]),
        Recipe(LR / 3, 0.0): of([0.7, 0.6]),
        Recipe(LR * 3, 0.0): of([0.6, 0.5]),
    }
    trained_with(monkeypatch, scores)
    assert search.find_recipe(*problem) == Recipe(LR / 3, 0.0)


def scored(value: float, ap: list[float]) -> HeldOutScore:
    return HeldOutScore(value, np.array(ap))


@pytest.mark.parametrize(
    ("value", "ap", "taken"),
    [
        (0.61, [0.52, 0.37], True),  # MAP is lower by 0.005, its standard error is 0.025 / sqrt(2)
        (0.61, [0.5, 0.38], False),  # lower by 0.01, the standard error is 0.01 / sqrt(2)
        (0.59, [0.6, 0.5], False),
        (0.90, [0.47, 0.36], False),  # lower by 0.035 ± 0.0035
        (None, [], False),
    ],
)
def test_a_hidden_layer_has_to_be_better_in_both_ways(problem, monkeypatch, value, ap, taken):
    config, *rest = problem
    config = dataclasses.replace(config, backbone="features", lr=LR, noise=0.0, hidden=None)
    deeper = None if value is None else scored(value, ap)
    trained_with(monkeypatch, {FIRST: scored(0.6, [0.5, 0.4]), Recipe(LR, 0.0, 512): deeper})
    found = search.find_recipe(config, *rest)
    of_pictures = dataclasses.replace(config, backbone="lite0", run=f"{config.run}/other")
    assert search.find_recipe(of_pictures, *rest) == found
    assert found == Recipe(LR, 0.0, 512 if taken else 0)
    trained_with(monkeypatch, {})
    assert search.find_recipe(config, *rest) == found
    without = dataclasses.replace(config, hidden=0, run=f"{config.run}/another")
    assert search.find_recipe(without, *rest) == FIRST


def test_a_hidden_layer_has_a_rate_of_its_own(problem, monkeypatch):
    config, *rest = problem
    config = dataclasses.replace(config, backbone="features", noise=0.0, hidden=None)
    fair, good = scored(0.6, [0.5, 0.4]), scored(0.9, [0.8, 0.7])
    scores = {
        FIRST: fair, Recipe(LR / 3, 0.0): good, Recipe(LR * 3, 0.0): None,
        Recipe(LR * 3, 0.0, 512): scored(0.95, [0.8, 0.75]),
    }  # fmt: skip
    trained_with(monkeypatch, scores)
    assert search.find_recipe(config, *rest) == Recipe(LR * 3, 0.0, 512)
    given = dataclasses.replace(config, hidden=9, run=f"{config.run}/other")
    trained_with(
        monkeypatch,
        {Recipe(LR * 3, 0.0, 9): fair, Recipe(LR, 0.0, 9): fair, Recipe(LR * 9, 0.0, 9): None},
    )
    assert search.find_recipe(given, *rest) == Recipe(LR * 3, 0.0, 9)


@pytest.mark.parametrize(("epochs", "taken"), [(10, False), (50, True)])  # of two steps
def test_a_hidden_layer_that_loses_has_a_second_longer_trial(problem, monkeypatch, epochs, taken):
    config, *rest = problem
    config = dataclasses.replace(
        config, backbone="features", lr=LR, noise=0.0, hidden=None, first_epochs=epochs, batch_size=150
    )
    tried = {
        (FIRST, 40): scored(0.6, [0.5, 0.4]), (Recipe(LR, 0.0, 512), 40): scored(0.5, [0.4, 0.3]),
        (FIRST, 100): scored(0.7, [0.6, 0.5]), (Recipe(LR, 0.0, 512), 100): scored(0.8, [0.7, 0.6]),
    }  # fmt: skip
    monkeypatch.setattr(search._Trials, "_train", lambda self, recipe, steps: tried[recipe, steps])
    assert search.find_recipe(config, *rest) == Recipe(LR, 0.0, 512 if taken else 0)


def test_a_recipe_makes_a_model_like_the_given_one(problem):
    _, model, *_ = problem
    same, other = Recipe(LR, 0.3).model(model, 0), Recipe(LR, 0.3, 7).model(model, 0)
    assert torch.equal(same.head.fch.weight, model.head.fch.weight)
    assert same.head.fch.weight is not model.head.fch.weight
    assert other.head.hidden[0].weight.shape == (7, 12)
    assert other.arguments["hidden"] == 7
    assert other.arguments["hidden_norm"]
    assert other.noise.level == other.arguments["noise"] == 0.3
    again = Recipe(LR, 0.3, 7).model(model, 0)
    assert torch.equal(again.head.hidden[0].weight, other.head.hidden[0].weight)


def test_classes_that_no_plane_divides_get_a_hidden_layer(tmp_path):
    """Four groups, opposite ones of the same class: one linear layer cannot tell the classes apart."""
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 4, 500)
    rows = np.array([[3, 3], [-3, 3], [-3, -3], [3, -3]])[corner] + rng.normal(size=(500, 2))
    estimator = hashnet.HashNet(8, first_epochs=30).fit(rows.astype(np.float32), corner % 2)
    model, _ = estimator._bundle
    assert model.arguments["hidden"] == 512
    estimator.save(str(tmp_path))
    codes = hashnet.Encoder.load(str(tmp_path)).encode(rows[:9].astype(np.float32))
    assert np.array_equal(codes, estimator.encode(rows[:9].astype(np.float32)))


def test_a_default_that_diverges_is_replaced(problem, monkeypatch):
    scores = {FIRST: None, Recipe(LR / 3, 0.0): of([0.1, 0.2]), Recipe(LR * 3, 0.0): None}
    trained_with(monkeypatch, scores)
    assert search.find_recipe(*problem) == Recipe(LR / 3, 0.0)


def test_what_is_set_is_not_searched(problem, monkeypatch):
    config, *rest = problem
    trained_with(monkeypatch, {})
    given = dataclasses.replace(config, lr=0.5)
    assert search.find_recipe(given, *rest) == Recipe(0.5, 0.0)


def test_less_noise_is_taken_where_it_is_clearly_better(problem, monkeypatch):
    config, _, source, labels = problem
    noisy = build_model("features", 16, n_features=12, noise=1.2)
    first, less = Recipe(LR, 1.2), Recipe(LR, 1.2 / 3)
    scores = {
        first: of([0.5, 0.4]), less: of([0.6, 0.5]),
        dataclasses.replace(less, lr=LR / 3): None, dataclasses.replace(less, lr=LR * 3): None,
    }  # fmt: skip
    trained_with(monkeypatch, scores)
    found = search.find_recipe(config, noisy, source, labels)
    assert found == less
    made = found.model(noisy, seed=0)
    assert made.noise.level == made.arguments["noise"] == pytest.approx(0.4)


def test_trials_are_long_enough_to_overfit():
    """After 300 steps too little noise looks better on COCO features, after 1,000 it looks worse."""
    assert search.STEPS >= 1000


def test_precision_in_the_ball_does_not_choose(problem, monkeypatch):
    """Early on, little noise fills the ball; the codes at the end of training are worse."""
    config, _, source, labels = problem
    noisy = build_model("features", 16, n_features=12, noise=1.2)
    ball = HeldOutScore(0.9, np.array([0.5, 0.4]))  # the same MAP with 0.45 of precision within radius 2
    scores = {Recipe(LR, 1.2): of([0.5, 0.4]), Recipe(LR, 1.2 / 3): ball}
    trained_with(monkeypatch, scores | {Recipe(LR / 3, 1.2): ball, Recipe(LR * 3, 1.2): ball})
    assert search.find_recipe(config, noisy, source, labels) == Recipe(LR, 1.2)


def test_a_recipe_of_an_older_version_is_kept(problem):
    config, *rest = problem
    values = {"kind": "recipe", "format_version": 1, "scaling": "columns", "lr": 0.5, "noise": 0.1}
    storage.write_json(storage.join(Run(config.run).checkpoints, "recipe.json"), values)
    assert search.find_recipe(config, *rest) == Recipe(0.5, 0.1)


def test_trials_train_copies_and_measure_held_out_rows(problem):
    config, model, source, labels = problem
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trials = search._Trials(config, model, source, labels, "cpu")
    assert not set(trials.rows) & set(trials.held)
    score = trials.score(FIRST)
    assert score is not None
    assert score.ap.mean() > 0.7
    assert score.value > score.ap.mean()  # precision within radius 2 counts
    assert trials.score(Recipe(1e30, 0.0)) is None  # diverged: never chosen
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_without_labels_the_defaults_are_used(problem):
    config, model, source, _ = problem
    assert search.find_recipe(config, model, source, None) == FIRST


def rows_with(labels):
    """Training rows of which nothing but the labels matters, and a model for them."""
    x = np.random.default_rng(0).normal(size=(len(labels), 6)).astype(np.float32)
    return build_model("features", 8, n_features=6), ArraySource(x), np.eye(len(labels), dtype=bool)[labels]


def test_a_rare_class_that_is_held_out_leaves_the_defaults(tmp_path):
    labels = np.zeros(150, dtype=int)
    labels[held_out(150, search.SHARE)[1][:3]] = 1  # a trial sees one class: no dissimilar pair
    found = search.find_recipe(TrainConfig(run=str(tmp_path), n_bits=8), *rows_with(labels))
    assert found == FIRST


def test_a_single_similar_pair_that_is_divided_leaves_the_defaults(tmp_path):
    kept, held = held_out(150, search.SHARE)
    labels = np.arange(150)
    labels[held[0]] = labels[kept[0]]
    config = TrainConfig(run=str(tmp_path), n_bits=8)
    assert search.find_recipe(config, *rows_with(labels)) == FIRST
    x = np.random.default_rng(0).normal(size=(150, 6)).astype(np.float32)
    assert hashnet.HashNet(8, first_epochs=1, stages=1).fit(x, labels).encode(x).shape == (150, 1)


@pytest.mark.parametrize(("n_rows", "batch_size"), [(100, 256), (250, 64), (330, 256), (600, 256)])
def test_a_trial_has_the_steps_it_says(tmp_path, monkeypatch, n_rows, batch_size):
    monkeypatch.setattr(search, "STEPS", 40)
    config = TrainConfig(run=str(tmp_path), n_bits=8, batch_size=batch_size)
    model, source, labels = rows_with(np.arange(n_rows) % 2)
    trials, done = search._Trials(config, model, source, labels, "cpu"), []
    real = search.fit
    monkeypatch.setattr(search, "fit", lambda *args, **kwargs: done.append(real(*args, **kwargs)))
    trials.score(FIRST)
    per_epoch = np.ceil(0.8 * n_rows / batch_size)
    assert 40 - per_epoch < done[0].stages[0].steps <= 40
