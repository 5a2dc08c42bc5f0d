"""beta and the learning rate, stage by stage."""

from __future__ import annotations

import math

import pytest

from hashnet.errors import ConfigError
from hashnet.training.schedule import anneal, plain, smooth, staged


def test_staged_doubles_beta_and_shrinks_the_step():
    stages = staged(10, first_epochs=30, stage_epochs=2, patience=3)
    assert [s.beta for s in stages] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [s.beta * s.lr_scale for s in stages] == pytest.approx([1] + [0.3] * 9)
    assert all(s.beta * s.lr_scale == 1 for s in staged(10, stage_lr_scale=1))
    assert [s.epochs for s in stages] == [30] + [2] * 9
    assert {s.patience for s in stages} == {3}


def test_smooth_is_the_public_code_s_beta():
    (stage,) = smooth(10)
    for step in (0, 199, 200, 5_000, 9_999):
        assert stage.beta_at(step) == pytest.approx(math.sqrt(1 + 0.005 * (step // 200) * 200))
    assert stage.beta_at(10_000) == pytest.approx(7.14, abs=0.01)  # the end of their training


def test_plain_stays_at_one():
    (stage,) = plain(7)
    assert {stage.beta_at(step) for step in (0, 10_000)} == {1.0}


def test_annealing():
    assert [anneal("cosine", s, 10) for s in (0, 5, 10)] == pytest.approx([1, 0.5, 0])
    assert [anneal("step", s, 100) for s in (0, 30, 34, 67, 99)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    assert [anneal("step", s, 9000, 2000, 0.5) for s in (0, 1999, 2000, 8999)] == [1, 1, 0.5, 0.0625]
    assert anneal("constant", 9, 10) == 1
    with pytest.raises(ConfigError, match="cosine, step, constant"):
        anneal("linear", 5, 10)
    with pytest.raises(ConfigError, match="at least 1"):
        staged(0)
