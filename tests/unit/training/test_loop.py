"""The training loop on plain arrays: it learns, stops, resumes, and says why it cannot go on."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
import torch

from hashnet.codes import pack_signs
from hashnet.errors import ConfigError, DataError, DeviceMemoryError, Diverged, FormatError
from hashnet.labels import share_label
from hashnet.losses.dhn import DHNLoss
from hashnet.losses.pairwise import LabelSimilarity, PairwiseLoss, TableSimilarity
from hashnet.models.hash_model import build_model
from hashnet.models.inference import CudaCopies
from hashnet.training import batches, loop
from hashnet.training.batches import PairSampler
from hashnet.training.checkpoints import COLUMNS, Checkpoints, History, StepRecord
from hashnet.training.frozen_backbone import standardise
from hashnet.training.loop import Callbacks, fit, has_bfloat16, make_optimiser
from hashnet.training.schedule import ContinuationStage, plain, smooth, staged
from hashnet.training.train_config import FitSettings

CLASSES, WIDTH, ROWS, BITS = 4, 10, 90, 16


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS)
    centres = rng.normal(size=(CLASSES, WIDTH)) * 2
    return (centres[labels] + rng.normal(size=(ROWS, WIDTH))).astype(np.float32), labels


def _model(**options):
    torch.manual_seed(0)
    return build_model("features", BITS, n_features=WIDTH, **options)


def _precision(model, inputs, labels) -> float:
    """Share of nearest neighbours with the same label."""
    with torch.no_grad():
        codes = np.unpackbits(pack_signs(model.eval()(torch.from_numpy(inputs))), axis=1).astype(int)
    distances = (codes[:, None] != codes[None]).sum(axis=2) + np.eye(len(codes)) * 1000
    return float((labels[distances.argmin(axis=1)] == labels).mean())


SETTINGS = FitSettings(lr=0.02, batch_size=32, seed=1)


def test_learns_and_ends_binary(data):
    inputs, labels = data
    model = _model()
    standardise(model, inputs)
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    history = fit(model, inputs, loss, staged(10, 20, 4), SETTINGS)
    assert not model.training
    assert _precision(model, inputs, labels) > 0.95
    first, last = history.stages[0], history.stages[-1]
    assert len(history.stages) == 10
    assert last.quantisation < 0.02 < first.quantisation
    assert abs(last.J - last.L) < 0.02 < first.L - first.J + 0.1
    assert len(history) == (20 + 9 * 4) * 3  # 90 rows are batches of 32, 32 and 26
    assert history.steps["step"] == list(range(len(history)))
    assert last.balance <= 1
    assert math.log(2) > last.J


def test_history_says_what_was_done(data):
    inputs, labels = data
    model, rows = _model(), []
    history = fit(
        model,
        inputs,
        PairwiseLoss(LabelSimilarity(labels), BITS),
        staged(3, 2, 1),
        SETTINGS,
        callbacks=Callbacks(step=rows.append),
    )
    assert history.steps["beta"] == [1.0] * 6 + [2.0] * 3 + [4.0] * 3
    lr = history.steps["lr"]
    assert lr[0] == 0.02
    assert lr[6] == pytest.approx(0.3 * 0.01)
    assert lr[9] == pytest.approx(0.3 * 0.005)
    assert lr[:6] == sorted(lr[:6], reverse=True)  # cosine inside the stage
    assert [row.step for row in rows] == history.steps["step"]
    assert {row.total_steps for row in rows} == {12}
    assert [s.epochs for s in history.stages] == [2, 1, 1]
    assert [s.lr for s in history.stages] == pytest.approx([0.02, 0.3 * 0.01, 0.3 * 0.005])
    # the first row's loss by hand: the same model before its first step
    fresh = _model().train()
    first = np.random.default_rng([1, 0]).permutation(ROWS)[:32]
    z = fresh(torch.from_numpy(inputs[first]))
    value = PairwiseLoss(LabelSimilarity(labels), BITS)(
        z, torch.from_numpy(first), torch.ones(32, dtype=bool), 1.0
    )
    assert history.steps["J"][0] == pytest.approx(value.item(), rel=1e-5)


def test_a_stage_ends_when_its_loss_stops_improving(data):
    inputs, labels = data
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    settings = FitSettings(lr=0.0, batch_size=90, annealing="constant")  # the loss cannot move
    history = fit(_model(), inputs, loss, staged(2, 50, 50, patience=3), settings)
    assert [s.epochs for s in history.stages] == [4, 4]  # the first, then three without a lower loss
    assert [s.beta for s in history.stages] == [1, 2]


def test_the_steps_of_a_stage_that_ended_early_are_no_longer_expected(data):
    inputs, labels = data
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    settings = FitSettings(lr=0.0, batch_size=90, annealing="constant")
    rows = []
    history = fit(
        _model(), inputs, loss, staged(2, 50, 50, patience=3), settings, callbacks=Callbacks(step=rows.append)
    )
    per_epoch = history.stages[0].steps // 4
    assert rows[0].total_steps == 100 * per_epoch
    assert rows[-1].total_steps == 54 * per_epoch


class _Crash(Exception):
    pass


@pytest.mark.parametrize("stages", [staged(4, 3, 2), smooth(9, growth=0.05, refresh=2)])
def test_resumes_as_if_nothing_had_happened(data, tmp_path, stages):
    inputs, labels = data
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    settings = FitSettings(lr=0.02, batch_size=32, seed=1, checkpoint_every=2)
    straight = _model(dropout=0.3, hidden=8)
    expected = fit(straight, inputs, loss, stages, settings)
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"))

    def crash(row, at):
        if row.step == at:
            raise _Crash

    for at in (5, 13, 20):  # in the first stage, in a later one, and again
        with pytest.raises(_Crash):
            fit(
                _model(dropout=0.3, hidden=8), inputs, loss, stages, settings,
                checkpoints=checkpoints, callbacks=Callbacks(step=lambda row, at=at: crash(row, at)),
            )  # fmt: skip
        assert checkpoints.steps()[-1] <= at
    resumed = _model(dropout=0.3, hidden=8)
    found = fit(resumed, inputs, loss, stages, settings, checkpoints=checkpoints)
    for name in ("step", "beta", "lr", "J", "L"):
        assert found.steps[name] == expected.steps[name], name
    for (name, a), b in zip(resumed.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    again = fit(_model(dropout=0.3, hidden=8), inputs, loss, stages, settings, checkpoints=checkpoints)
    assert len(again) == len(expected)  # a finished run has nothing left to do


def test_a_checkpoint_of_other_layers_is_refused(data, tmp_path):
    inputs, labels = data
    loss, checkpoints = PairwiseLoss(LabelSimilarity(labels), BITS), Checkpoints(str(tmp_path))
    fit(_model(), inputs, loss, plain(1), FitSettings(batch_size=32), checkpoints=checkpoints)
    with pytest.raises(FormatError, match=r"of a model with other layers.*another run folder"):
        fit(_model(hidden=6), inputs, loss, plain(1), FitSettings(batch_size=32), checkpoints=checkpoints)


def test_slow_steps_have_a_checkpoint_every_minute(data, tmp_path, monkeypatch):
    inputs, labels = data
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"))
    monkeypatch.setattr(loop.time, "monotonic", itertools.count(step=25.0).__next__)  # some seconds a call

    def crash(row):
        if row.step == 6:
            raise _Crash

    with pytest.raises(_Crash):
        fit(
            _model(), inputs, PairwiseLoss(LabelSimilarity(labels), BITS), staged(1, 50),
            FitSettings(batch_size=32, checkpoint_every=200),
            checkpoints=checkpoints, callbacks=Callbacks(crash),
        )  # fmt: skip
    assert checkpoints.steps()


def test_pictures_resume_as_if_nothing_had_happened(tmp_path):
    """Their weights lie in memory as channels_last: momentum from a checkpoint must, too."""
    pictures = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    loss = PairwiseLoss(LabelSimilarity(np.arange(40) % CLASSES), BITS)
    settings = FitSettings(lr=0.02, batch_size=16, seed=1, checkpoint_every=2)

    def train(**options):
        torch.manual_seed(0)
        model = build_model("small_cnn", BITS, crop=8)
        return model, fit(model, pictures, loss, plain(4), settings, **options)

    def crash(row):
        if row.step == 5:
            raise _Crash

    straight, expected = train()
    assert straight.backbone.layers[4].weight.is_contiguous(memory_format=torch.channels_last)
    checkpoints = Checkpoints(str(tmp_path))
    with pytest.raises(_Crash):
        train(checkpoints=checkpoints, callbacks=Callbacks(step=crash))
    assert checkpoints.steps() == [2, 4]
    resumed, found = train(checkpoints=checkpoints)
    assert found.steps["J"] == expected.steps["J"]
    for (name, a), b in zip(resumed.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_damaged_checkpoint_gives_way_to_the_one_before(data, tmp_path, caplog):
    inputs, labels = data
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    checkpoints = Checkpoints(str(tmp_path))
    straight = _model()
    fit(straight, inputs, loss, staged(3, 2, 1), SETTINGS, checkpoints=checkpoints)
    assert checkpoints.steps() == [9, 12]
    (tmp_path / "step-00000012" / "tensors.safetensors").write_bytes(b"broken")
    resumed = _model()
    with caplog.at_level(logging.WARNING):
        fit(resumed, inputs, loss, staged(3, 2, 1), SETTINGS, checkpoints=checkpoints)
    assert "trying the one before" in caplog.text
    assert torch.equal(resumed.head.fch.weight, straight.head.fch.weight)


def test_divergence_names_step_beta_and_learning_rate(data, tmp_path):
    inputs, labels = data
    checkpoints = Checkpoints(str(tmp_path))
    pairwise = PairwiseLoss(LabelSimilarity(labels), BITS)
    calls = iter(range(1000))

    def broken(logits, rows, valid, beta):
        return pairwise(logits, rows, valid, beta) * (math.nan if next(calls) >= 8 else 1.0)

    settings = FitSettings(lr=0.02, batch_size=32, checkpoint_every=2, log_every=1000)
    with pytest.raises(
        Diverged, match=r"loss is nan at step 7 .*beta 1, learning rate 0\.0.*checkpoint is that of step 6"
    ):
        fit(_model(), inputs, broken, staged(2, 9, 1), settings, checkpoints=checkpoints)
    assert checkpoints.steps() == [4, 6]


def test_weights_that_blow_up_never_become_a_checkpoint(data, tmp_path):
    inputs, labels = data
    checkpoints = Checkpoints(str(tmp_path))
    settings = FitSettings(lr=1e30, batch_size=32, checkpoint_every=1, log_every=1000)
    with pytest.raises(Diverged):
        fit(
            _model(),
            inputs,
            PairwiseLoss(LabelSimilarity(labels), BITS),
            plain(9),
            settings,
            checkpoints=checkpoints,
        )
    for step in checkpoints.steps():
        model = _model()
        state, _, _ = Checkpoints(str(tmp_path)).restore(
            {"model": model}, torch.optim.SGD(model.parameters(), momentum=0.9)
        )
        assert state.step <= step
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_weights_that_blow_up_in_the_last_step_are_no_model(data):
    inputs, labels = data
    settings = FitSettings(lr=math.inf, batch_size=ROWS)
    with pytest.raises(Diverged, match="a weight is NaN or infinite at step 1"):
        fit(_model(), inputs, PairwiseLoss(LabelSimilarity(labels), BITS), plain(1), settings)


def test_nan_in_features_is_found_before_training(data):
    inputs, labels = data
    broken = inputs.copy()
    broken[7, 3] = np.nan
    with pytest.raises(DataError, match=r"1 rows of the features hold NaN or infinity, the first is row 7"):
        fit(_model(), broken, PairwiseLoss(LabelSimilarity(labels), BITS), plain(1))


def test_learns_from_pairs_alone(data):
    inputs, labels = data
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, ROWS, (2, 900))
    a, b = a[a != b], b[a != b]
    similar = share_label(labels, labels)[a, b]
    model = _model()
    standardise(model, inputs)
    loss = PairwiseLoss(TableSimilarity(a, b, similar, ROWS), BITS)
    fit(model, inputs, loss, staged(10, 30, 4), SETTINGS, sampler=PairSampler(a, b, 32, seed=0))
    assert _precision(model, inputs, labels) > 0.9


@pytest.mark.parametrize(("limit", "threads"), [(1 << 27, 1), (0, 2)])
def test_a_small_head_learns_on_one_thread(data, monkeypatch, request, limit, threads):
    """Threads that share a millisecond of work wait for each other longer than they work."""
    inputs, labels = data
    monkeypatch.setattr(loop, "ONE_THREAD", limit)
    seen = set()
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(1))
    fit(
        _model(), inputs, PairwiseLoss(LabelSimilarity(labels), BITS), plain(1), SETTINGS,
        callbacks=Callbacks(step=lambda _: seen.add(torch.get_num_threads())),
    )  # fmt: skip
    assert seen == {threads}
    assert torch.get_num_threads() == 2


def test_a_yardstick_is_measured_and_changes_nothing(data):
    inputs, labels = data
    own, other = (PairwiseLoss(LabelSimilarity(labels), BITS, weights=w) for w in ("none", "global"))
    stages, settings = staged(3, 4, 2), FitSettings(lr=0.05, batch_size=45, log_every=1)
    alone = fit(_model(), inputs, other, stages, settings)
    assert alone.steps["J_common"] == alone.steps["L_common"] == [None] * len(alone)
    same = fit(_model(), inputs, other, stages, settings, yardstick=other)
    assert same.steps["J"] == alone.steps["J"]
    assert same.steps["J_common"] == alone.steps["J"]
    assert same.steps["L_common"] == alone.steps["L"]
    model = _model()
    measured = fit(model, inputs, own, stages, settings, yardstick=other)
    assert measured.steps["J_common"] != measured.steps["J"]
    again = _model()
    assert fit(again, inputs, own, stages, settings).steps["J"] == measured.steps["J"]
    assert torch.equal(model.head.fch.weight, again.head.fch.weight)


def test_a_history_of_an_older_version_gets_the_columns_it_lacks():
    older = History({name: [1, 2] for name in COLUMNS if not name.endswith("_common")})
    assert older.steps["J_common"] == [None, None]
    older.add(StepRecord(3, 0, 0, 1.0, J_common=0.5))
    assert older.steps["J_common"] == [None, None, 0.5]


def test_other_losses_and_heads_use_the_same_loop(data):
    inputs, labels = data
    model = _model(head="slices")
    standardise(model, inputs)
    fit(model, inputs, DHNLoss(LabelSimilarity(labels), BITS), plain(40), SETTINGS)
    assert _precision(model, inputs, labels) > 0.9


def test_frozen_parts_stay():
    torch.manual_seed(0)
    model = build_model("small_cnn", BITS, hidden=6)
    pictures = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), dtype=np.uint8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    settings = FitSettings(lr=0.02, batch_size=8, freeze_backbone=True)
    fit(model, pictures, PairwiseLoss(LabelSimilarity(np.arange(8) % 2), BITS), plain(2), settings)
    moved = {k for k, v in model.state_dict().items() if not torch.equal(before[k], v)}
    assert moved == {name for name in before if name.startswith("head.")}


@pytest.mark.parametrize("moving", [False, True])
def test_batchnorm_statistics_move_only_when_asked(moving):
    torch.manual_seed(0)
    model = build_model("resnet18", BITS)
    pictures = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), dtype=np.uint8)
    before = model.backbone.bn1.running_mean.clone()
    settings = FitSettings(batch_size=8, train_batchnorm=moving)
    fit(model, pictures, PairwiseLoss(LabelSimilarity(np.arange(8) % 2), BITS), plain(1), settings)
    assert torch.equal(model.backbone.bn1.running_mean, before) != moving


def _gradients(model, inputs, **settings):
    """Gradients of the last of two steps, the second of a short batch, and the weights after it."""
    loss = PairwiseLoss(LabelSimilarity(np.arange(len(inputs)) % 3), BITS)
    fit(model, inputs, loss, plain(1), FitSettings(lr=0.05, batch_size=11, seed=3, **settings))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"weight of {name}": p.detach() for name, p in model.named_parameters()}


class Doubtful(torch.nn.Module):
    """A backbone with torch's own dropout, whose mask follows torch's generator."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.dropout = backbone, torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.backbone(x))


