"""Tasks over manifest rows, and the steps from rows to shards, without Ray."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from hashnet import CodeStore, Encoder, Manifest
from hashnet.data.fetch import fetch_images
from hashnet.data.sources import make_manifest
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.encoding.worker import (
    EncodeTask,
    RowReader,
    ShardCollector,
    Target,
    commit_table,
    encode_features,
    encode_rows,
    feature_tasks,
    outputs_of,
    picture_rows,
    picture_tasks,
    repair_tasks,
    with_output,
)
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
from hashnet.store import PlannedPart, StorePlan, StoreWriter

DATABASE, QUERY = 4, 2


@pytest.fixture(autouse=True)
def _one_thread():
    """Two rows at a time give two threads nothing to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def png(seed: int) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, size=(34, 40, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def plan_of(manifest: Manifest, encoder: Encoder, rows_per_shard: int) -> StorePlan:
    parts = tuple(PlannedPart(p.name, p.sha256, p.splits.get("database", 0)) for p in manifest.parts)
    return StorePlan("codes", encoder.n_bits, rows_per_shard, parts, n_classes=2, lineage=encoder.lineage)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """60 pictures, each sixth a query, row 7 empty and row 20 no picture; and an encoder."""
    folder = tmp_path_factory.mktemp("pictures")
    data = [png(i) for i in range(60)]
    data[7], data[20] = b"", b"not a picture"
    table = pa.table({"uri": [f"{i}.png" for i in range(60)], "image": pa.array(data, pa.binary())})
    labels = pa.array([[i % 2] for i in range(60)], pa.list_(pa.int32()))
    rows = SourceRows(60, lambda a, b: table[a:b], labels=labels, n_classes=2, inline=True)
    flags = np.where(np.arange(60) % 6 == 0, QUERY, DATABASE).astype(np.uint8)
    manifest = write_manifest(str(folder / "manifest.parquet"), rows, flags)
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("small_cnn", 16))
    return manifest, Encoder.load(str(folder / "model"), engine="cpu-eager", batch_rows=2), data


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """100 feature rows in the database; row 3 holds NaN, row 50 infinity, row 60 nothing."""
    folder = tmp_path_factory.mktemp("features")
    values = np.random.default_rng(0).normal(size=(100, 5)).astype(np.float32)
    values[3, 1], values[50, 0] = np.nan, np.inf
    column = pa.FixedSizeListArray.from_arrays(
        pa.array(values.ravel()), 5, mask=pa.array(np.arange(100) == 60)
    )
    table = pa.table({"uri": pa.nulls(100, pa.string()), "feature": column})
    rows = SourceRows(100, lambda a, b: table[a:b], modality="features", n_features=5)
    manifest = write_manifest(str(folder / "manifest.parquet"), rows, np.full(100, DATABASE, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("features", 16, n_features=5))
    return manifest, Encoder.load(str(folder / "model"), batch_rows=16), values


def loop_over(encoder: Encoder, data: dict[int, bytes]) -> dict[int, bytes]:
    """The oracle: one picture after the other."""
    return {row_id: encoder.encode(each)[0].tobytes() for row_id, each in data.items()}


def run_pictures(
    pictures, folder: str, rows_per_shard: int, chunk_rows: int, seed: int, twice: bool
) -> CodeStore:
    manifest, encoder, _ = pictures
    plan = StoreWriter(folder, plan_of(manifest, encoder, rows_per_shard)).begin().plan
    source = RowReader(manifest, "database")
    tables = [
        encode_rows(encoder, "codes", table)
        for task in picture_tasks(list(plan.ranges()), chunk_rows, n_cpus=2)
        for table in picture_rows(
            source, EncodeTask.from_json(task.to_json()), encoder.preprocess, chunk_rows
        )
    ]
    order = np.random.default_rng(seed).permutation(len(tables))
    collector = ShardCollector([Target(folder, plan)], list(plan.ranges()))
    new = 0
    for i in order:
        new += collector.add(tables[i])
        if twice:
            new += collector.add(tables[i])
    assert new == plan.n_rows
    assert collector.unfinished == []
    StoreWriter(folder, plan).finish()
    return CodeStore.open(folder)


@pytest.mark.parametrize(
    ("rows_per_shard", "chunk_rows", "seed", "twice"), [(8, 3, 0, False), (50, 7, 1, True), (1, 1, 2, False)]
)
def test_pictures_in_any_order_and_twice_are_the_loop(
    pictures, tmp_path, rows_per_shard, chunk_rows, seed, twice
):
    _, encoder, data = pictures
    good = {i: data[i] for i in range(60) if i % 6 and i not in (7, 20)}
    store = run_pictures(pictures, str(tmp_path / "c"), rows_per_shard, chunk_rows, seed, twice)
    found = dict(zip(store.ids().tolist(), [code.tobytes() for code in store.codes()], strict=True))
    assert found == loop_over(encoder, good)
    assert store.ids().tolist() == sorted(good)
    assert store.labels().argmax(axis=1).tolist() == [i % 2 for i in sorted(good)]
    assert [(bad["row_id"], bad["reason"]) for bad in store.quarantine().to_pylist()] == [
        (7, "empty"),
        (20, "unknown_format"),
    ]


def test_chunks_and_order_change_no_byte(pictures, tmp_path):
    first = run_pictures(pictures, str(tmp_path / "a"), 16, 3, 0, False)
    second = run_pictures(pictures, str(tmp_path / "b"), 16, 16, 5, True)
    assert [shard.sha256 for shard in first.shards] == [shard.sha256 for shard in second.shards]


def test_features_are_the_loop_and_bad_rows_are_named(features, tmp_path):
    manifest, encoder, values = features
    plan = StoreWriter(str(tmp_path), plan_of(manifest, encoder, 16)).begin().plan
    for task in feature_tasks(list(plan.ranges()), manifest):
        for shard, table in encode_features(RowReader(manifest, "database"), task, encoder, plan.output):
            commit_table([Target(str(tmp_path), plan)], shard, table)
    StoreWriter(str(tmp_path), plan).finish()
    store = CodeStore.open(str(tmp_path))
    good = [i for i in range(100) if i not in (3, 50, 60)]
    assert store.ids().tolist() == good
    assert store.codes().tolist() == [encoder.encode(values[i])[0].tolist() for i in good]
    assert [(bad["row_id"], bad["reason"]) for bad in store.quarantine().to_pylist()] == [
        (3, "not_finite"),
        (50, "not_finite"),
        (60, "missing"),
    ]


@pytest.mark.parametrize("output", ["codes", "features"])
def test_a_row_that_overflows_inside_the_model_is_bad_alone(features, tmp_path, output):
    _, _, values = features
    torch.manual_seed(0)
    model = build_model("features", 16, n_features=5)
    model.set_scaling(torch.zeros(5), torch.full((5,), 1e-3))
    save_bundle(str(tmp_path / "model"), model)
    encoder = Encoder.load(str(tmp_path / "model"), batch_rows=16)
    rows = values[4:14].copy()
    rows[3] = 3e38
    table = pa.table({"reason": pa.array([None] * 7 + ["missing"] + [None] * 2, pa.string())})
    encoded = with_output(table, outputs_of(encoder, output, rows))
    assert (
        encoded["reason"].to_pylist() == [None] * 3 + ["not_finite"] + [None] * 3 + ["missing"] + [None] * 2
    )
    if output == "codes":
        wanted = [encoder.encode(row)[0].tobytes() for row in np.delete(rows, [3, 7], axis=0)]
        wanted = [*wanted[:3], bytes(2), *wanted[3:6], bytes(2), *wanted[6:]]
        assert encoded["code"].to_pylist() == wanted


def test_feature_work_covers_each_shard_once_and_keeps_neighbours_together(features):
    manifest, encoder, _ = features
    ranges = list(plan_of(manifest, encoder, 16).ranges())
    assert [len(task.shards) for task in feature_tasks(ranges, manifest)] == [7]  # one row group: one read
    tasks = list(feature_tasks(ranges[:2] + ranges[4:], manifest))
    assert [(task.start, task.stop) for task in tasks] == [(0, 32), (64, 100)]


def test_picture_work_is_whole_chunks_and_covers_each_row_once():
    plan = StorePlan("codes", 16, 1000, (PlannedPart("a", "a", 2500), PlannedPart("b", "b", 10)))
    tasks = list(picture_tasks(list(plan.ranges()), chunk_rows=64, n_cpus=2))
    rows = [(task.shards[0].part.name, row) for task in tasks for row in range(task.start, task.stop)]
    assert rows == [("a", row) for row in range(2500)] + [("b", row) for row in range(10)]
    assert all((task.stop - task.start) % 64 == 0 or task.stop == task.shards[0].stop for task in tasks)
    assert len(tasks) >= 8


def test_mended_rows_are_read_by_their_ids(pictures):
    manifest, encoder, _ = pictures
    plan = plan_of(manifest, encoder, 4)
    tasks = repair_tasks(plan, [1, 7, 20, 33, 59], first=2, step=3)
    assert [(task.shards[0].name, task.row_ids) for task in tasks] == [
        ("codes-mended-00002", (1, 7, 20)),
        ("codes-mended-00002", (33,)),
        ("codes-mended-00003", (59,)),
    ]
    source = RowReader(manifest, "database")
    tables = [table for task in tasks for table in source.rows(task)]
    assert pa.concat_tables(tables)["row_id"].to_pylist() == [1, 7, 20, 33, 59]


def huge_png() -> bytes:
    """The first bytes of a PNG that says it has 30,000 x 30,000 pixels."""
    header = struct.pack(">II5B", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def test_every_kind_of_bad_input_is_named_and_the_rest_goes_on(pictures, tmp_path):
    """Broken, empty, truncated, non-image, gigantic (in pixels and in bytes), vanished, and a folder."""
    _, encoder, _ = pictures
    good = png(1)
    middle = len(good) // 2
    files = {
        "good": good,
        "broken": good[:60] + bytes(200) + good[260:],
        "empty": b"",
        "truncated": good[:middle],
        "text": b"<html>404 Not Found</html>",
        "many_pixels": huge_png(),
        "good_too": png(2),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with (tmp_path / "many_bytes").open("wb") as file:
        file.truncate(600 << 20)  # sparse: no such space is used
    (tmp_path / "folder").mkdir()
    names = [*files, "many_bytes", "vanished", "folder"]
    table = pa.table({"uri": names})
    rows = SourceRows(len(names), lambda a, b: table[a:b])
    manifest = write_manifest(str(tmp_path / "m"), rows, np.full(len(names), DATABASE, np.uint8))
    plan = plan_of(manifest, encoder, 100)
    (task,) = picture_tasks(list(plan.ranges()), 100, n_cpus=1)
    (out,) = picture_rows(RowReader(manifest, "database", str(tmp_path)), task, encoder.preprocess, 100)
    assert dict(zip(names, out["reason"].to_pylist(), strict=True)) == {
        "good": None, "broken": "corrupt", "empty": "empty", "truncated": "corrupt", "text": "unknown_format",
        "many_pixels": "too_large", "good_too": None, "many_bytes": "too_large", "vanished": "missing",
        "folder": "unreadable",
    }  # fmt: skip
    codes = encode_rows(encoder, "codes", out)
    assert codes["code"][0].as_py() == encoder.encode(good)[0].tobytes()
    assert codes["code"][6].as_py() == encoder.encode(png(2))[0].tobytes()


def test_few_files_are_in_memory_at_once(pictures, monkeypatch):
    """Whatever the chunk: 100 photographs of 10 MB each would be 1 GB in every worker that decodes."""
    manifest, encoder, data = pictures
    fetched = []

    def fetch(table, base_uri):
        fetched.append(len(table))
        return fetch_images(table, base_uri)

    monkeypatch.setattr("hashnet.encoding.worker.fetch_images", fetch)
    monkeypatch.setattr("hashnet.encoding.worker.FETCH_ROWS", 8)
    plan = plan_of(manifest, encoder, 100)
    (task,) = picture_tasks(list(plan.ranges()), 100, n_cpus=1)
    (out,) = picture_rows(RowReader(manifest, "database"), task, encoder.preprocess, 100)
    assert fetched == [8, 8, 8, 8, 8, 8, 2]
    found = dict(zip(out["row_id"].to_pylist(), out["reason"].to_pylist(), strict=True))
    assert {row_id: reason for row_id, reason in found.items() if reason} == {
        7: "empty",
        20: "unknown_format",
    }
    good = [i for i in found if found[i] is None]
    codes = encode_rows(encoder, "codes", out.filter(out["reason"].is_null()))["code"].to_pylist()
    assert dict(zip(good, codes, strict=True)) == loop_over(encoder, {i: data[i] for i in good})


def encode_all(manifest: Manifest, encoder: Encoder) -> dict[int, bytes]:
    plan = plan_of(manifest, encoder, 1000)
    found = {}
    for task in picture_tasks(list(plan.ranges()), 16, n_cpus=1):
        for table in picture_rows(RowReader(manifest, "database"), task, encoder.preprocess, 16):
            out = encode_rows(encoder, "codes", table)
            assert out["reason"].null_count == len(out)
            found |= dict(zip(out["row_id"].to_pylist(), out["code"].to_pylist(), strict=True))
    return found


def test_where_the_pictures_lie_does_not_matter(pictures, tmp_path):
    """Inside the manifest and in tars: the same codes."""
    _, encoder, _ = pictures
    found = []
    for store in ("inline", "tar"):
        about = {"n_images": 40, "side": 36, "n_query": 5, "n_train": 20, "store": store}
        found.append(encode_all(make_manifest("synthetic", str(tmp_path / store), **about), encoder))
    assert len(found[0]) == 35
    assert found[0] == found[1]
