"""A run on disk, without a cluster: prepared, trained, refused, left alone when it is done."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from hashnet.codes import hamming_distances
from hashnet.data.images import Preprocess
from hashnet.data.manifest import Manifest
from hashnet.data.pairs import PairTable
from hashnet.data.sources import make_manifest
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.encoding.encoder import Encoder
from hashnet.errors import ConfigError, DataError, FormatError, LineageMismatch, ModelError
from hashnet.io import storage
from hashnet.labels import to_lists
from hashnet.losses.pairwise import PairwiseLoss, TableSimilarity
from hashnet.models.backbones.small_cnn import SmallCNN
from hashnet.models.bundle import load_bundle
from hashnet.models.hash_model import build_model
from hashnet.training.batches import PairSampler
from hashnet.training.checkpoints import read_history
from hashnet.training.diagnostics import HeldOutScore
from hashnet.training.frozen_backbone import probe_of, train_head_first
from hashnet.training.inputs import ArraySource, ImageSource, held_out
from hashnet.training.loop import Callbacks
from hashnet.training.preparation import prepare, read_config
from hashnet.training.train_config import TrainConfig
from hashnet.training.trainer import train_run

TRAIN, QUERY, DATABASE = 1, 2, 4


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    """What a search of the head's settings finds is tested beside it; here it must not take long."""
    monkeypatch.setattr("hashnet.training.recipe_search.STEPS", 5)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> str:
    uri = str(tmp_path_factory.mktemp("data") / "manifest.parquet")
    make_manifest("digits", uri, modality="features", n_query=97, n_train=400)
    return uri


def _config(tmp_path, manifest, **options) -> TrainConfig:
    options = {
        "first_epochs": 30,
        "stage_epochs": 4,
        "dropout": 0.0,
        "n_bits": 32,
        "batch_size": 128,
    } | options
    return TrainConfig(**{"run": str(tmp_path / "run"), "manifest": manifest} | options)


def test_a_run_from_beginning_to_end(tmp_path, manifest):
    config = _config(tmp_path, manifest, map_k=1000, validation=0.2, log_every=1)
    prepared = prepare(config)
    assert prepared.finished is None
    summary = train_run(prepared.config)
    model, info = load_bundle(f"{config.run}/model")
    assert info.sha256 == summary.sha256
    assert info.class_names == list("0123456789")
    assert summary.train_rows == 320  # a fifth of 400 held out
    assert summary.validation_map > 0.6
    measured = info.summary["measured"]
    assert (measured["rows"], measured["split"]) == (1700, "database")
    assert sum(measured["histogram"]) == 1700 * 32
    assert len(measured["histogram"]) == 100
    assert measured["binary_share"] > 0.95
    history = read_history(f"{config.run}/model")
    assert [stage.to_dict() for stage in history.stages] == info.summary["stages"]
    assert len(history) == summary.steps == (30 + 9 * 4) * 3
    assert history.stages[-1].map > 0.6
    # J, L and |g| are those of the model in the bundle
    rows = Manifest.open(manifest).read("database", columns=["feature"])
    z = model(torch.tensor(np.stack(rows["feature"].to_numpy())))
    assert float((torch.tanh(512 * z).abs() > 0.99).float().mean()) == pytest.approx(measured["binary_share"])
    again = prepare(config)
    assert again.finished["sha256"] == summary.sha256
    assert (
        prepare(dataclasses.replace(config, num_workers=7, threads=3)).finished is not None
    )  # how, not what
    assert read_config(config.run) == config


def test_another_configuration_is_refused_once_something_was_learnt(tmp_path, manifest):
    prepare(_config(tmp_path, manifest, lr=7.0))
    prepare(_config(tmp_path, manifest))  # the first one failed, and was corrected
    assert read_config(str(tmp_path / "run")).lr is None
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir()
    with pytest.raises(LineageMismatch, match=r"lr was None, now 0.5; seed was 0, now 3.*another run folder"):
        prepare(_config(tmp_path, manifest, lr=0.5, seed=3))
    prepare(_config(tmp_path, manifest, num_workers=2))