@pytest.mark.parametrize("chunk", [1, 4, 10, 11])
def test_a_batch_in_chunks_has_the_gradient_of_the_whole_batch(chunk):
    pictures = np.random.default_rng(0).integers(0, 256, (21, 3, 8, 8), dtype=np.uint8)

    def model():
        torch.manual_seed(0)
        return build_model("small_cnn", BITS, dropout=0.5, noise=0.3).double()

    whole, parts = _gradients(model(), pictures), _gradients(model(), pictures, chunk=chunk)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_both_passes_of_a_chunk_draw_the_same_numbers(monkeypatch):
    """With torch's own dropout the masks depend on the chunks, but a chunk's two passes must agree."""
    seen = []
    pictures = np.random.default_rng(0).integers(0, 256, (11, 3, 8, 8), dtype=np.uint8)
    model = build_model("small_cnn", BITS)
    model.backbone = Doubtful(model.backbone)
    model.register_forward_hook(lambda module, args, logits: seen.append(logits.detach().clone()))
    _gradients(model, pictures, chunk=4)
    assert [len(z) for z in seen] == [4, 4, 3, 4, 4, 3]
    for first, second in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(first, second)


def test_chunks_are_as_large_as_memory_allows(monkeypatch):
    pictures = torch.zeros(16, 3, 32, 32, dtype=torch.uint8)
    model = build_model("small_cnn", BITS).train()
    settings = FitSettings(batch_size=16)
    assert batches.chunk_rows(model, pictures, settings) == 16
    each = batches.saved_bytes(model, pictures) // 16
    by_hand = 4 * (3 + 3 * 32) * 32 * 32  # the first convolution's input and output, GroupNorm's, ReLU's
    assert by_hand < each < 4 * by_hand
    monkeypatch.setattr(batches, "CHUNK_BYTES", 5 * each)
    assert batches.chunk_rows(model, pictures, settings) in (4, 5)
    assert batches.chunk_rows(model, torch.zeros(16, 3), settings) == 16  # vectors


