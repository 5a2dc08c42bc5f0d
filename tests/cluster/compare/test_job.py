"""The comparison on a real local Ray: cells as tasks, resumed, extended, refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.compare.compare_config import CompareConfig
from cluster.compare.data import zero_shot_manifest
from cluster.compare.job import NOTHING_TUNED, PartOfComparison, compare
from cluster.compare.runner import CellRunner
from hashnet.data.manifest import Manifest
from hashnet.data.sources import make_manifest
from hashnet.errors import ClusterError, ConfigError, DataError, LineageMismatch
from hashnet.io import config as configs
from tests.support.source_files import clustered_vectors


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return clustered_vectors(tmp_path_factory.mktemp("data"), n_classes=5).uri


def settings(run, manifest, **more):
    values = {
        "run": str(run), "manifest": manifest, "methods": ["lsh", "itq", "hashnet", "dhn"], "bits": [16],
        "first_epochs": 2, "stage_epochs": 1, "stages": 3, "batch_size": 64, "lr": 0.02,
        "hidden": 0, "noise": 0, "zero_shot": 0.4,
    }  # fmt: skip
    return configs.from_dict(CompareConfig, {**values, **more})


def written(run):
    return {p.parent.name: p.stat().st_mtime_ns for p in Path(run).rglob("cells/main/*/cell.json")}


@pytest.fixture(scope="module")
def finished(ray_local, manifest, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    return run, compare(settings(run, manifest))


def test_every_cell_is_there_and_the_report_too(finished):
    run, result = finished
    assert set(written(run)) == {"lsh-16-0", "itq-16-0", "hashnet-16-0", "dhn-16-0"}
    assert result["cells"] == 6
    assert set(result["map"]["Table 2"]) == {"hashnet", "dhn"}
    rows = json.loads((run / "report" / "tables.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"lsh", "itq", "hashnet", "dhn"}
    differences = json.loads((run / "report" / "tables.json").read_text())["differences"]
    to_hashnet = {row["method"]: row for row in differences if row["against"] == "hashnet"}
    assert set(to_hashnet) == {"lsh", "itq", "dhn"}
    assert all(row["low"] <= row["difference"] <= row["high"] for row in differences)
    figures = {path.stem for path in (run / "report" / "figures").iterdir()}
    curves = {"precision_recall", "precision_recall_radius", "precision_top_n"}  # of one code length
    assert figures == curves | {"losses", "histogram", "tsne"}
    page = (run / "report" / "comparison.html").read_text()
    for method in ("LSH", "ITQ", "HashNet", "DHN"):  # for the same queries
        assert [page.count(f"{method}, {kind} query, row") for kind in ("best", "median", "worst")] == [1] * 3


def test_the_same_command_again_makes_no_cell_anew(finished, manifest):
    run, result = finished
    before = written(run)
    assert compare(settings(run, manifest))["map"] == result["map"]
    assert written(run) == before


def test_only_what_is_missing_or_new_is_done(finished, manifest):
    run, _ = finished
    before = written(run)
    (run / "cells" / "main" / "itq-16-0" / "cell.json").unlink()
    compare(settings(run, manifest, methods=["lsh", "itq", "hashnet", "dhn", "sh"]))
    after = written(run)
    assert set(after) - set(before) == {"sh-16-0"}
    assert [name for name in before if after[name] != before[name]] == ["itq-16-0"]


def test_cells_made_with_other_settings_are_refused_and_the_settings_not_kept(finished, manifest):
    run, _ = finished
    before = (run / "config.yaml").read_text()
    with pytest.raises(LineageMismatch, match="k was 5000, now 10"):
        compare(settings(run, manifest, k=10))
    with pytest.raises(LineageMismatch, match="first_epochs was 2, now 3"):
        compare(settings(run, manifest, first_epochs=3))
    with pytest.raises(LineageMismatch, match=r"zero_shot was 0\.4, now 0\.6"):
        compare(settings(run, manifest, zero_shot=0.6))
    assert (run / "config.yaml").read_text() == before
    compare(settings(run, manifest, seeds=[0], methods=["lsh"]))
    assert configs.load(CompareConfig, str(run / "config.yaml")).methods == ["lsh"]


def test_a_configuration_of_an_older_version_is_read(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text("run: /r\nmethods: [lsh]\nfeatures: auto\nengine: cpu-eager\ntune_bits: []\ngpu: null\n")
    config = configs.load(CompareConfig, str(saved), saved=True)
    assert (config.features, config.features_from, config.compile, config.device) == (
        None, "pixels", False, "auto",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="engine is now called compile: write compile=false"):
        configs.load(CompareConfig, None, ["run=/r", "engine=cpu-eager"])


def test_classes_split_of_other_data_are_refused(manifest, tmp_path):
    config, data = settings(tmp_path, manifest), Manifest.open(manifest)
    made = zero_shot_manifest(config, data)
    assert zero_shot_manifest(config, data).sha256 == made.sha256
    other = make_manifest("npy", str(tmp_path / "m"), path=f"{manifest}.npz", n_query=60, n_train=100)
    with pytest.raises(LineageMismatch, match=r"zero-shot.parquet was made of data with sha256"):
        zero_shot_manifest(config, other)


def test_a_length_or_seed_given_twice_is_made_once(manifest, tmp_path, monkeypatch):
    made = []

    def instead(runner, tasks, before):
        made.extend(task.cell.name for task in tasks)
        return {task.cell: {} for task in tasks}

    monkeypatch.setattr(CellRunner, "_run", instead)
    config = settings(tmp_path, manifest, bits=[16, 16], seeds=[0, 0])
    part = PartOfComparison(config, "main", Manifest.open(manifest), 100)
    assert len(part.runner.run(part.tasks(["itq"], NOTHING_TUNED))) == 1
    assert made == ["itq-16-0"]


def test_settings_are_chosen_on_training_rows_and_used(ray_local, manifest, tmp_path):
    result = compare(settings(tmp_path, manifest, methods=["itq-cca"], tune=True, zero_shot=0, seeds=[0, 1]))
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert set(tuned["settings"]["itq-cca"]) == {"16"}
    for seed in (0, 1):
        cell = json.loads((tmp_path / "cells" / "main" / f"itq-cca-16-{seed}" / "cell.json").read_text())
        assert cell["made_from"]["settings"] == tuned["settings"]["itq-cca"]["16"]
    assert len(list((tmp_path / "cells" / "tune").iterdir())) == 5
    assert result["cells"] == 2


def test_settings_chosen_before_stay_when_a_comparison_is_resumed(ray_local, manifest, tmp_path):
    """Cells were made with them, though an older version may have ranked the trials otherwise."""
    chosen = {"itq-cca": {"16": {"ridge": 123.0}}}
    tuned = {"kind": "tuned", "format_version": 1, "settings": chosen, "validation_map": {}}
    (tmp_path / "tuned.json").write_text(json.dumps(tuned))
    compare(settings(tmp_path, manifest, methods=["itq-cca"], bits=[16, 24], tune=True, zero_shot=0))
    assert {path.name[:10] for path in (tmp_path / "cells" / "tune").iterdir()} == {"itq-cca-24"}
    cell = json.loads((tmp_path / "cells" / "main" / "itq-cca-16-0" / "cell.json").read_text())
    assert cell["made_from"]["settings"] == {"ridge": 123.0}
    assert set(json.loads((tmp_path / "tuned.json").read_text())["settings"]["itq-cca"]) == {"16", "24"}


def test_a_trial_that_diverges_is_not_chosen(ray_local, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.compare.job.candidates", lambda name, lrs: [{"lr": 1e30}, {"lr": 0.01}])
    compare(settings(tmp_path, manifest, methods=["hashnet"], tune=True, zero_shot=0))
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert tuned["settings"] == {"hashnet": {"16": {"lr": 0.01}}}


def test_a_failing_cell_is_named_and_the_others_are_kept(ray_local, manifest, tmp_path):
    broken = tmp_path / "settings.json"
    wrong = {"itq": {"16": {"n_iterations": 3}}, "bre": {"16": {"kernel": "cubic"}}}
    broken.write_text(json.dumps({"kind": "tuned", "format_version": 1, "settings": wrong}))
    config = settings(tmp_path / "run", manifest, methods=["itq", "bre"], settings=str(broken), zero_shot=0)
    with pytest.raises(ClusterError, match=r"1 of 2 models failed.*bre-16-0: .*linear or rbf"):
        compare(config)
    assert set(written(tmp_path / "run")) == {"itq-16-0"}


def test_cells_that_are_done_are_shown_between_trainings_on_many(manifest, tmp_path, monkeypatch):
    at_once = SimpleNamespace(remote=lambda task, *_: task.cell.method)
    monkeypatch.setattr("cluster.runtime.capacity.task", lambda *_, **__: at_once)
    monkeypatch.setattr("ray.wait", lambda tasks, **_: (tasks[:1], tasks[1:]))
    monkeypatch.setattr("ray.get", lambda task: {})
    config = settings(tmp_path, manifest, num_workers=2)
    part = PartOfComparison(config, "main", Manifest.open(manifest), 100)
    shown, shown_before = [], {}

    def train(task):
        shown_before[task.cell.method] = list(shown)

    monkeypatch.setattr(part.runner, "_train_on_many", train)
    monkeypatch.setattr(part.runner, "_shared_features", lambda: None)
    tasks = part.tasks(["hashnet", "dhn", "itq"], NOTHING_TUNED)
    for cell, _ in part.runner._outcomes(tasks, gpu=False):
        shown.append(cell.method)
    assert shown_before == {"dhn": ["itq"], "hashnet": ["itq", "dhn"]}
    assert shown == ["itq", "dhn", "hashnet"]


def test_mistakes_are_found_before_anything_runs(manifest, tmp_path):
    with pytest.raises(ConfigError, match="did you mean hashnet"):
        settings(tmp_path, manifest, methods=["hashnett"])
    with pytest.raises(ConfigError, match="multiple of 8"):
        settings(tmp_path, manifest, bits=[20])
    with pytest.raises(ConfigError, match="bits is empty: there is nothing to compare\nseeds is empty"):
        settings(tmp_path, manifest, bits=[], seeds=[], tune=True)
    with pytest.raises(ConfigError, match="schedule=plain is another method: use methods=hashnet-sgn"):
        settings(tmp_path, manifest, schedule="plain")
    with pytest.raises(ConfigError, match=r"use methods=hashnet,hashnet-w .*\n.*=hashnet,hashnet\+c "):
        settings(tmp_path, manifest, class_weights="batch", continuous=False)
    np.save(tmp_path / "f.npy", np.ones((10, 3), dtype=np.float32))
    unlabelled = make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npy"))
    with pytest.raises(DataError, match="no train"):
        compare(settings(tmp_path, unlabelled.uri))


@pytest.fixture
def partly_labelled(tmp_path):
    """Builds a manifest in one split of which the first half of the rows has no label."""

    def build(split):
        rng, arrays = np.random.default_rng(0), {}
        for name, n_rows in (("train", 40), ("query", 10), ("database", 20)):
            labels = np.eye(2, dtype=np.uint8)[np.arange(n_rows) % 2]
            arrays[f"{name}_features"] = rng.normal(size=(n_rows, 4)).astype(np.float32)
            labels[: n_rows // 2] *= name != split
            arrays[f"{name}_labels"] = labels
        np.savez(tmp_path / "part.npz", **arrays)
        return make_manifest("npy", str(tmp_path / f"no-{split}"), path=str(tmp_path / "part.npz")).uri

    return build


def test_rows_that_ask_without_a_label_are_found_before_anything_runs(
    partly_labelled, manifest, tmp_path, monkeypatch
):
    def too_late(*_):
        raise AssertionError("work has begun")

    monkeypatch.setattr(CellRunner, "_run", too_late)
    run, no_query, no_train = tmp_path / "run", partly_labelled("query"), partly_labelled("train")
    with pytest.raises(DataError, match="5 of 10 query rows have no label"):
        compare(settings(run, no_query))
    with pytest.raises(DataError, match=r"\d of 8 held-out training rows .* or leave tune out"):
        compare(settings(run, no_train, tune=True))
    assert not (run / "config.yaml").exists()
    with pytest.raises(AssertionError, match="work has begun"):  # shallow trials leave such rows out
        compare(settings(run, no_train, tune=True, methods=["itq"]))
    with pytest.raises(DataError, match="5 of 10 zero-shot query rows have no label"):
        compare(settings(tmp_path / "other", manifest, zero_shot_manifest=no_query))


@pytest.mark.slow
@pytest.mark.parametrize("features", ["pixels", "backbone"])
def test_pictures_are_compared_with_shallow_methods_on_pixels_or_features(ray_local, tmp_path, features):
    config = configs.from_dict(
        CompareConfig,
        {
            "run": str(tmp_path), "dataset": "digits", "backbone": "small_cnn", "resize": 18, "crop": 16,
            "methods": ["itq", "hashnet"], "bits": [16], "first_epochs": 3, "stage_epochs": 1, "stages": 3,
            "features": features, "zero_shot": 0,
        },
    )  # fmt: skip
    result = compare(config)
    assert min(row["16"] for row in result["map"]["Table 1"].values()) > 0.2  # chance is 0.1
    assert (tmp_path / "backbone-main" / "features").exists() == (features == "backbone")


@pytest.mark.slow
def test_deep_cells_train_on_several_workers(ray_local, manifest, tmp_path):
    result = compare(
        settings(tmp_path, manifest, methods=["cnnh", "dnnh"], num_workers=2, cpus_per_worker=1, zero_shot=0)
    )
    assert set(result["map"]["Table 1"]) == {"cnnh", "dnnh"}
    cell = json.loads((tmp_path / "cells" / "main" / "dnnh-16-0" / "cell.json").read_text())
    about = json.loads((tmp_path / "cells" / "main" / "dnnh-16-0" / "model" / "model.json").read_text())
    assert about["summary"]["n_workers"] == 2
    assert cell["report"]["map"] > cell["report"]["chance"]
