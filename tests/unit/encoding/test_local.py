"""Encoding in one process: the codes of the workers, and no picture computed twice."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from hashnet import Encoder
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.encoding import LocalEncoder, RowReader, encode_rows, picture_rows, shard_tasks
from hashnet.models import build_model, load_bundle, save_bundle
from hashnet.store import PlannedPart, StorePlan

N, BAD = 40, 5


def png(seed: int) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, size=(34, 40, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def run(tmp_path):
    """A folder with 40 pictures, of which one is no picture, in two shards; and a model."""
    data = [b"no picture" if i == BAD else png(i) for i in range(N)]
    table = pa.table({"uri": [f"{i}.png" for i in range(N)], "image": pa.array(data, pa.binary())})
    rows = SourceRows(N, lambda a, b: table[a:b], inline=True)
    manifest = write_manifest(str(tmp_path / "manifest.parquet"), rows, np.full(N, 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(tmp_path / "model"), build_model("small_cnn", 16))
    parts = tuple(PlannedPart(part.name, part.sha256, part.rows) for part in manifest.parts)
    return tmp_path, RowReader(manifest, "database"), StorePlan("codes", 16, 30, parts)


def local(run) -> LocalEncoder:
    folder, reader, _ = run
    return LocalEncoder(reader, *load_bundle(str(folder / "model")), "cpu-fused", str(folder / "cache"))


@pytest.mark.parametrize("output", ["codes", "features"])
def test_the_rows_of_the_workers_to_the_bit(run, output):
    folder, reader, plan = run
    encoder = Encoder.load(str(folder / "model"), "cpu-fused")
    tasks = shard_tasks(list(plan.ranges()))
    found = pa.concat_tables(table for task in tasks for table in local(run).encode(task, output))
    decoded = [table for task in tasks for table in picture_rows(reader, task, encoder.preprocess, 7)]
    wanted = pa.concat_tables(encode_rows(encoder, output, table) for table in decoded)
    assert found.select(wanted.column_names).to_pylist() == wanted.to_pylist()
    assert found["reason"][BAD].as_py() == "unknown_format"


def test_kept_features_need_no_picture(run, monkeypatch):
    tasks = shard_tasks(list(run[2].ranges()))
    assert local(run).missing(tasks) == N
    first = [table.to_pylist() for task in tasks for table in local(run).encode(task, "codes")]
    assert local(run).missing(tasks) == 1  # what is no picture is tried again
    fetched = []
    monkeypatch.setattr(
        "hashnet.encoding.encoder.fetch_images",
        lambda table, base_uri: fetched.extend(table["row_id"].to_pylist()) or table["image"].to_pylist(),
    )
    again = [table.to_pylist() for task in tasks for table in local(run).encode(task, "codes")]
    assert again == first
    assert fetched == [BAD]