def test_batchnorm_that_learns_sees_the_whole_batch(monkeypatch):
    monkeypatch.setattr(batches, "CHUNK_BYTES", 1)
    model, pictures = build_model("resnet18", BITS), torch.zeros(4, 3, 32, 32)
    assert batches.chunk_rows(model, pictures, FitSettings(train_batchnorm=True)) == 4
    assert batches.chunk_rows(model, pictures, FitSettings()) == 1
    with pytest.raises(ConfigError, match="chunk=2 would change what BatchNorm learns from"):
        batches.chunk_rows(model, pictures, FitSettings(train_batchnorm=True, chunk=2))


def _trajectory(data, **settings):
    """Weights of fch after each of six steps, those that the stage ends with, and the learning rates."""
    inputs, labels = data
    model, seen = _model(), []
    callbacks = Callbacks(epoch=lambda record: seen.append(model.head.fch.weight.detach().clone()))
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    given = FitSettings(lr=0.05, batch_size=ROWS, annealing="constant", **settings)
    history = fit(model, inputs, loss, plain(6), given, callbacks=callbacks)
    return seen, model.head.fch.weight.detach(), history.steps["lr"]


def test_a_stage_ends_with_the_averaged_weights(data):
    seen, final, _ = _trajectory(data, averaging=0.7)
    average = seen[0]
    for weights in seen[1:]:
        average = 0.7 * average + 0.3 * weights
    torch.testing.assert_close(final, average)
    plain_seen, plain_final, _ = _trajectory(data)
    assert torch.equal(plain_final, plain_seen[-1])
    assert torch.equal(plain_seen[-1], seen[-1])  # averaging watches, it does not steer


