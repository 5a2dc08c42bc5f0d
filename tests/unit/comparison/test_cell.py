import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hashnet.baselines import REGISTRY
from hashnet.comparison.cell import (
    Cell,
    CellResult,
    CellTask,
    Features,
    RowValues,
    deep_config,
    finished_cell,
    only_class,
    run_cell,
)
from hashnet.comparison.methods import DEEP
from hashnet.data.sources import make_manifest
from hashnet.errors import Diverged, LineageMismatch
from hashnet.metrics.evaluation import evaluate, validation_map
from hashnet.training.inputs import held_out
from hashnet.training.train_config import TrainConfig
from tests.support.source_files import clustered_vectors


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A manifest of clustered features with four classes, and the same as arrays."""
    manifest = clustered_vectors(tmp_path_factory.mktemp("toy"), n_classes=4)

    def arrays(split):
        table = manifest.read(split)
        features = np.array(table["feature"].to_pylist(), dtype=np.float32)
        return RowValues(features, manifest.labels(split), manifest.row_ids(split))

    return manifest, Features(arrays("train"), arrays("query"), arrays("database"))


def make_task(toy, run, method, validation=0.0, **settings):
    manifest, _ = toy
    part = "tune" if validation else "main"
    base = TrainConfig(
        run=str(run), first_epochs=2, stage_epochs=1, stages=3, batch_size=64, lr=0.02, hidden=0, noise=0
    )
    cell = Cell(part, method, 16, 1, settings)
    folder = cell.folder(str(run))
    train = deep_config(cell, base, manifest, folder, validation) if cell.deep else None
    return CellTask(cell, folder, manifest.uri, manifest.sha256, 100, train, validation)


@pytest.mark.parametrize("method", ["itq", "hashnet", "cnnh", "dnnh"])
def test_a_cell_is_what_evaluating_its_codes_gives(toy, tmp_path, method):
    task = make_task(toy, tmp_path, method)
    result = run_cell(task, toy[1])
    with np.load(f"{result.folder}/codes.npz") as arrays:
        ids = toy[0].row_ids("database")  # ties as in the run's own report
        assert (arrays["database_ids"] == ids).all()
        labels = toy[1].query.labels, toy[1].database.labels
        again = evaluate(arrays["query"], labels[0], arrays["database"], labels[1], k=100, database_ids=ids)
    assert result.report.map == again.map
    assert result.report.map > result.report.chance + 0.1
    assert finished_cell(task) == result


def test_deep_cells_keep_model_and_history_and_drop_checkpoints(toy, tmp_path):
    result = run_cell(make_task(toy, tmp_path, "hashnet"))
    names = {path.name for path in (tmp_path / "cells" / "main" / "hashnet-16-1").iterdir()}
    assert names == {"cell.json", "codes.npz", "config.yaml", "model"}
    assert (tmp_path / "cells" / "main" / "hashnet-16-1" / "model" / "history.json").exists()
    assert len(result.training.measured["histogram"]) == 100


def expected_validation_map(train, method, **settings):
    """A quarter of the training rows are held out: each half of them searches the other."""
    X, y, _ = train
    kept, held = held_out(len(X), 0.25)
    assert len(held) == 50
    codes = REGISTRY[method](16, seed=1, **settings).fit(X[kept], y[kept]).encode(X[held])
    return validation_map(codes, y[held])


def test_trials_never_look_at_queries_and_are_told_apart_by_settings(toy, tmp_path):
    features = toy[1]
    blind = dataclasses.replace(
        features, query=features.query._replace(values=features.query.values * np.nan)
    )
    names = set()
    for ridge in (0.01, 1.0):
        task = make_task(toy, tmp_path, "itq-cca", validation=0.25, ridge=ridge)
        result = run_cell(task, blind)
        assert result.report is None
        assert result.validation_map == expected_validation_map(features.train, "itq-cca", ridge=ridge)
        names.add(task.cell.name)
    assert len(names) == 2


def test_a_cell_made_otherwise_is_refused_with_what_differs(toy, tmp_path):
    run_cell(make_task(toy, tmp_path, "lsh"), toy[1])
    other = dataclasses.replace(make_task(toy, tmp_path, "lsh"), k=50)
    with pytest.raises(LineageMismatch, match="k was 100, now 50"):
        finished_cell(other)


def test_a_trial_measured_at_another_depth_is_measured_again(toy, tmp_path):
    """Older versions measured validation MAP at a depth in proportion to the k of the evaluation."""
    task = make_task(toy, tmp_path, "lsh", validation=0.25)
    run_cell(dataclasses.replace(task, k=7), toy[1])
    assert finished_cell(task) is None
    run_cell(task, toy[1])
    assert finished_cell(task) is not None


def test_a_trial_that_diverges_is_a_result_any_other_cell_an_error(toy, tmp_path):
    task = make_task(toy, tmp_path, "hashnet", validation=0.25, lr=1e30)
    result = run_cell(task)
    assert result.validation_map is None
    assert "learning rate" in result.error
    assert finished_cell(task) == result
    with pytest.raises(Diverged):
        run_cell(make_task(toy, tmp_path, "hashnet", lr=1e30))


def test_a_network_s_trial_has_the_validation_map_of_its_training(toy, tmp_path):
    result = run_cell(make_task(toy, tmp_path, "hashnet", validation=0.25))
    about = json.loads((Path(result.folder) / "model" / "model.json").read_text())
    assert result.validation_map == about["summary"]["validation_map"]


def test_a_cell_of_an_older_version_is_read(toy):
    """Its trials had a report beside validation_map, and its records keys that are not used any more."""
    codes, labels = np.zeros((6, 2), np.uint8), np.arange(6) % 2
    report = evaluate(codes[:4], labels[:4], codes, labels, k=5)
    old = {
        "kind": "comparison_cell", "format_version": 1, "part": "tune", "fit_s": 1.5, "fit_cpu_s": 1.0,
        "encode_s": 0.1, "encoded_rows": 10, "warnings": ["w"], "report": report.to_dict(),
        "validation_map": 0.5, "params": {}, "unknown": 1,
        "made_from": {"method": "itq", "n_bits": 16, "seed": 0, "settings": {}, "k": 10, "validation": 0.2,
                      "manifest_sha256": "0"},
        "training": {"sha256": "1", "J": 0.1, "warnings": None, "something": 2},
    }  # fmt: skip
    result = CellResult.from_dict(old, "/folder")
    assert (result.made_from.method, result.validation_map, result.report) == ("itq", 0.5, report)
    assert (result.training.J, result.training.warnings, result.warnings) == (0.1, (), ("w",))


def test_a_trained_but_unmeasured_cell_is_not_trained_again(toy, tmp_path):
    task = make_task(toy, tmp_path, "dhn")
    result = run_cell(task)
    folder = tmp_path / "cells" / "main" / "dhn-16-1"
    (folder / "cell.json").unlink()
    written = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    again = run_cell(task)
    assert again.report == result.report
    assert again.fit_s >= again.training.seconds > 0  # of the training, not of opening the model
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == written


def test_a_half_trained_cell_with_other_settings_is_refused(toy, tmp_path):
    run_cell(make_task(toy, tmp_path, "dhn"))
    (tmp_path / "cells" / "main" / "dhn-16-1" / "cell.json").unlink()
    with pytest.raises(LineageMismatch, match=r"lr was 0\.02, now 0\.5"):
        run_cell(make_task(toy, tmp_path, "dhn", lr=0.5))


@pytest.fixture
def other(toy, tmp_path):
    """Another manifest: the toy's rows, split otherwise."""
    return make_manifest("npy", str(tmp_path / "other"), path=f"{toy[0].uri}.npz", n_query=50, n_train=210)