def test_a_forgotten_variant_is_told_without_what_followed_from_it(tmp_path):
    """Another length is given and variant=auto left out: the six keys that auto set are not the user's."""
    unlabelled = str(tmp_path / "vectors.parquet")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(120, 8)).astype(np.float32))
    make_manifest("npy", unlabelled, path=str(tmp_path / "x.npy"), n_query=10, n_train=100)
    prepare(TrainConfig(run=str(tmp_path / "run"), manifest=unlabelled, variant="auto", n_bits=16))
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir()
    with pytest.raises(LineageMismatch) as refused:
        prepare(TrainConfig(run=str(tmp_path / "run"), manifest=unlabelled, n_bits=8))
    told = str(refused.value).partition("configuration: ")[2].partition(". Use")[0]
    assert told == "n_bits was 16, now 8; variant was auto, now hashnet"


def test_other_data_is_refused(tmp_path, manifest):
    prepare(_config(tmp_path, manifest))
    other = str(tmp_path / "other.parquet")
    make_manifest("digits", other, modality="features", n_query=10, n_train=300)
    with pytest.raises(LineageMismatch, match="was trained on other data"):
        prepare(_config(tmp_path, other))
    with pytest.raises(DataError, match="holds no manifest"):
        prepare(_config(tmp_path, str(tmp_path / "nothing")))


def test_data_must_be_named(tmp_path):
    with pytest.raises(ConfigError, match=r"manifest=PATH .* or dataset=digits"):
        prepare(TrainConfig(run=str(tmp_path)))


def test_embedded_pictures(tmp_path):
    config = TrainConfig(
        run=str(tmp_path),
        dataset="digits",
        n_bits=8,
        first_epochs=1,
        stages=1,
        resize=8,
        crop=8,
        measure_rows=50,
    )
    summary = train_run(prepare(config).config)
    assert summary.backbone == "small_cnn"
    assert summary.measured.rows == 50


def test_a_frozen_backbone_sees_each_picture_once(tmp_path, monkeypatch):
    torch.manual_seed(0)
    weights = tmp_path / "weights.pth"
    torch.save(SmallCNN().state_dict(), weights)
    seen = []
    batch = ImageSource.batch
    monkeypatch.setattr(
        ImageSource, "batch", lambda self, rows, epoch: (seen.append(len(rows)), batch(self, rows, epoch))[1]
    )
    config = TrainConfig(
        run=str(tmp_path / "run"), dataset="digits", n_bits=24, backbone="small_cnn", weights=str(weights),
        resize=8, crop=8, freeze_backbone=True, first_epochs=30, stage_epochs=2, map_k=500, measure_rows=20,
    )  # fmt: skip
    summary = train_run(prepare(config).config)
    assert sum(seen) == 197 + 1600  # though MAP is measured at ten stages, and the last figures besides
    assert summary.stages[-1].map > 0.5  # random features of an untrained network are features, too
    model, _ = load_bundle(f"{config.run}/model")
    before = torch.load(weights, weights_only=True)
    assert all(torch.equal(v, before[k]) for k, v in model.backbone.state_dict().items())
    assert (model.feature_std != 1).all()  # the probe's scaling came over, too


def test_the_hash_layer_is_trained_before_a_pretrained_backbone(tmp_path, caplog):
    caplog.set_level("INFO", "hashnet.training.trainer")
    torch.manual_seed(0)
    weights = tmp_path / "weights.pth"
    torch.save(SmallCNN().state_dict(), weights)
    config = TrainConfig(
        run=str(tmp_path / "run"), dataset="digits", n_bits=24, backbone="small_cnn", weights=str(weights),
        resize=8, crop=8, head_epochs=20, first_epochs=1, stages=1, lr=0.0, map_k=500, measure_rows=20,
    )  # fmt: skip
    summary = train_run(prepare(config).config)
    assert summary.steps == 4  # the stages alone are counted
    assert "head alone: J 0." in caplog.text
    assert summary.stages[-1].map > 0.5  # with lr=0 all of it comes from the hash layer's own training


def _last_block(tmp_path, run="run", **options) -> TrainConfig:
    weights = tmp_path / "weights.pth"
    if not weights.exists():
        torch.manual_seed(0)
        torch.save(SmallCNN().state_dict(), weights)
    options = {"first_epochs": 4, "stages": 2, "stage_epochs": 2, "views": 3} | options
    return TrainConfig(
        run=str(tmp_path / run), dataset="digits", n_bits=24, backbone="small_cnn", weights=str(weights),
        resize=9, crop=8, head_epochs=20, measure_rows=20, train_last=1, cache=str(tmp_path / "cache"),
        **options,
    )  # fmt: skip