def test_the_learning_rate_warms_up(data):
    _, _, rates = _trajectory(data, warmup=0.5)  # of six steps
    assert rates == pytest.approx([0.05 / 3, 0.1 / 3, 0.05, 0.05, 0.05, 0.05], rel=1e-4)


@pytest.fixture
def scored_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashnet.training.loop.SCORE_STEPS", 1)


def test_short_epochs_are_scored_every_fifty_steps_and_at_the_end(data):
    inputs, labels = data
    steps, at = [], []

    def score() -> float:
        at.append(len(steps))
        return -len(at)  # falls from the first on

    fit(
        _model(), inputs, PairwiseLoss(LabelSimilarity(labels), BITS),
        [ContinuationStage(beta=1.0, epochs=70, patience=9), ContinuationStage(1.0, 90, patience=1)],
        FitSettings(lr=0.02, batch_size=45, log_every=1),
        callbacks=Callbacks(score=score, step=steps.append),
    )  # fmt: skip
    assert at == [50, 100, 140, 190, 240]  # two steps per epoch; the second stage ends at its second score


@pytest.mark.usefixtures("scored_each_epoch")
def test_a_score_is_that_of_the_averaged_weights(data):
    inputs, labels = data
    model, scored = _model(), []

    def score() -> float:
        scored.append(model.head.fch.weight.detach().clone())
        return float(len(scored) == 2)  # the second is the best

    stage = ContinuationStage(beta=1.0, epochs=6, patience=2)
    settings = FitSettings(lr=0.05, batch_size=ROWS, annealing="constant", averaging=0.7)
    fit(model, inputs, PairwiseLoss(LabelSimilarity(labels), BITS), [stage], settings,
        callbacks=Callbacks(score=score))  # fmt: skip
    seen, _, _ = _trajectory(data, averaging=0.7)
    torch.testing.assert_close(scored[1], 0.7 * seen[0] + 0.3 * seen[1])
    assert torch.equal(model.head.fch.weight, scored[1])


