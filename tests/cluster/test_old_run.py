"""A run folder that hashnet 0.1.0 wrote: opened, extended, indexed, evaluated, served and queried.

tests/support/old_run holds 240 vectors of 12 values in four classes, of them 100 to train on, 20 queries
and 220 in the database; the artefacts have no seal yet, and config.yaml still says `gpu`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from starlette.testclient import TestClient

from cluster.build_index import IndexConfig, build_index
from cluster.encode import EncodeConfig, encode_database
from cluster.evaluate import EvaluateConfig, evaluate_run
from hashnet import Encoder, Run
from hashnet.cli.entry import main
from hashnet.cli.inspect import inspect
from hashnet.server import ServeConfig, ServedRun
from hashnet.training import prepare, read_config
from tests.support.serving_app import BASE, make_app

pytestmark = pytest.mark.usefixtures("ray_local")
MAP = 0.9993041658327846  # as the old version measured it


@pytest.fixture(scope="module")
def run(repo, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("old") / "run"
    shutil.copytree(repo / "tests" / "support" / "old_run", folder)
    return Run(folder)


def test_it_is_sound(run):
    found = inspect(run.uri)
    assert found.sound, found.to_dict()
    assert found.facts["stages"] == ["manifest.parquet", "model", "codes", "index", "report", "codes-query"]


def test_its_training_is_finished(run):
    prepared = prepare(replace(read_config(run.uri), manifest=None))  # the run has its copy
    assert prepared.config.device == "auto"
    assert prepared.finished is not None


def test_nothing_is_left_to_do(run):
    before = run.codes.header()
    assert encode_database(EncodeConfig(run=run.uri))["rows_encoded_now"] == 0
    assert build_index(IndexConfig(run=run.uri))["reused"]
    assert evaluate_run(EvaluateConfig(run=run.uri, k=100, figures=False))["map"] == pytest.approx(MAP)
    assert run.codes.header().sha256 == before.sha256


def test_it_is_evaluated_anew_to_the_same_number(run):
    shutil.rmtree(run.report.uri)
    shutil.rmtree(run.query_codes.uri)
    assert evaluate_run(EvaluateConfig(run=run.uri, k=100, figures=False))["map"] == pytest.approx(MAP)


def test_it_is_extended_and_indexed_again(run, tmp_path):
    vectors = np.random.default_rng(1).normal(size=(30, 12)).astype(np.float32)
    np.savez(tmp_path / "more.npz", features=vectors, labels=np.arange(30) % 4)
    assert main(["dataset", "append", run.manifest.uri, "npy", str(tmp_path / "more.npz")]) == 0
    done = encode_database(EncodeConfig(run=run.uri))
    assert (done["rows"], done["rows_encoded_now"]) == (250, 30)
    assert build_index(IndexConfig(run=run.uri))["rows"] == 250
    assert inspect(run.uri).sound
    expected = Encoder.load(run.model.uri).encode(vectors)
    assert np.array_equal(run.codes.open().codes()[-30:], expected)


def test_it_is_served_and_queried(run, capsys):
    with TestClient(make_app(ServedRun.open(ServeConfig(run=run.uri)), None), base_url=BASE) as http:
        hits = http.post("/v1/search", json={"ids": [3], "k": 5}).json()["results"][0]
    assert main(["query", "--id", "3", "--run", run.uri, "-k", "5"]) == 0
    local = run.index.open().search(run.index.open().codes([3]), k=5).ids[0].tolist()
    assert hits["ids"] == local
    assert str(local[0]) in capsys.readouterr().out