def test_the_last_block_learns_from_activations_computed_once(tmp_path, monkeypatch):
    seen = []
    batch = ImageSource.batch

    def counted(self, rows, epoch):
        seen.append((self.train, epoch, len(rows)))
        return batch(self, rows, epoch)

    monkeypatch.setattr(ImageSource, "batch", counted)
    config = _last_block(tmp_path)
    train_run(prepare(config).config)
    for view in range(3):  # six epochs of the training, but each view of a picture is computed once
        assert sum(n for train, epoch, n in seen if train and epoch == view) == 1000
    model, _ = load_bundle(f"{config.run}/model")
    before = torch.load(tmp_path / "weights.pth", weights_only=True)
    after = model.backbone.state_dict()
    assert {k for k in before if not torch.equal(before[k], after[k])} == {
        "layers.8.weight", "layers.9.weight", "layers.9.bias"
    }  # fmt: skip
    assert (model.feature_std != 1).all()
    seen.clear()
    train_run(prepare(_last_block(tmp_path, "again", lr=0.001)).config)
    assert not any(train for train, _, _ in seen)  # another run with the same cache


def test_the_last_block_learns_what_it_would_learn_in_place(tmp_path, monkeypatch):
    """One view is the picture as epoch 0 shows it: with activations kept or not, training is the same."""
    kept = _last_block(tmp_path, "kept", views=1, first_epochs=1, stages=1)
    train_run(prepare(kept).config)
    monkeypatch.setattr("hashnet.training.frozen_backbone.ACTIVATION_BYTES", 0)
    in_place = _last_block(tmp_path, "in place", views=1, first_epochs=1, stages=1)
    train_run(prepare(in_place).config)
    one, two = (load_bundle(f"{config.run}/model")[0].state_dict() for config in (kept, in_place))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-2, atol=2e-3, msg=name)  # float16 between


def test_training_of_the_last_block_resumes(tmp_path):
    config = _last_block(tmp_path, "whole", averaging=0.9)
    train_run(prepare(config).config)
    other = dataclasses.replace(config, run=str(tmp_path / "parts"))

    def interrupt(record):
        if record.stage == 0:
            raise KeyboardInterrupt

    prepared = prepare(dataclasses.replace(other, checkpoint_every=5)).config
    with pytest.raises(KeyboardInterrupt):
        train_run(prepared, callbacks=Callbacks(stage=interrupt))
    train_run(prepared)
    whole, parts = (load_bundle(f"{run}/model")[0].state_dict() for run in (config.run, other.run))
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_train_last_that_makes_no_sense_is_refused(tmp_path, manifest):
    with pytest.raises(ModelError, match="has 3 blocks; train_last must be at most 2"):
        train_run(prepare(dataclasses.replace(_last_block(tmp_path), train_last=3)).config)
    with pytest.raises(ConfigError, match="leave one of them out"):
        dataclasses.replace(_last_block(tmp_path), freeze_backbone=True)
    with pytest.raises(ConfigError, match="vectors have none"):
        prepare(_config(tmp_path, manifest, train_last=1, run=str(tmp_path / "vectors")))


def test_a_worker_that_logged_no_step_has_no_figures_to_tell(tmp_path, caplog, monkeypatch):
    """As every worker but the first: None once came as far as "%.4f"."""
    caplog.set_level("INFO", "hashnet.training.trainer")
    monkeypatch.setattr("hashnet.training.frozen_backbone.MIN_HEAD_STEPS", 5)
    monkeypatch.setattr("hashnet.training.loop._Loop._log", lambda *_: None)
    torch.save(SmallCNN().state_dict(), tmp_path / "weights.pth")
    config = TrainConfig(
        run=str(tmp_path / "run"), dataset="digits", n_bits=8, backbone="small_cnn", resize=8, crop=8,
        weights=str(tmp_path / "weights.pth"), head_epochs=2, first_epochs=1, stages=1,
    )  # fmt: skip
    assert train_run(prepare(config).config).steps > 0
    assert "head alone" not in caplog.text


def test_data_that_was_recorded_is_held_to(tmp_path, manifest):
    config = _config(tmp_path, manifest)
    prepare(config)
    recorded = tmp_path / "run" / "checkpoints" / "data.json"
    about = json.loads(recorded.read_text())
    del about["seal"]  # as older ones are
    assert about == {
        "kind": "training_data", "format_version": 1, "manifest_sha256": Manifest.open(manifest).sha256,
    }  # fmt: skip
    recorded.write_text(json.dumps(about))
    prepare(config)
    recorded.write_text(json.dumps({**about, "manifest_sha256": "00" * 32}))
    with pytest.raises(LineageMismatch, match="was started on data with sha256 000000000000…, its manifest"):
        prepare(config)
    recorded.write_text(json.dumps({**about, "format_version": 9}))
    with pytest.raises(FormatError, match="format version 9"):
        prepare(config)