def test_momentum_and_head_scale_are_plain_sgd(data):
    """Three steps by hand: v = 0.9 v + (g + 5e-4 w), w -= lr * scale * v."""
    inputs, labels = data
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    settings = FitSettings(lr=0.05, batch_size=90, annealing="constant", seed=2)
    model = _model(hidden=5).double()
    fit(model, inputs.astype(np.float64), loss, plain(3), settings)
    slow = _model(hidden=5).double()
    velocity = {name: torch.zeros_like(p) for name, p in slow.named_parameters()}
    for epoch in range(3):
        rows = np.random.default_rng([2, epoch]).permutation(ROWS)
        z = slow(torch.from_numpy(inputs[rows].astype(np.float64)))
        value = loss(z, torch.from_numpy(rows), torch.ones(ROWS, dtype=torch.bool), 1.0)
        slow.zero_grad()
        value.backward()
        with torch.no_grad():
            for name, p in slow.named_parameters():
                velocity[name] = 0.9 * velocity[name] + p.grad + 5e-4 * p
                p -= 0.05 * 10 * velocity[name]  # a hidden layer begins at random as the head does
    for (name, a), b in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


def test_a_backbone_of_pictures_learns_more_slowly_than_the_head():
    settings = FitSettings(lr=0.05, head_lr_scale=10)
    scales = [
        group["scale"] for group in make_optimiser(build_model("small_cnn", BITS), settings).param_groups
    ]
    assert scales == [1, 10]


