import math

import numpy as np
import pytest
import torch

from hashnet.errors import DataError
from hashnet.losses.dnnh import DNNHLoss, almost_bits, triplet_hinge
from hashnet.losses.pairwise import LabelSimilarity, TableSimilarity


def loss_by_loops(logits, labels, rows, valid, beta, margin, epsilon):
    """Every triplet (a, p, n) of the batch, one after the other."""
    codes = []
    for row in logits.tolist():
        code = []
        for z in row:
            s = 1 / (1 + math.exp(-beta * z))
            code.append(0.0 if s < 0.5 - epsilon else 1.0 if s > 0.5 + epsilon else s)
        codes.append(code)
    total, count = 0.0, 0
    n = len(codes)
    for a in range(n):
        for p in range(n):
            for q in range(n):
                if not (valid[a] and valid[p] and valid[q]) or rows[a] == rows[p] or rows[a] == rows[q]:
                    continue
                if (labels[rows[a]] & labels[rows[p]]).any() and not (
                    labels[rows[a]] & labels[rows[q]]
                ).any():
                    near = sum((x - y) ** 2 for x, y in zip(codes[a], codes[p], strict=True))
                    far = sum((x - y) ** 2 for x, y in zip(codes[a], codes[q], strict=True))
                    total += max(0.0, margin + near - far)
                    count += 1
    return total / max(count, 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("margin", "epsilon"), [(1.0, 0.4), (2.5, 0.1), (0.0, 0.5)])
def test_the_loss_equals_loops_over_triplets(seed, margin, epsilon):
    rng = np.random.default_rng(seed)
    labels = (rng.random((20, 4)) < 0.35).astype(np.uint8)
    rows = rng.choice(20, 12)  # some rows twice: a row is no partner of itself
    valid = rng.random(12) < 0.9
    logits = torch.tensor(rng.normal(size=(12, 8)) * 2, dtype=torch.float64)
    loss = DNNHLoss(LabelSimilarity(labels), margin=margin, epsilon=epsilon)
    ours = loss(logits, torch.tensor(rows), torch.tensor(valid), 1.0).item()
    assert ours == pytest.approx(loss_by_loops(logits, labels, rows, valid, 1.0, margin, epsilon))


def test_the_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(0)
    labels = np.arange(9) % 3
    loss = DNNHLoss(LabelSimilarity(labels), margin=1.0, epsilon=0.5)
    logits = torch.tensor(rng.normal(size=(9, 4)), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z: loss(z, torch.arange(9), torch.ones(9, dtype=torch.bool), 1.0), logits
    )


def test_bits_are_almost_binary_and_binary_in_the_end():
    z = torch.tensor([[-5.0, -0.1, 0.0, 0.1, 5.0]])
    soft = almost_bits(z, 1.0, 0.4)
    assert soft[0, 0] == 0
    assert soft[0, 4] == 1
    assert soft[0, 2] == 0.5
    assert almost_bits(z, math.inf, 0.4).tolist() == [[0, 0, 1, 1, 1]]


def test_a_batch_without_triplets_costs_nothing():
    distance = torch.ones(3, 3, requires_grad=True)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    value = triplet_hinge(distance, nothing, nothing, 1.0)
    value.backward()
    assert value.item() == 0
    assert torch.isfinite(distance.grad).all()


def test_pairs_nobody_has_said_anything_about_make_no_triplets():
    # 0-1 similar, 0-2 dissimilar; 3 is unknown: one triplet from row 0, none from elsewhere.
    table = TableSimilarity([0, 0], [1, 2], [True, False], n_rows=4)
    logits = torch.tensor([[9.0], [-9.0], [9.0], [-9.0]])
    loss = DNNHLoss(table, margin=1.0)(logits, torch.arange(4), torch.ones(4, dtype=torch.bool), 1.0)
    assert loss.item() == pytest.approx(1 + 1 - 0)


def test_labels_that_are_all_alike_are_refused():
    with pytest.raises(DataError, match="none is dissimilar"):
        DNNHLoss(LabelSimilarity(np.zeros(5, dtype=int)))