FROZEN = {
    "manifest": None, "dataset": "digits", "backbone": "small_cnn", "resize": 8, "crop": 8,
    "freeze_backbone": True, "map_k": 50,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, FROZEN], ids=["vectors", "frozen backbone"])
def test_a_run_with_a_hidden_layer_resumes_with_it(tmp_path, manifest, monkeypatch, changes):
    monkeypatch.setattr("hashnet.training.recipe_search._Trials.deeper", lambda self, linear, hidden: hidden)

    def stop(record):
        if record.step == 20:
            raise KeyboardInterrupt

    def trained(folder, callbacks=None):
        config = _config(
            tmp_path / folder, manifest, first_epochs=6, stages=2, lr=0.02, checkpoint_every=7, log_every=1
        )
        return train_run(prepare(dataclasses.replace(config, **changes)).config, callbacks=callbacks)

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", Callbacks(step=stop))
    assert trained("stopped").sha256 == whole.sha256
    model, _ = load_bundle(str(tmp_path / "whole" / "run" / "model"))
    assert model.arguments["hidden"] == 512
    assert model.head.hidden[0].out_features == 512


def test_a_run_on_an_object_store_resumes_there(bucket, manifest):
    run = storage.join(bucket, "training")
    config = TrainConfig(
        run=run, manifest=manifest, n_bits=16, batch_size=128, dropout=0.0, first_epochs=3, stages=3,
        stage_epochs=1, checkpoint_every=2, log_every=1,
    )  # fmt: skip

    def crash(row):
        if row.step == 13:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train_run(prepare(config).config, callbacks=Callbacks(step=crash))
    assert storage.list_names(storage.join(run, "checkpoints", "step-00000012"))
    assert train_run(prepare(config).config).steps == 20
    assert read_history(storage.join(run, "model")).steps["step"] == list(range(20))
    assert prepare(config).finished["steps"] == 20


def test_pairs_alone(tmp_path):
    uri = str(tmp_path / "manifest.parquet")
    labelled = make_manifest("digits", uri, modality="features", n_query=97, n_train=400)
    ids, labels = labelled.row_ids("train"), labelled.labels("train").argmax(axis=1)
    a, b = np.random.default_rng(0).integers(0, 400, (2, 3000))
    a, b = a[a != b], b[a != b]
    PairTable.from_arrays(ids[a], ids[b], labels[a] == labels[b]).save(str(tmp_path / "pairs.parquet"))
    config = _config(tmp_path, uri, pairs=str(tmp_path / "pairs.parquet"), map_k=500)
    summary = train_run(prepare(config).config)
    assert summary.stages[-1].map > 0.6
    assert summary.measured.J is None  # of database rows nothing is known without labels