@pytest.mark.usefixtures("scored_each_epoch")
def test_a_score_ends_a_stage_and_its_best_weights_are_kept(data):
    inputs, labels = data
    model, seen = _model(), []

    def score() -> float:  # the third epoch is the best
        seen.append(model.head.fch.weight.detach().clone())
        return {3: 0.9}.get(len(seen), 0.1 * len(seen) if len(seen) < 3 else 0.5)

    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    settings = FitSettings(lr=0.02, batch_size=90, seed=1)
    history = fit(
        model, inputs, loss, staged(1, 50, 1, patience=2), settings, callbacks=Callbacks(score=score)
    )
    assert history.stages[0].epochs == len(seen) == 5
    assert torch.equal(model.head.fch.weight, seen[2])


@pytest.mark.usefixtures("scored_each_epoch")
def test_a_stage_may_keep_the_weights_it_began_with(data):
    inputs, labels = data
    model = _model()
    before = model.head.fch.weight.detach().clone()
    scores = iter([0.5, 0.4, 0.45, 0.3])
    callbacks = Callbacks(score=lambda: next(scores), keep_start=True)
    loss, settings = PairwiseLoss(LabelSimilarity(labels), BITS), FitSettings(lr=0.02, batch_size=90)
    history = fit(model, inputs, loss, staged(1, 50, 1, patience=3), settings, callbacks=callbacks)
    assert history.stages[0].epochs == 3
    assert torch.equal(model.head.fch.weight, before)