def test_a_half_trained_cell_goes_on_with_its_own_data_alone(toy, other, tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    task = make_task(toy, tmp_path, "dhn")
    with monkeypatch.context() as patch:
        patch.setattr("hashnet.training.trainer.fit", killed)
        with pytest.raises(KeyboardInterrupt):
            run_cell(task)
    with pytest.raises(LineageMismatch, match="was started on data"):
        run_cell(make_task((other, None), tmp_path, "dhn"))
    run_cell(task)


def test_a_trained_but_unmeasured_cell_is_measured_on_its_own_data_alone(toy, other, tmp_path):
    run_cell(make_task(toy, tmp_path, "dhn"))
    (tmp_path / "cells" / "main" / "dhn-16-1" / "cell.json").unlink()
    with pytest.raises(LineageMismatch, match="was trained on data"):
        run_cell(make_task((other, None), tmp_path, "dhn"))


def test_warnings_are_kept_not_shown(toy, tmp_path, recwarn):
    result = run_cell(make_task(toy, tmp_path, "sdh"), toy[1])
    assert list(result.warnings) == ["sdh anchors: 1000 requested but there are only 200 rows; all are used"]
    assert not recwarn.list


def test_only_class():
    assert only_class(np.array([[0, 1, 0], [1, 1, 0], [0, 0, 0]])).tolist() == [1, -1, -1]


def test_a_setting_of_alpha_carries_over_to_other_lengths(toy):
    def alpha(n_bits, settings):
        cell = Cell("main", "hashnet", n_bits, 0, settings)
        return deep_config(cell, TrainConfig(run="/r"), toy[0], "/r/cell").alpha

    assert (alpha(48, {"alpha_n_bits": 15}), alpha(16, {"alpha_n_bits": 15})) == (15 / 48, 15 / 16)
    assert alpha(48, {"alpha": 0.5}) == 0.5
    assert alpha(48, {}) is None


def test_a_learning_rate_to_try_is_scaled_as_the_default_is(toy):
    """DHN's alpha is 1, at 48 bits 4.8 times 10 / n_bits: an untuned rate is 0.02 / 4.8."""

    def lr(method, n_bits, settings):
        cell = Cell("tune", method, n_bits, 0, settings)
        return deep_config(cell, TrainConfig(run="/r"), toy[0], "/r/cell", 0.2).lr

    assert lr("dhn", 48, {}) is None
    assert lr("dhn", 48, {"unscaled_lr": 0.02}) == pytest.approx(0.02 / 4.8)
    assert lr("dhn", 16, {"unscaled_lr": 0.02}) == pytest.approx(0.02 / 1.6)
    assert lr("hashnet", 48, {"unscaled_lr": 0.02}) == 0.02
    assert lr("hashnet", 48, {"unscaled_lr": 0.02, "alpha_n_bits": 20}) == pytest.approx(0.01)
    assert lr("dhn", 48, {"lr": 0.02}) == 0.02  # as a sweep found it


def configured(toy, method, settings=None, **given):
    cell = Cell("main", method, 16, 0, settings or {})
    return deep_config(cell, TrainConfig("/r", **given), toy[0], "/r/cell")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"first_epochs": 20, "stage_epochs": 2},
        {"first_epochs": 20},
        {"stage_epochs": 3},
        {"first_epochs": 20, "schedule": "smooth"},
    ],
)
def test_all_networks_of_a_comparison_are_trained_for_the_same_number_of_epochs(toy, given):
    def epochs(method):
        config = configured(toy, method, **given).resolved("features", toy[0].count("train"))
        return sum(stage.epochs for stage in config.make_stages())

    assert len({epochs(method) for method in DEEP}) == 1