@pytest.fixture
def unlabelled(tmp_path):
    """A manifest without any label, beside the classes nobody tells it."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 4, 300)
    features = (rng.normal(size=(4, 10))[classes] * 2 + rng.normal(size=(300, 10))).astype(np.float32)
    np.save(tmp_path / "x.npy", features)
    made = make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "x.npy"), n_query=50, n_train=200)
    assert made.n_classes is None
    return made, features, classes


def test_pairs_alone_without_a_label_anywhere(tmp_path, unlabelled):
    made, features, classes = unlabelled
    a, b = np.random.default_rng(1).choice(made.row_ids("train"), (2, 2000))
    a, b = a[a != b], b[a != b]
    PairTable.from_arrays(a, b, classes[a] == classes[b]).save(str(tmp_path / "pairs.parquet"))
    config = _config(tmp_path, made.uri, pairs=str(tmp_path / "pairs.parquet"), n_bits=16, batch_size=64)
    train_run(prepare(config).config)
    codes = Encoder.load(f"{config.run}/model").encode(features)
    query, database = made.row_ids("query"), made.row_ids("database")
    nearest = database[hamming_distances(codes[query], codes[database]).argmin(axis=1)]
    assert (classes[nearest] == classes[query]).mean() > 0.9


def test_pairs_from_neighbours(tmp_path, unlabelled):
    made, _, _ = unlabelled
    prepared = prepare(_config(tmp_path, made.uri, pairs="neighbours", n_bits=16, batch_size=64))
    assert prepared.config.pairs.endswith("pairs.parquet")
    pairs = PairTable.open(prepared.config.pairs, prepared.manifest)
    assert 0 < pairs.counts().n_similar < pairs.counts().n_dissimilar
    before = Path(prepared.config.pairs).read_bytes()
    again = prepare(_config(tmp_path, made.uri, pairs="neighbours", n_bits=16, batch_size=64))
    assert Path(again.config.pairs).read_bytes() == before  # made once
    assert again.config == prepared.config


def recall_of(codes, features, made):
    from hashnet.metrics import exact_neighbours, neighbour_report

    query, database = made.row_ids("query"), made.row_ids("database")
    truth = exact_neighbours(features[query], [features[database]], 5)
    return neighbour_report(codes[query], codes[database], truth, within=20).recall


def test_learning_from_neighbours_starts_at_itq_and_keeps_the_best(tmp_path, unlabelled):
    from hashnet.baselines import ITQ

    made, features, _ = unlabelled
    config = prepare(_config(tmp_path, made.uri, variant="auto", n_bits=16, batch_size=64)).config
    assert (config.variant, config.start, config.class_weights) == ("hashnet", "itq", "batch")
    summary = train_run(config)
    assert summary.validation_recall >= summary.start_recall
    learned = recall_of(Encoder.load(f"{config.run}/model").encode(features), features, made)
    itq = ITQ(n_bits=16, seed=0).fit(features[made.row_ids("train")]).encode(features)
    assert learned > recall_of(itq, features, made) - 0.05
    again = dataclasses.replace(config, run=str(tmp_path / "slow"), lr=1e-12, pairs="neighbours")
    still = train_run(prepare(again).config)  # learns nothing, and stays where it began
    assert still.validation_recall == pytest.approx(still.start_recall)


def test_neighbours_of_pictures_need_a_trained_network(tmp_path):
    config = _config(tmp_path, None, dataset="digits", pairs="neighbours", backbone="small_cnn")
    with pytest.raises(ConfigError, match="has random weights; use weights=pretrained"):
        prepare(config)


def test_pairs_that_teach_nothing_are_refused_before_training(tmp_path, unlabelled):
    made, _, _ = unlabelled
    ids = made.row_ids("train")
    PairTable.from_arrays(ids[:5], ids[5:10], [True] * 5).save(str(tmp_path / "pairs.parquet"))
    with pytest.raises(DataError, match="5 pairs and none is dissimilar"):
        prepare(_config(tmp_path, made.uri, pairs=str(tmp_path / "pairs.parquet")))
    PairTable.from_arrays(made.row_ids("query")[:2], ids[:2], [True, False]).save(
        str(tmp_path / "pairs.parquet")
    )
    with pytest.raises(DataError, match="not among the train rows"):
        prepare(_config(tmp_path, made.uri, pairs=str(tmp_path / "pairs.parquet")))


def test_map_that_cannot_be_measured_is_refused_before_training(tmp_path, unlabelled):
    made, _, _ = unlabelled
    ids = made.row_ids("train")
    PairTable.from_arrays(ids[:2], ids[2:4], [True, False]).save(str(tmp_path / "pairs.parquet"))
    with pytest.raises(DataError, match="map_k=10 needs labelled query and database rows"):
        prepare(_config(tmp_path, made.uri, pairs=str(tmp_path / "pairs.parquet"), map_k=10))


def test_few_pairs_are_gone_through_more_often(tmp_path, unlabelled):
    made, _, _ = unlabelled
    ids = made.row_ids("train")
    PairTable.from_arrays(ids[:5], ids[5:10], [True, False] * 2 + [True]).save(
        str(tmp_path / "pairs.parquet")
    )
    config = _config(
        tmp_path, made.uri, pairs=str(tmp_path / "pairs.parquet"), batch_size=5, first_epochs=None
    )
    assert prepare(config).config.first_epochs == 500  # of two steps: ten rows of 200 are named


def test_a_trial_with_rows_held_out_has_as_many_epochs_as_the_run_it_stands_for(tmp_path):
    made = _vectors(tmp_path, train=400)
    with_all, with_half = (
        prepare(_config(tmp_path / name, made, batch_size=8, validation=share, first_epochs=None)).config
        for name, share in (("all", 0.0), ("half", 0.5))
    )
    assert with_all.first_epochs == with_half.first_epochs


def test_pairs_that_were_edited_are_refused(tmp_path, unlabelled):
    made, _, _ = unlabelled
    ids, uri = made.row_ids("train"), str(tmp_path / "pairs.parquet")
    PairTable.from_arrays(ids[:2], ids[2:4], [True, False]).save(uri)
    config = _short(tmp_path, made.uri, pairs=uri)
    prepare(config)
    recorded = tmp_path / "run" / "checkpoints" / "data.json"
    about = json.loads(recorded.read_text())
    prepare(config)
    PairTable.from_arrays(ids[:2], ids[2:4], [False, True]).save(uri)
    with pytest.raises(LineageMismatch, match=r"was started on data with sha256 .*, its pairs table now has"):
        prepare(config)
    del about["pairs_sha256"], about["seal"]  # as the first ones were
    recorded.write_text(json.dumps(about))
    train_run(prepare(config).config)
    (tmp_path / "pairs.parquet").unlink()
    assert prepare(config).finished is not None  # what is learnt needs them no more


def test_the_hash_layer_alone_has_its_steps_on_few_pairs(monkeypatch):
    monkeypatch.setattr("hashnet.training.frozen_backbone.MIN_HEAD_STEPS", 8)
    features = np.random.default_rng(0).normal(size=(40, 512)).astype(np.float32)
    loss = PairwiseLoss(TableSimilarity([1, 2], [3, 4], [True, False], 40), 8)
    betas = []

    def counted(logits, rows, valid, beta):
        betas.append(beta)
        return loss(logits, rows, valid, beta)

    config = TrainConfig(run="unused", n_bits=8, batch_size=10, lr=0.01, head_epochs=1)
    sampler = PairSampler([1, 2], [3, 4], config.batch_size, seed=0)
    model = build_model("small_cnn", 8)
    train_head_first(model, probe_of(model), 0.02, ArraySource(features), counted, config, sampler, "cpu")
    assert betas.count(1.0) == 8


def test_the_hash_layer_alone_learns_from_pairs_too(monkeypatch):
    monkeypatch.setattr("hashnet.training.frozen_backbone.MIN_HEAD_STEPS", 5)
    features = np.random.default_rng(0).normal(size=(40, 512)).astype(np.float32)
    loss = PairwiseLoss(TableSimilarity([1, 2], [3, 4], [True, False], 40), 8)
    seen: set[int] = set()

    def watched(logits, rows, valid, beta):
        seen.update(rows[valid].tolist())
        return loss(logits, rows, valid, beta)

    config = TrainConfig(run="unused", n_bits=8, batch_size=40, lr=0.01, head_epochs=1)
    sampler = PairSampler([1, 2], [3, 4], config.batch_size, seed=0)
    model = build_model("small_cnn", 8)
    train_head_first(model, probe_of(model), 0.02, ArraySource(features), watched, config, sampler, "cpu")
    assert seen == {1, 2, 3, 4}


def test_one_class_is_refused_before_training(tmp_path):
    uri = str(tmp_path / "manifest.parquet")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.zeros(30, dtype=np.int64))
    make_manifest("npy", uri, path=str(tmp_path / "x.npy"), labels=str(tmp_path / "y.npy"))
    with pytest.raises(DataError, match="none is dissimilar"):
        prepare(_config(tmp_path, uri))


def test_more_workers_than_rows_is_refused(tmp_path):
    uri = str(tmp_path / "manifest.parquet")
    make_manifest("digits", uri, modality="features", n_query=10, n_train=15)
    with pytest.raises(DataError, match="15 training rows for 20 workers"):
        prepare(_config(tmp_path, uri, num_workers=20))


def _vectors(tmp_path, name="m", *, train=40, query=4, database=40, unlabelled=(), features=None) -> str:
    """A manifest of two classes of vectors: training rows first, then queries, then database rows."""
    n = train + query + database
    rng = np.random.default_rng(0)
    if features is None:
        features = rng.normal(size=(n, 4)).astype(np.float32)
        features[::2, 0] += 4
    labels = np.eye(2, dtype=np.uint8)[np.arange(n) % 2]
    labels[list(unlabelled)] = 0
    flags = np.repeat(np.array([TRAIN, QUERY, DATABASE], dtype=np.uint8), [train, query, database])
    column = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), 4)
    table = pa.table({"uri": pa.nulls(n, pa.string()), "feature": column})
    rows = SourceRows(n, lambda a, b: table[a:b], "features", to_lists(labels), 2, n_features=4)
    return write_manifest(str(tmp_path / name), rows, flags).uri


def _short(tmp_path, manifest, **options) -> TrainConfig:
    return _config(tmp_path, manifest, n_bits=8, first_epochs=2, stage_epochs=1, stages=2, **options)


def test_pictures_that_cannot_be_read_after_training_only_count(tmp_path):
    """30 of 80 database pictures are missing: far more than max_bad_fraction, and none was trained on."""
    rng = np.random.default_rng(0)
    for i in range(90):
        if not 20 <= i < 50:
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    table = pa.table({"uri": [str(tmp_path / f"{i}.png") for i in range(90)]})
    labels = to_lists(np.eye(2, dtype=np.uint8)[np.arange(90) % 2])
    rows = SourceRows(90, lambda a, b: table[a:b], labels=labels, n_classes=2)
    flags = np.full(90, DATABASE, dtype=np.uint8)
    flags[:20], flags[80:] = TRAIN, QUERY
    made = write_manifest(str(tmp_path / "m"), rows, flags)
    with pytest.raises(ModelError, match="small_cnn cannot take crop=2"):
        train_run(prepare(_short(tmp_path / "small", made.uri, resize=8, crop=2)).config)
    config = _short(tmp_path, made.uri, resize=8, crop=8, map_k=10, max_bad_fraction=0.01)
    summary = train_run(prepare(config).config)
    assert summary.measured.rows == 30
    assert 0 <= summary.stages[-1].map <= 1


def test_vectors_that_cannot_be_used_after_training_only_count(tmp_path):
    features = np.random.default_rng(0).normal(scale=1e-3, size=(84, 4)).astype(np.float32)
    features[50], features[60], features[70] = np.nan, np.inf, 3e38  # the last overflows inside the model
    made = _vectors(tmp_path, features=features)
    summary = train_run(prepare(_short(tmp_path, made, map_k=10)).config)
    assert summary.measured.rows == 37
    features[44:] = np.nan
    made = _vectors(tmp_path, "none", features=features)
    summary = train_run(prepare(_short(tmp_path / "none", made, map_k=10)).config)
    assert (summary.measured.split, summary.measured.rows) == ("train", 40)
    assert summary.stages[-1].map is None


def test_a_run_goes_on_with_other_tolerances(tmp_path, manifest):
    prepare(_config(tmp_path, manifest))
    prepare(_config(tmp_path, manifest, max_bad_fraction=0.5, measure_rows=0))


@pytest.mark.parametrize(
    ("n_rows", "share"), [(40, 0.01), (40, 0.03), (2, 0.9), (3, 0.9), (4, 0.9), (10, 0.9)]
)
def test_too_few_rows_to_hold_out_are_refused(n_rows, share):
    with pytest.raises(DataError, match=rf"validation={share} of {n_rows} training rows .* or another share"):
        held_out(n_rows, share)


def test_what_cannot_be_scored_is_refused_before_training(tmp_path):
    made = _vectors(tmp_path)
    with pytest.raises(DataError, match="holds 0 out and keeps 40"):
        prepare(_short(tmp_path, made, validation=0.01))
    with pytest.raises(DataError, match="20 training rows for 30 workers"):
        prepare(_short(tmp_path, made, validation=0.5, num_workers=30))
    bare = _vectors(tmp_path, "bare", unlabelled=[int(held_out(40, 0.5)[1][0]), 41])
    with pytest.raises(DataError, match=r"1 of 20 held-out rows have no label.*validation=0\.5 out"):
        prepare(_short(tmp_path, bare, validation=0.5))
    with pytest.raises(DataError, match=r"1 of 4 query rows have no label.*leave map_k=10 out"):
        prepare(_short(tmp_path, bare, map_k=10))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_damaged_is_no_beginning(tmp_path, manifest):
    config = _config(tmp_path, manifest, n_bits=8, first_epochs=1, stages=1)
    untouched = train_run(prepare(config).config).sha256
    again = dataclasses.replace(config, run=str(tmp_path / "again"))
    prepared = prepare(again)
    broken = tmp_path / "again" / "checkpoints" / "step-00000002"
    broken.mkdir()
    (broken / "state.json").write_text("{}")
    assert train_run(prepared.config).sha256 == untouched  # standardised like the other


def test_data_without_training_rows_is_named(tmp_path):
    with pytest.raises(DataError, match="has 0 training rows"):
        prepare(_short(tmp_path, _vectors(tmp_path, train=0)))


def test_a_refused_attempt_leaves_nothing_that_the_next_one_meets(tmp_path, manifest):
    with pytest.raises(DataError, match="has 0 training rows"):
        prepare(_config(tmp_path, _vectors(tmp_path, train=0)))
    assert prepare(_config(tmp_path, manifest)).manifest.sha256 == Manifest.open(manifest).sha256
    run = str(tmp_path / "embedded")
    with pytest.raises(ConfigError, match="backbone=features takes vectors"):
        prepare(TrainConfig(run=run, dataset="digits", backbone="features"))
    with_vectors = TrainConfig(run=run, dataset="digits", backbone="features", modality="features")
    assert prepare(with_vectors).manifest.modality == "features"
    other = prepare(TrainConfig(run=run, dataset="synthetic"))
    assert other.manifest.source["name"] == "synthetic"


def test_training_rows_alone_are_enough(tmp_path):
    uri = str(tmp_path / "m.parquet")
    make_manifest("digits", uri, modality="features", all_in=["train"])
    config = _config(tmp_path, uri, first_epochs=1, stage_epochs=1, stages=1)
    assert train_run(prepare(config).config).measured.L > 0


def test_a_manifest_in_the_run_folder_is_taken_as_it_is(tmp_path, manifest):
    mine = Manifest.open(manifest).copy_to(str(tmp_path / "run" / "manifest.parquet"))
    assert prepare(_config(tmp_path, None)).manifest.sha256 == mine.sha256
    assert prepare(_config(tmp_path, mine.uri)).manifest.sha256 == mine.sha256
    other = _vectors(tmp_path)
    Manifest.open(other).copy_to(str(tmp_path / "coded" / "run" / "manifest.parquet"))
    (tmp_path / "coded" / "run" / "codes").mkdir()
    with pytest.raises(LineageMismatch, match="was trained on other data"):  # codes were made of it
        prepare(_config(tmp_path / "coded", manifest))


def _pictures(good: int, bad: int, max_bad_fraction: float) -> ImageSource:
    data = io.BytesIO()
    Image.new("RGB", (8, 8)).save(data, "png")
    images, n = [data.getvalue()] * good + [b"no picture"] * bad, good + bad
    table = pa.table({"row_id": np.arange(n), "uri": pa.nulls(n, pa.string()), "image": images})
    return ImageSource(table, Preprocess(resize=8, crop=8), max_bad_fraction=max_bad_fraction, train=False)


@pytest.mark.parametrize(
    ("most", "bad", "fits"),
    [(0.0, 0, True), (0.0, 1, False), (0.01, 1, True), (0.05, 2, True), (0.05, 3, False)],
)
def test_few_pictures_are_held_to_the_same_share(most, bad, fits):
    source = _pictures(40 - bad, bad, most)
    if fits:
        assert source.batch(np.arange(40), 0)[1].sum() == 40 - bad
    else:
        with pytest.raises(DataError, match=f"{bad} of the first 40 pictures"):
            source.batch(np.arange(40), 0)


def test_bad_pictures_are_a_share_of_all_that_were_seen():
    """14 bad after 1,000 good are 1.4 %, not 14 of 256."""
    source = _pictures(1000, 64, 0.05)
    source.batch(np.arange(1000), 0)
    assert not source.batch(np.arange(1000, 1014), 0)[1].any()
    with pytest.raises(DataError, match="64 of the first 1064 pictures"):
        source.batch(np.arange(1014, 1064), 0)


def test_a_bad_picture_is_said_once_however_often_it_is_read(caplog):
    for _ in range(2):  # as the source of training and that of measuring
        _pictures(77, 1, 0.5).batch(np.arange(78), 0)
    assert [record.args[0] for record in caplog.records] == [77]


def test_held_out_rows_end_a_stage(tmp_path, manifest, monkeypatch):
    monkeypatch.setattr(
        "hashnet.training.trainer.held_out_score", lambda *_: HeldOutScore(0.5, np.zeros(1))
    )  # never better
    monkeypatch.setattr("hashnet.training.loop.SCORE_STEPS", 1)  # after each epoch
    config = _config(
        tmp_path, manifest, patience=2, validation=0.2, first_epochs=30, stages=1, lr=0.02, measure_rows=10
    )
    assert train_run(prepare(config).config).epochs == 3  # the first is the best, two more are waited for