@pytest.mark.usefixtures("scored_each_epoch")
def test_a_resumed_stage_still_knows_its_best_weights(data, tmp_path):
    inputs, labels = data
    loss = PairwiseLoss(LabelSimilarity(labels), BITS)
    settings = FitSettings(lr=0.02, batch_size=90, seed=1, checkpoint_every=1)

    def trained(folder, stop_after):
        model = _model()
        scores = {1: 0.9}

        def score() -> float:
            step = len(calls) + 1
            if step == stop_after:
                raise KeyboardInterrupt
            calls.append(step)
            return scores.get(step, 0.5)

        fit(
            model, inputs, loss, staged(1, 9, 1, patience=4), settings,
            checkpoints=Checkpoints(str(tmp_path / folder)), callbacks=Callbacks(score=score),
        )  # fmt: skip
        return model.head.fch.weight.detach()

    calls: list[int] = []
    whole = trained("whole", 0)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        trained("killed", 3)
    assert torch.equal(trained("killed", 0), whole)


class StandIn:
    """A device that takes ``copy`` and ``compute`` seconds per batch, by a clock that is computed.

    The loop waits for each loss: its own clock is then that of the computing.
    """

    def __init__(self, copy: float, compute: float, ahead: int) -> None:
        self.copy_s, self.compute_s, self.ahead = copy, compute, ahead
        self.now = self.copy_free = 0.0
        self.steps = 0

    def start(self, batch):
        self.copy_free = max(self.copy_free, self.now) + self.copy_s
        return batch, self.copy_free

    def finish(self, ticket):
        batch, copied = ticket
        self.now = max(self.now, copied) + self.compute_s
        self.steps += 1
        return batch


@pytest.mark.parametrize("times", [(3, 3), (5, 2), (2, 5), (0, 4)])
def test_batches_are_copied_while_the_one_before_is_computed(data, monkeypatch, times):
    inputs, labels = data
    loss, settings = PairwiseLoss(LabelSimilarity(labels), BITS), FitSettings(batch_size=10)

    def trained(device: StandIn) -> tuple[float, torch.Tensor]:
        monkeypatch.setattr(loop, "make_copies", lambda _: device)
        model = _model()
        fit(model, inputs, loss, staged(1, 4, 1), settings)
        return device.steps / device.now, model.head.fch.weight.detach()

    rate, weights = trained(StandIn(*times, CudaCopies.ahead))
    in_turns, expected = trained(StandIn(*times, ahead=0))
    assert rate >= 0.9 / max(times)
    assert in_turns == pytest.approx(1 / sum(times))
    assert torch.equal(weights, expected)


def test_out_of_device_memory_names_the_batch_size(data):
    inputs, labels = data

    class Full(PairwiseLoss):
        def __call__(self, *_):
            raise torch.OutOfMemoryError("CUDA out of memory")

    loss = Full(LabelSimilarity(labels), n_bits=16)
    with pytest.raises(DeviceMemoryError, match="batch of 32 rows; use a smaller batch_size or more workers"):
        fit(_model(), inputs, loss, staged(1), FitSettings(batch_size=32))


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_only_where_the_hardware_has_it(monkeypatch, native):
    """torch says yes for emulation, too, unless it is told not to count it."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native
    )
    assert has_bfloat16() is native
