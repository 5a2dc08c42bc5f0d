"""Evaluation on a real Ray: the report of a plain local call, whatever the tasks, shards and crashes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

import hashnet
from cluster import counting, evaluation
from cluster.encoding import EncodeConfig, encode_database
from cluster.evaluation import EvaluateConfig, evaluate_run
from hashnet import CodeStore, Encoder, EvalReport, Manifest
from hashnet.data.fetch import feature_matrix
from hashnet.data.rows import Rows
from hashnet.data.writer import write_manifest
from hashnet.errors import DataError, LineageMismatch
from hashnet.models import build_model
from hashnet.training.bundle import save_bundle

DATABASE, QUERY = 4, 2
N, CLASSES = 2400, 6


def feature_rows(n: int, labelled: bool = True) -> Rows:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, 12)) * 2
    classes = rng.integers(0, CLASSES, n)
    values = (centres[classes] + rng.normal(size=(n, 12))).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 12)
    table = pa.table({"feature": column})
    lists = [
        sorted({int(c), int(c + 1) % CLASSES} if i % 5 == 0 else {int(c)}) for i, c in enumerate(classes)
    ]
    labels = pa.array(lists, pa.list_(pa.int32())) if labelled else None
    return Rows(
        n,
        lambda a, b: table[a:b],
        modality="features",
        labels=labels,
        n_classes=CLASSES if labelled else None,
        n_features=12,
    )


def make_run(folder, labelled: bool = True) -> str:
    flags = np.where(np.arange(N) % 4 == 0, QUERY, DATABASE).astype(np.uint8)
    write_manifest(str(folder / "manifest.parquet"), feature_rows(N, labelled), flags)
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("features", 24, n_features=12))
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory, ray_local):
    """A run whose database is encoded in shards of 200 rows."""
    folder = make_run(tmp_path_factory.mktemp("evaluation") / "run")
    encode_database(EncodeConfig(run=folder, rows_per_shard=200, engine="cpu-eager"))
    return folder


@pytest.fixture(scope="module")
def expected(run) -> EvalReport:
    """What one process says, from the manifest and the model alone."""
    manifest, encoder = Manifest.open(run + "/manifest.parquet"), Encoder.load(run + "/model", "cpu-eager")
    codes = {name: encoder.encode(feature_matrix(manifest.read(name))) for name in ("query", "database")}
    return hashnet.evaluate(
        codes["query"],
        manifest.labels("query"),
        codes["database"],
        manifest.labels("database"),
        k=100,
        database_ids=manifest.row_ids("database"),
    )


@pytest.mark.parametrize(("rows_per_task", "range_bytes"), [(10_000, 64 << 20), (150, 64 << 20), (500, 1)])
def test_report_does_not_depend_on_tasks(run, expected, tmp_path, monkeypatch, rows_per_task, range_bytes):
    monkeypatch.setattr(counting, "RANGE_BYTES", range_bytes)
    out = str(tmp_path / "report")
    config = EvaluateConfig(run=run, k=100, out=out, rows_per_task=rows_per_task, figures=False)
    result = evaluate_run(config)
    assert EvalReport.load(out + "/report.json") == expected
    assert result["map"] == expected.map
    assert result["n_queries"] == 600
