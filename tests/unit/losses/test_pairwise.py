"""The weighted pairwise loss against double loops, the paper's gradient and its theorems."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet.errors import DataError
from hashnet.losses.cnnh import CNNHLoss
from hashnet.losses.dhn import DHNLoss
from hashnet.losses.dnnh import DNNHLoss
from hashnet.losses.pairwise import LabelSimilarity, PairwiseLoss, TableSimilarity
from hashnet.models.hash_model import to_signs

N, K, CLASSES = 14, 16, 5


def _labels(seed: int, n: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, CLASSES)) < 0.3).astype(np.uint8)
    labels[0], labels[1] = [1, 1, 0, 0, 0], [0, 0, 1, 0, 0]  # at least one dissimilar pair
    labels[2] = labels[0]  # and one similar
    return labels


def _all(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n), torch.ones(n, dtype=torch.bool)


def slow_weights(
    labels: np.ndarray, weights: str, continuous: bool
) -> dict[tuple[int, int], tuple[int, float]]:
    """(i, j) → (s_ij, w_ij) over all ordered pairs of different rows, by loops over label sets."""
    sets = [set(np.flatnonzero(row)) for row in labels]
    pairs = [(i, j) for i in range(len(sets)) for j in range(len(sets)) if i != j]
    similar = {p: int(bool(sets[p[0]] & sets[p[1]])) for p in pairs}
    c = {}
    for i, j in pairs:
        both, either = len(sets[i] & sets[j]), len(sets[i] | sets[j])
        c[i, j] = both / either if continuous and both else 1.0
    if weights == "none":
        return {p: (similar[p], c[p]) for p in pairs}
    s1 = sum(c[p] for p in pairs if similar[p])
    s0 = sum(1 for p in pairs if not similar[p])
    return {p: (similar[p], c[p] * len(pairs) / s1 if similar[p] else len(pairs) / s0) for p in pairs}


def slow_loss(codes: np.ndarray, labels: np.ndarray, weights: str, continuous: bool, alpha: float) -> float:
    """Eq. 4 by a double loop, log(1 + exp(x)) as printed."""
    total = weight_sum = 0.0
    for (i, j), (s, w) in slow_weights(labels, weights, continuous).items():
        x = alpha * sum(float(a) * float(b) for a, b in zip(codes[i], codes[j], strict=True))
        total += w * (math.log(1 + math.exp(x)) - s * x)
        weight_sum += w
    return total / weight_sum


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("weights", ["global", "batch", "none"])
def test_equals_the_double_loop(weights, continuous):
    labels = _labels(3)
    logits = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = PairwiseLoss(LabelSimilarity(labels), K, weights=weights, continuous=continuous)
    for beta in (1.0, 3.0, math.inf):
        codes = (
            np.tanh(beta * logits.numpy()) if beta < math.inf else np.where(logits.numpy() >= 0, 1.0, -1.0)
        )
        expected = slow_loss(codes, labels, weights, continuous, 10 / K)
        # Jaccard is computed in float32
        assert float(loss(logits, *_all(N), beta)) == pytest.approx(expected, rel=1e-6)


def test_global_weights_are_those_of_the_training_set_not_of_the_batch():
    labels = _labels(4, 40)
    loss = PairwiseLoss(LabelSimilarity(labels), K)
    weight_of = slow_weights(labels, "global", False)
    chosen = [0, 1, 2, 7, 11, 30]
    logits = torch.randn(len(chosen), K, dtype=torch.float64)
    total = weight_sum = 0.0
    codes = np.tanh(logits.numpy())
    for a, i in enumerate(chosen):
        for b, j in enumerate(chosen):
            if i != j:
                s, w = weight_of[i, j]
                x = 10 / K * float(codes[a] @ codes[b])
                total, weight_sum = total + w * (math.log1p(math.exp(x)) - s * x), weight_sum + w
    found = loss(logits, torch.tensor(chosen), torch.ones(len(chosen), dtype=torch.bool), 1.0)
    assert float(found) == pytest.approx(total / weight_sum, rel=1e-12)


def test_gradient_is_the_papers_closed_form():
    """dJ/dg_i = 2 alpha / sum(w) * sum_j w_ij (sigmoid(alpha <g_i, g_j>) - s_ij) g_j over ordered pairs."""
    labels = _labels(5)
    g = torch.rand(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1.8 - 0.9
    logits = torch.atanh(g).requires_grad_()
    PairwiseLoss(LabelSimilarity(labels), K)(logits, *_all(N), 1.0).backward()
    weight_of, alpha = slow_weights(labels, "global", False), 10 / K
    weight_sum = sum(w for _, w in weight_of.values())
    expected = torch.zeros_like(g)
    for (i, j), (s, w) in weight_of.items():
        p = 1 / (1 + math.exp(-alpha * float(g[i] @ g[j])))
        expected[i] += 2 * alpha * w * (p - s) * g[j] / weight_sum
    expected = expected * (1 - g**2)  # through tanh
    torch.testing.assert_close(logits.grad, expected, rtol=1e-10, atol=1e-14)


def test_padding_and_repeated_rows_do_not_count():
    labels = _labels(6)
    loss = PairwiseLoss(LabelSimilarity(labels), K)
    logits = torch.randn(6, K, dtype=torch.float64)
    rows, valid = torch.tensor([3, 1, 2, 0]), torch.ones(4, dtype=torch.bool)
    plain = loss(logits[:4], rows, valid, 1.0)
    padded = loss(logits, torch.tensor([3, 1, 2, 0, 3, 5]), torch.tensor([True] * 4 + [False] * 2), 1.0)
    assert float(padded) == pytest.approx(float(plain), rel=1e-14)
    # row 1 twice: the pair (1, 1) is a self pair although it is off the diagonal
    twice = torch.cat([logits[1:2], logits[1:2], logits[3:4]])
    both = loss(twice, torch.tensor([1, 1, 0]), torch.ones(3, dtype=torch.bool), 1.0)
    once = loss(twice[1:], torch.tensor([1, 0]), torch.ones(2, dtype=torch.bool), 1.0)
    assert float(both) == pytest.approx(float(once), rel=1e-12)


def test_a_batch_without_pairs_has_loss_and_gradient_zero():
    loss = PairwiseLoss(LabelSimilarity(_labels(0)), K)
    logits = torch.randn(1, K, requires_grad=True)
    value = loss(logits, torch.tensor([3]), torch.tensor([True]), 1.0)
    value.backward()
    assert float(value) == 0
    assert float(logits.grad.abs().sum()) == 0


def _dnnh(similarity: LabelSimilarity, n_bits: int) -> DNNHLoss:
    return DNNHLoss(similarity)


def _cnnh(similarity: LabelSimilarity, n_bits: int) -> CNNHLoss:
    return CNNHLoss(np.ones((N, n_bits)))


@pytest.mark.parametrize("make", [PairwiseLoss, DHNLoss, _dnnh, _cnnh])
def test_a_batch_without_a_usable_row_costs_nothing(make):
    loss = make(LabelSimilarity(_labels(0)), K)
    logits = torch.randn(4, K, requires_grad=True)
    for beta in (1.0, math.inf):
        value = loss(logits, torch.arange(4), torch.zeros(4, dtype=torch.bool), beta)
        assert value.item() == 0
    loss(logits, torch.arange(4), torch.zeros(4, dtype=torch.bool), 1.0).backward()
    assert float(logits.grad.abs().sum()) == 0


def test_nothing_learnt_is_ln_2_whatever_the_weights():
    for weights in ("global", "batch", "none"):
        loss = PairwiseLoss(LabelSimilarity(_labels(1)), K, weights=weights)
        assert float(loss(torch.zeros(N, K), *_all(N), 1.0)) == pytest.approx(math.log(2), rel=1e-6)


@given(st.floats(1e-30, 1e30), st.sampled_from([1.0, 512.0, math.inf]))
@settings(max_examples=30, deadline=None)
def test_finite_for_any_logits(scale, beta):
    logits = (torch.randn(N, K, generator=torch.Generator().manual_seed(2)) * scale).requires_grad_()
    value = PairwiseLoss(LabelSimilarity(_labels(2)), K, alpha=50.0)(logits, *_all(N), beta)
    assert math.isfinite(float(value))
    if beta < math.inf:
        value.backward()
        assert torch.isfinite(logits.grad).all()


@given(st.integers(0, 2**31), st.floats(0.1, 1e4))
@settings(max_examples=30, deadline=None)
def test_theorem_1_binary_loss_does_not_change_with_beta(seed, beta):
    """L depends on sgn(beta z) = sgn(z): the same for every beta > 0."""
    logits = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    loss = PairwiseLoss(LabelSimilarity(_labels(7)), K)
    plain, scaled = (float(loss(z, *_all(N), math.inf)) for z in (logits, beta * logits))
    assert plain == scaled
    assert float(loss(logits, *_all(N), 1e12)) == pytest.approx(plain, rel=1e-9)  # J → L


@given(st.integers(0, 2**31), st.booleans(), st.floats(1e-4, 1e4))
@settings(max_examples=60, deadline=None)
def test_theorem_2_a_direct_step_on_one_pair_never_raises_the_binary_loss(seed, similar, step):
    """Lemma 1: for one pair, g_i and g_j stepped at once along -dJ/dg, L(sgn g) never grows."""
    g = torch.rand(2, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    g.requires_grad_()
    alpha = 10 / K

    def pair_loss(codes: torch.Tensor) -> torch.Tensor:
        x = alpha * (codes[0] @ codes[1])
        return torch.nn.functional.softplus(x) - float(similar) * x

    pair_loss(g).backward()
    before, after = pair_loss(to_signs(g.detach())), pair_loss(to_signs(g.detach() - step * g.grad))
    assert float(after) <= float(before) + 1e-12


def test_pairs_table_counts_only_listed_pairs():
    a, b, similar = [0, 2, 4, 1], [1, 3, 0, 0], [True, False, False, True]  # (1, 0) repeats (0, 1)
    loss = PairwiseLoss(TableSimilarity(a, b, similar, n_rows=6), K)
    logits = torch.randn(6, K, dtype=torch.float64)
    g, alpha = np.tanh(logits.numpy()), 10 / K
    total = weight_sum = 0.0
    for i, j, s in [(0, 1, 1), (2, 3, 0), (0, 4, 0)]:
        w = 3 / 1 if s else 3 / 2  # |S| = 3, |S1| = 1, |S0| = 2
        x = alpha * float(g[i] @ g[j])
        total, weight_sum = total + w * (math.log1p(math.exp(x)) - s * x), weight_sum + w
    assert float(loss(logits, *_all(6), 1.0)) == pytest.approx(total / weight_sum, rel=1e-12)


def test_pairs_table_has_no_continuous_similarity():
    table = TableSimilarity([0, 1], [1, 2], [True, False], n_rows=3)
    with pytest.raises(DataError, match="needs labels"):
        PairwiseLoss(table, K, continuous=True)(torch.zeros(3, K), *_all(3), 1.0)


@pytest.mark.parametrize(("labels", "kind"), [([0, 0, 0], "dissimilar"), ([0, 1, 2], "similar")])
def test_one_kind_of_pair_alone_is_refused(labels, kind):
    with pytest.raises(DataError, match=f"3 pairs and none is {kind}"):
        PairwiseLoss(LabelSimilarity(np.array(labels)), K)


def test_dhn_is_cross_entropy_plus_log_cosh():
    labels = _labels(8)
    logits = torch.randn(N, K, dtype=torch.float64)
    g = np.tanh(logits.numpy())
    quantisation = np.mean([math.log(math.cosh(abs(v) - 1)) for v in g.ravel()])
    for set_to, alpha in ((1.0, 1.0), (None, 10 / K)):  # as published; adaptive
        expected = slow_loss(g, labels, "none", False, alpha) + 0.3 * quantisation
        loss = DHNLoss(LabelSimilarity(labels), K, alpha=set_to, quantisation=0.3)
        assert float(loss(logits, *_all(N), 1.0)) == pytest.approx(expected, rel=1e-9)
    binary = slow_loss(np.where(g >= 0, 1.0, -1.0), labels, "none", False, 10 / K)
    assert float(loss(logits, *_all(N), math.inf)) == pytest.approx(binary, rel=1e-9)


def test_a_power_of_the_jaccard_similarity_keeps_the_balance():
    labels = _labels(3)
    loss = PairwiseLoss(LabelSimilarity(labels), K, continuous=True, power=2.0)
    squares = [
        (labels[i] & labels[j]).sum() ** 2 / (labels[i] | labels[j]).sum() ** 2
        for i in range(len(labels))
        for j in range(i)
        if (labels[i] & labels[j]).any()
    ]
    n = len(labels) * (len(labels) - 1) / 2
    assert loss.class_weights[0] == pytest.approx(n / sum(squares), rel=1e-5)


def test_a_threshold_moves_the_point_where_similar_and_dissimilar_are_equally_likely():
    y, z = np.array([0, 0, 1]), torch.tensor([[3.0, -1.0], [2.0, 1.0], [-1.0, 2.0]])
    loss = PairwiseLoss(LabelSimilarity(y), 8, alpha=0.5, weights="none", threshold=1.5)
    g = np.tanh(z.numpy().astype(np.float64))
    total = 0.0
    for i in range(3):
        for j in range(3):
            if i != j:
                p = 1 / (1 + np.exp(-(0.5 * g[i] @ g[j] - 1.5)))
                total -= np.log(p if y[i] == y[j] else 1 - p)
    rows, valid = torch.arange(3), torch.ones(3, dtype=torch.bool)
    assert float(loss(z, rows, valid, 1.0)) == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize("weights", ["global", "batch", "none"])
def test_guessing_is_the_loss_of_codes_of_zero(weights):
    y = np.array([0, 0, 0, 1, 1, 2])
    loss = PairwiseLoss(LabelSimilarity(y), 8, weights=weights, threshold=3.0)
    rows, valid = torch.arange(6), torch.ones(6, dtype=torch.bool)
    assert float(loss(torch.zeros(6, 8), rows, valid, 1.0)) == pytest.approx(loss.guessing, rel=1e-5)
