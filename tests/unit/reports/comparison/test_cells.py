import dataclasses

import numpy as np
import pytest

from hashnet.data.sources import make_manifest
from hashnet.errors import LineageMismatch
from hashnet.metrics.evaluation import evaluate
from hashnet.reports.comparison.cells import (
    Cell,
    Features,
    Task,
    deep_config,
    finished,
    only_class,
    report_of,
    run_cell,
)
from hashnet.reports.comparison.methods import DEEP
from hashnet.training.config import TrainConfig
from hashnet.training.data import held_out


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A manifest of clustered features with four classes, and the same as arrays."""
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.default_rng(0)
    y = np.arange(400) % 4
    X = (rng.normal(size=(4, 12))[y] * 2 + rng.normal(size=(400, 12))).astype(np.float32)
    np.savez(folder / "toy.npz", features=X, labels=y)
    manifest = make_manifest(
        "npy", str(folder / "toy"), path=str(folder / "toy.npz"), n_query=60, n_train=200
    )

    def arrays(split):
        table = manifest.read(split)
        return np.array(table["feature"].to_pylist(), dtype=np.float32), manifest.labels(split)

    return manifest, Features(arrays("train"), arrays("query"), arrays("database"))


def make_task(toy, run, method, validation=0.0, **settings):
    manifest, _ = toy
    part = "tune" if validation else "main"
    config = TrainConfig(run=str(run), first_epochs=2, stage_epochs=1, stages=3, batch_size=64)
    return Task(
        Cell(part, method, 16, 1, settings), str(run), manifest.uri, manifest.sha256, 100, config, validation
    )


@pytest.mark.parametrize("method", ["itq", "hashnet", "cnnh", "dnnh"])
def test_a_cell_is_what_evaluating_its_codes_gives(toy, tmp_path, method):
    task = make_task(toy, tmp_path, method)
    record = run_cell(task, toy[1])
    with np.load(f"{record['folder']}/codes.npz") as arrays:
        again = evaluate(arrays["query"], toy[1].query[1], arrays["database"], toy[1].database[1], k=100)
    assert report_of(record).map == pytest.approx(again.map)
    assert record["report"]["map"] > record["report"]["chance"] + 0.1
    assert finished(task) == record


def test_deep_cells_keep_model_and_history_and_drop_checkpoints(toy, tmp_path):
    record = run_cell(make_task(toy, tmp_path, "hashnet"))
    names = {path.name for path in (tmp_path / "cells" / "main" / "hashnet-16-1").iterdir()}
    assert names == {"cell.json", "codes.npz", "config.yaml", "model"}
    assert (tmp_path / "cells" / "main" / "hashnet-16-1" / "model" / "history.json").exists()
    assert len(record["training"]["measured"]["histogram"]) == 100


def test_trials_never_look_at_queries_and_are_told_apart_by_settings(toy, tmp_path):
    features = toy[1]
    blind = dataclasses.replace(features, query=(features.query[0] * np.nan, features.query[1]))
    names = set()
    for ridge in (0.01, 1.0):
        task = make_task(toy, tmp_path, "itq-cca", validation=0.25, ridge=ridge)
        record = run_cell(task, blind)
        assert report_of(record).n_queries == 25  # 50 of 200 are held out: 25 ask the other 25, and back
        assert report_of(record).n_database == 25
        assert 0 < record["validation_map"] < 1
        names.add(task.cell.name)
    assert len(names) == 2


def test_a_cell_made_otherwise_is_refused_with_what_differs(toy, tmp_path):
    run_cell(make_task(toy, tmp_path, "lsh"), toy[1])
    other = dataclasses.replace(make_task(toy, tmp_path, "lsh"), k=50)
    with pytest.raises(LineageMismatch, match="k was 100, now 50"):
        finished(other)


def test_a_trained_but_unmeasured_cell_is_not_trained_again(toy, tmp_path):
    task = make_task(toy, tmp_path, "dhn")
    record = run_cell(task)
    folder = tmp_path / "cells" / "main" / "dhn-16-1"
    (folder / "cell.json").unlink()
    written = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert run_cell(task)["report"] == record["report"]
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == written


def test_a_half_trained_cell_with_other_settings_is_refused(toy, tmp_path):
    run_cell(make_task(toy, tmp_path, "dhn"))
    (tmp_path / "cells" / "main" / "dhn-16-1" / "cell.json").unlink()
    with pytest.raises(LineageMismatch, match=r"lr was None, now 0\.5"):
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
        patch.setattr("hashnet.training.worker.fit", killed)
        with pytest.raises(KeyboardInterrupt):
            run_cell(task)
    with pytest.raises(LineageMismatch, match="was begun on data"):
        run_cell(make_task((other, None), tmp_path, "dhn"))
    run_cell(task)


def test_a_trained_but_unmeasured_cell_is_measured_on_its_own_data_alone(toy, other, tmp_path):
    run_cell(make_task(toy, tmp_path, "dhn"))
    (tmp_path / "cells" / "main" / "dhn-16-1" / "cell.json").unlink()
    with pytest.raises(LineageMismatch, match="was trained on data"):
        run_cell(make_task((other, None), tmp_path, "dhn"))


def test_warnings_are_kept_not_shown(toy, tmp_path, recwarn):
    record = run_cell(make_task(toy, tmp_path, "sdh"), toy[1])
    assert record["warnings"] == ["sdh anchors: 1000 wanted but only 200 rows to draw from; all are used"]
    assert not recwarn.list


def test_only_class():
    assert only_class(np.array([[0, 1, 0], [1, 1, 0], [0, 0, 0]])).tolist() == [1, -1, -1]


def test_a_setting_of_alpha_carries_over_to_other_lengths(toy):
    def alpha(n_bits, settings):
        task = Task(Cell("main", "hashnet", n_bits, 0, settings), "/r", "m", "0", 10, TrainConfig(run="/r"))
        return deep_config(task, toy[0]).alpha

    assert (alpha(48, {"alpha_n_bits": 15}), alpha(16, {"alpha_n_bits": 15})) == (15 / 48, 15 / 16)
    assert alpha(48, {"alpha": 0.5}) == 0.5
    assert alpha(48, {}) is None


def configured(toy, method, settings=None, **given):
    task = Task(Cell("main", method, 16, 0, settings or {}), "/r", "m", "0", 10, TrainConfig("/r", **given))
    return deep_config(task, toy[0])


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
    X, y = toy[1].train
    _, held = held_out(len(X), 0.25)
    y = y.copy()
    y[held[:2]] = 0
    task = make_task(toy, tmp_path, "lsh", validation=0.25)
    record = run_cell(task, dataclasses.replace(toy[1], train=(X, y)))
    assert report_of(record).n_queries == 24  # 48 of the 50 held out have a label
