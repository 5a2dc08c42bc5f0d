import math

import numpy as np
import pytest
import torch

from hashnet.labels import pack_labels, share_label
from hashnet.losses.cnnh import CNNHLoss, newton_sweep, objective, similarity_codes


def multi_label(n=25, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.random((n, 70)) < 0.02).astype(np.uint8)  # 70 classes: two words a label set


def objective_by_loops(y, H):
    total = 0.0
    for i in range(len(H)):
        for j in range(len(H)):
            s = 1.0 if i == j or (y[i] & y[j]).any() else -1.0
            total += (s - float(H[i] @ H[j]) / H.shape[1]) ** 2
    return total


def test_the_objective_by_loops():
    y = multi_label()
    H = np.random.default_rng(1).uniform(-1, 1, size=(25, 8))
    assert objective(pack_labels(y), H) == pytest.approx(objective_by_loops(y, H))


def test_a_sweep_gains_exactly_what_it_says_and_keeps_the_bounds():
    y = multi_label(seed=2)
    H = np.random.default_rng(3).uniform(-1, 1, size=(25, 8))
    before = objective_by_loops(y, H)
    G = H.T @ H
    gain = newton_sweep(pack_labels(y), H, G, np.arange(25))
    assert gain > 0
    assert before - objective_by_loops(y, H) == pytest.approx(gain)
    assert np.abs(H).max() <= 1
    assert np.allclose(G, H.T @ H)


def test_no_single_entry_can_be_moved_to_gain_once_it_has_converged():
    y = multi_label(n=12, seed=4)
    words = pack_labels(y)
    H = np.random.default_rng(5).uniform(-1, 1, size=(12, 8))
    G = H.T @ H
    for _ in range(3000):
        newton_sweep(words, H, G, np.arange(12))
    best = objective_by_loops(y, H)
    for i in range(12):
        for k in range(8):
            for value in np.clip(H[i, k] + np.array([-0.05, -0.01, 0.01, 0.05]), -1, 1):
                moved = H.copy()
                moved[i, k] = value
                assert objective_by_loops(y, moved) >= best - 1e-6


def test_codes_of_separate_classes_agree_inside_and_differ_outside():
    y = np.arange(60) % 2
    codes, history = similarity_codes(y, 16)
    assert codes.dtype == np.int8
    assert (np.diff(history) <= 0).all()
    agreement = codes.astype(int) @ codes.T / 16
    similar = share_label(y, y)
    assert agreement[similar].mean() > 0.9
    assert agreement[~similar].mean() < -0.9


def test_the_loss_is_the_mean_squared_difference_of_the_valid_rows():
    targets = np.array([[1, -1], [-1, -1], [1, 1]], dtype=np.int8)
    logits = torch.tensor([[0.5, 0.2], [1.0, -3.0], [9.0, 9.0]])
    rows, valid = torch.tensor([2, 0, 1]), torch.tensor([True, True, False])
    # Row 2 of the training set comes first: its code (1, 1) comes with it.
    first = ((math.tanh(0.5) - 1) ** 2 + (math.tanh(0.2) - 1) ** 2) / 2
    second = ((math.tanh(1.0) - 1) ** 2 + (math.tanh(-3.0) + 1) ** 2) / 2
    loss = CNNHLoss(targets)
    assert loss(logits, rows, valid, 1.0).item() == pytest.approx((first + second) / 2)
    assert loss(logits, rows, valid, math.inf).item() == pytest.approx(0.0)
