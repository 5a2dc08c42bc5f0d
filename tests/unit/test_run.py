"""Run: the names inside a run's folder, and artefacts at places of their own."""

import ast
import re

import numpy as np
import pytest

from hashnet import BinaryIndex, Run
from hashnet.errors import DataError
from hashnet.io import Artefact

VERBS = ("exists", "open", "write", "describe", "verify")


def test_every_artefact_has_its_place_and_the_same_verbs(tmp_path):
    run = Run(tmp_path / "demo")
    names = {artefact.kind: artefact.uri.removeprefix(f"{run.uri}/") for artefact in run.artefacts()}
    assert names == {
        "manifest": "manifest.parquet",
        "model": "model",
        "codes": "codes",
        "index": "index",
        "evaluation": "report",
    }
    assert run.query_codes.uri == f"{run.uri}/codes-query"
    assert run.store("features", "database").uri == f"{run.uri}/features"
    assert run.store("features", "query").kind == "features"
    for artefact in run.artefacts():
        assert isinstance(artefact, Artefact)
        assert all(callable(getattr(artefact, verb)) for verb in VERBS)
        assert not artefact.exists()


def test_an_object_store_keeps_its_options():
    run = Run("s3://bucket/runs/demo?region=x")
    assert run.model.uri == "s3://bucket/runs/demo/model?region=x"
    assert run.name == "demo"


def test_a_folder_that_is_no_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    BinaryIndex.from_arrays(np.zeros((1, 8), np.uint8)).save("runs/demo/index")
    Run("runs/demo").check_folder()
    (tmp_path / "runs/demo/codes").mkdir()
    for uri, sentence in (
        ("runs/dmeo", "runs/dmeo does not exist; did you mean runs/demo?"),
        ("rusn/", "rusn/ does not exist; did you mean runs?"),
        (f"{tmp_path}/runs/demmo", f"runs/demmo does not exist; did you mean {tmp_path}/runs/demo?"),
        ("elsewhere/x", "elsewhere/x does not exist; check the path"),
        ("runs/demo/codes", "give the run, runs/demo, not its codes/"),
        ("runs/demo/index/", "give the run, runs/demo, not its index/"),
    ):
        with pytest.raises(DataError, match=re.escape(sentence)):
            Run(uri).check_folder()
    Run("runs").check_folder()  # exists, and what is missing in it is said by what reads it


def test_artefacts_may_lie_elsewhere(tmp_path):
    run = Run(tmp_path, model="s3://models/today", codes=None)
    assert run.model.uri == "s3://models/today"
    assert run.codes.uri == f"{tmp_path}/codes"
    with pytest.raises(TypeError, match="no artefact called modell"):
        Run(tmp_path, modell="x")


def test_a_manifest_alone_is_not_yet_a_run(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "manifest.parquet").mkdir()
    assert not run.begun()
    (tmp_path / "checkpoints").mkdir()
    assert run.begun()


def test_names_of_a_comparison_a_sweep_and_the_demo():
    """Those that older versions wrote: their runs resume."""
    run = Run("runs/x")
    assert run.cell("tune", "itq-48-0") == "runs/x/cells/tune/itq-48-0"
    assert run.backbone("main") == "runs/x/backbone-main"
    assert run.zero_shot.uri == "runs/x/zero-shot.parquet"
    assert run.trial("hashnet-lr0.01-seed0") == "runs/x/trials/hashnet-lr0.01-seed0"
    assert (run.best(), run.best("dhn")) == ("runs/x/best.yaml", "runs/x/best-dhn.yaml")
    assert (run.tuned, run.sweep) == ("runs/x/tuned.json", "runs/x/sweep.json")
    assert (run.pictures.uri, run.comparison.uri) == ("runs/x/pictures.parquet", "runs/x/compare")


def test_no_other_module_joins_a_runs_folder(repo):
    joins = []
    for path in [*(repo / "hashnet").rglob("*.py"), *(repo / "cluster").rglob("*.py")]:
        if path == repo / "hashnet" / "run.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("storage.join", "join")
                and node.args
            ):
                of_run = re.search(r"(^|\.)run(\.uri)?$|^Run\(.*\)\.uri$", ast.unparse(node.args[0]))
                joins += [f"{path}:{node.lineno}: {ast.unparse(node)}"] if of_run else []
    assert not joins