def test_epochs_among_a_cell_s_own_settings_are_kept(toy):
    assert configured(toy, "dhn", {"first_epochs": 5}, first_epochs=20, stage_epochs=2).first_epochs == 5


def test_a_schedule_is_for_the_methods_whose_beta_grows(toy):
    def schedule(method, **given):
        return configured(toy, method, **given).resolved("features", 200).schedule

    for given, grows in (
        ({}, "staged"),
        ({"schedule": "smooth"}, "smooth"),
        ({"schedule": "staged"}, "staged"),
    ):
        assert {schedule(method, **given) for method in ("hashnet", "hashnet+c", "hashnet-w")} == {grows}
        assert {schedule(method, **given) for method in ("hashnet-sgn", "dhn", "dnnh", "cnnh")} == {"plain"}


def test_what_a_cell_writes_down_by_default_is_what_it_is_given(toy):
    """Cells of a comparison that was begun before are compared with it word by word."""
    for method in DEEP:
        config = configured(toy, method)
        assert (config.schedule, config.first_epochs, config.stage_epochs) == (None, None, None)


def test_held_out_rows_without_a_label_ask_nothing(toy, tmp_path):
    train = toy[1].train
    X, y = train.values, train.labels
    _, held = held_out(len(X), 0.25)
    y = y.copy()
    y[held[:2]] = 0
    task = make_task(toy, tmp_path, "lsh", validation=0.25)
    result = run_cell(task, dataclasses.replace(toy[1], train=train._replace(labels=y)))
    assert y[held].any(axis=1).sum() == 48  # of the 50 held out
    assert result.validation_map == expected_validation_map(train._replace(labels=y), "lsh")
