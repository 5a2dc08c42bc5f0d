"""Manifest: written whole or not at all, read by split and range, copied, extended, verified."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet.data.columns import feature_matrix
from hashnet.data.manifest import Manifest
from hashnet.data.splits import DATABASE, QUERY, TRAIN
from hashnet.data.writer import SourceRows, append_rows, rows_of_uris, write_manifest
from hashnet.errors import ConfigError, DataError, FormatError
from hashnet.io import storage


def label_lists(n: int, n_classes: int = 4) -> pa.Array:
    return pa.array(
        [[i % n_classes] if i % 5 else [0, i % n_classes or 1] for i in range(n)], pa.list_(pa.int32())
    )


def flags_of(n: int) -> np.ndarray:
    """Every seventh row a query, the others database, every third of all of them training."""
    flags = np.full(n, DATABASE, dtype=np.uint8)
    flags[::3] |= TRAIN
    flags[::7] = QUERY
    return flags


def make(path, n: int = 100, **about) -> Manifest:
    uris = pa.array([f"/pictures/{i:05d}.jpg" for i in range(n)])
    rows = rows_of_uris(uris, labels=label_lists(n), n_classes=4, block_rows=16, **about)
    return write_manifest(str(path), rows, flags_of(n), source={"name": "test"})


def append(manifest: Manifest, payload: pa.Table, labels: pa.Array | None, flags: list[int]) -> Manifest:
    rows = SourceRows(
        n=len(payload),
        payload=lambda start, stop: payload[start:stop],
        labels=labels,
        n_classes=None if labels is None else 4,
        inline="image" in payload.column_names,
    )
    return append_rows(manifest, rows, np.array(flags, dtype=np.uint8))


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 40 rows in row groups of 8, so that small manifests have several of both."""
    monkeypatch.setattr("hashnet.data.manifest.GROUP_ROWS", 8)
    monkeypatch.setattr("hashnet.data.manifest.PART_ROWS", 40)


def test_uris_of_64_bit_offsets_are_written_as_strings(tmp_path):
    uris = pa.array([f"/pictures/{i}.jpg" for i in range(10)], pa.large_string())
    manifest = write_manifest(str(tmp_path / "m"), rows_of_uris(uris), flags_of(10))
    on_disk = pq.read_schema(tmp_path / "m" / manifest.parts[0].name)
    assert on_disk.field("uri").type == pa.string()
    more = pa.array([f"/others/{i}.jpg" for i in range(10)], pa.large_string())
    assert append(manifest, pa.table({"uri": more}), None, [4] * 10).read()["uri"].type == pa.string()


def expected(n: int, split: str) -> list[int]:
    bit = {"train": TRAIN, "query": QUERY, "database": DATABASE}[split]
    return [i for i, flag in enumerate(flags_of(n)) if flag & bit]


def test_rows_come_back_by_split_in_row_id_order(tmp_path, small_parts):
    manifest = make(tmp_path / "m")
    assert [p.rows for p in manifest.parts] == [40, 40, 20]
    assert [p.first_row_id for p in manifest.parts] == [0, 40, 80]
    assert len(manifest) == 100
    table = manifest.read()
    assert table["row_id"].to_pylist() == list(range(100))
    assert table["labels"].to_pylist() == label_lists(100).to_pylist()
    for split in ("train", "query", "database"):
        rows = expected(100, split)
        assert manifest.count(split) == len(rows)
        assert manifest.row_ids(split).tolist() == rows
        assert manifest.read(split, columns=["uri"])["uri"].to_pylist() == [
            f"/pictures/{i:05d}.jpg" for i in rows
        ]
    assert manifest.splits == {s: len(expected(100, s)) for s in ("train", "query", "database")}


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, 0), (3, 30), (39, 41), (17, 18), (50, 999), (84, 85)]
)
@pytest.mark.parametrize("split", [None, "database", "train"])
def test_a_range_counts_within_the_split(tmp_path, small_parts, split, start, stop):
    manifest = make(tmp_path / "m")
    rows = list(range(100)) if split is None else expected(100, split)
    found = manifest.read(split, columns=["row_id"], start=start, stop=stop)
    assert found["row_id"].to_pylist() == rows[start:stop]


@pytest.mark.parametrize("rows", [1, 7, 8, 33, 1000])
def test_batches_have_the_asked_size(tmp_path, small_parts, rows):
    manifest = make(tmp_path / "m")
    batches = [batch["row_id"].to_pylist() for batch in manifest.batches("database", ["row_id"], rows=rows)]
    assert all(len(batch) == rows for batch in batches[:-1])
    assert [i for batch in batches for i in batch] == expected(100, "database")


def test_batches_of_no_row_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rows must be a whole number of at least 1, got 0"):
        next(make(tmp_path / "m").batches(rows=0))


def test_labels_are_multi_hot(tmp_path, small_parts):
    manifest = make(tmp_path / "m")
    slow = np.zeros((100, 4), dtype=np.uint8)
    for i, classes in enumerate(label_lists(100).to_pylist()):
        slow[i, classes] = 1
    np.testing.assert_array_equal(manifest.labels(), slow)
    np.testing.assert_array_equal(manifest.labels("query"), slow[expected(100, "query")])


def test_a_manifest_without_labels(tmp_path):
    rows = rows_of_uris(pa.array(["a.jpg", "b.jpg"]))
    manifest = write_manifest(str(tmp_path / "m"), rows, np.full(2, DATABASE, dtype=np.uint8))
    assert manifest.n_classes is None
    assert manifest.labels() is None
    assert manifest.read()["labels"].to_pylist() == [None, None]
    assert manifest.summary().to_dict() == {"rows": 2, "splits": {"database": {"rows": 2}}}
    assert manifest.count("train") == 0
    assert len(manifest.read("train")) == 0


def test_features_stream_in_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("hashnet.data.manifest.GROUP_BYTES", 4096)
    matrix = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)

    def payload(start: int, stop: int) -> pa.Table:
        column = pa.FixedSizeListArray.from_arrays(pa.array(matrix[start:stop].ravel()), 16)
        return pa.table({"uri": pa.array([str(i) for i in range(start, stop)]), "feature": column})

    rows = SourceRows(300, payload, modality="features", n_features=16, block_rows=70)
    manifest = write_manifest(str(tmp_path / "m"), rows, flags_of(300))
    assert len(manifest.parts[0].groups) > 2
    np.testing.assert_array_equal(feature_matrix(manifest.read()), matrix)
    np.testing.assert_array_equal(feature_matrix(manifest.read("query")), matrix[expected(300, "query")])
    with pytest.raises(DataError, match="no column 'feature'"):
        feature_matrix(manifest.read(columns=["uri"]))


def test_other_readers_open_the_folder(tmp_path, small_parts):
    make(tmp_path / "m")
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(tmp_path / "m")
    assert frame["row_id"].tolist() == list(range(100))
    duckdb = pytest.importorskip("duckdb")
    files = f"read_parquet('{tmp_path}/m/*.parquet')"
    query = f"select count(*), min(uri) from {files} where list_contains(splits, 'query')"
    assert duckdb.sql(query).fetchall() == [(15, "/pictures/00000.jpg")]
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(f"{tmp_path}/m/*.parquet")["uri"][99] == "/pictures/00099.jpg"
    assert pq.read_table(tmp_path / "m").num_rows == 100


def test_a_changed_part_is_refused_and_named(tmp_path, small_parts):
    make(tmp_path / "m")
    part = tmp_path / "m" / "part-00001.parquet"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    manifest = Manifest.open(str(tmp_path / "m"))
    assert manifest.read(stop=40).num_rows == 40  # the first part is sound
    with pytest.raises(FormatError, match=r"part-00001.parquet is damaged: its sha256 is .* recorded is "):
        manifest.read(start=39, stop=41)
    with pytest.raises(FormatError, match="part-00001"):
        manifest.verify()
    part.write_bytes(data + b"more")
    with pytest.raises(FormatError, match="is damaged"):
        Manifest.open(str(tmp_path / "m")).verify()
    part.unlink()
    with pytest.raises(FormatError, match=r"part-00001.parquet is missing"):
        Manifest.open(str(tmp_path / "m")).verify()


def test_what_is_no_manifest_says_so(tmp_path):
    with pytest.raises(DataError, match=r"holds no manifest .* make one with `hashnet dataset"):
        Manifest.open(str(tmp_path / "nothing"))
    make(tmp_path / "m")
    about = json.loads((tmp_path / "m" / "_manifest.json").read_text())
    (tmp_path / "m" / "_manifest.json").write_text(json.dumps({**about, "format_version": 99}))
    with pytest.raises(FormatError, match="format version 99; this hashnet reads up to 1: upgrade"):
        Manifest.open(str(tmp_path / "m"))
    del about["parts"][0]["sha256"], about["seal"]
    (tmp_path / "m" / "_manifest.json").write_text(json.dumps(about))
    with pytest.raises(FormatError, match="damaged"):
        Manifest.open(str(tmp_path / "m"))


def test_a_list_that_names_files_elsewhere_is_refused(tmp_path):
    make(tmp_path / "m")
    about = json.loads((tmp_path / "m" / "_manifest.json").read_text())
    about["parts"][0]["name"] = "../m/part-00000.parquet"
    del about["seal"]  # as one who knows how would
    (tmp_path / "m" / "_manifest.json").write_text(json.dumps(about))
    with pytest.raises(FormatError, match="which is not one of its own"):
        Manifest.open(str(tmp_path / "m"))


def test_the_same_rows_give_the_same_bytes(tmp_path):
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    assert first.sha256 == second.sha256
    assert first.parts == second.parts


def test_nothing_is_left_when_writing_fails(tmp_path, small_parts):
    def payload(start: int, stop: int) -> pa.Table:
        if start >= 64:
            raise DataError("row 64 is wrong")
        return pa.table({"uri": [f"{i}" for i in range(start, stop)]})

    undone = []
    rows = SourceRows(100, payload, block_rows=16, undo=lambda: undone.append(True))
    with pytest.raises(DataError, match="row 64"):
        write_manifest(str(tmp_path / "m"), rows, flags_of(100))
    assert os.listdir(tmp_path) == []
    assert undone == [True]


def test_an_existing_manifest_is_kept_unless_told(tmp_path):
    old = make(tmp_path / "m", n=50)
    with pytest.raises(DataError, match="exists; choose another --out, or replace it with --overwrite"):
        make(tmp_path / "m", n=60)
    assert Manifest.open(old.uri).sha256 == old.sha256
    rows = rows_of_uris(pa.array([f"{i}" for i in range(60)]))
    assert len(write_manifest(old.uri, rows, flags_of(60), overwrite=True)) == 60
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(DataError, match="exists and is not a manifest"):
        write_manifest(str(tmp_path / "other"), rows, flags_of(60), overwrite=True)
    assert (tmp_path / "other" / "file").exists()


def test_labels_outside_the_classes_are_refused(tmp_path):
    rows = rows_of_uris(pa.array(["a", "b"]), labels=pa.array([[0], [7]], pa.list_(pa.int32())), n_classes=4)
    with pytest.raises(DataError, match=r"row 1 has class 7, but the classes are 0..3"):
        write_manifest(str(tmp_path / "m"), rows, flags_of(2))


def test_append_adds_parts_and_changes_none(tmp_path, small_parts):
    before = make(tmp_path / "m", class_names=("a", "b", "c", "d"))
    new = pa.table({"uri": ["/more/1.jpg", "/more/2.jpg"]})
    after = append(before, new, pa.array([[3], [0, 1]], pa.list_(pa.int32())), [DATABASE, QUERY])
    assert after.parts[:3] == before.parts
    (new_part,) = after.parts[3:]
    assert re.fullmatch(r"part-00003-[0-9a-f]{8}\.parquet", new_part.name)
    assert after.read(start=100).select(["row_id", "uri", "labels", "splits"]).to_pylist() == [
        {"row_id": 100, "uri": "/more/1.jpg", "labels": [3], "splits": ["database"]},
        {"row_id": 101, "uri": "/more/2.jpg", "labels": [0, 1], "splits": ["query"]},
    ]
    assert after.sha256 != before.sha256
    assert after.source["appended"] == [{}]


def test_append_refuses_what_does_not_fit(tmp_path):
    manifest = make(tmp_path / "m")
    new = pa.table({"uri": ["x"]})
    flags = [DATABASE]
    with pytest.raises(DataError, match="class 4, but the classes are"):
        append(manifest, new, pa.array([[4]], pa.list_(pa.int32())), flags)
    with pytest.raises(DataError, match="stores its pictures by reference"):
        append(manifest, new.append_column("image", pa.array([b"x"])), None, flags)
    assert sorted(os.listdir(tmp_path / "m")) == ["_manifest.json", "part-00000.parquet"]
    stale = Manifest.open(manifest.uri)
    append(manifest, new, None, flags)
    with pytest.raises(DataError, match="changed by another process"):
        append(stale, new, None, flags)
    now = Manifest.open(manifest.uri)
    now.verify()  # what the other one wrote is still there
    assert len(now) == 101
    assert len(os.listdir(tmp_path / "m")) == 3


def test_appended_labels_are_matched_by_name_and_sorted(tmp_path):
    before = make(tmp_path / "m", class_names=("a", "b", "c", "d"))
    labels = pa.array([[0, 1], None, [1]], pa.list_(pa.int32()))
    rows = rows_of_uris(pa.array(["x", "y", "z"]), labels=labels, n_classes=2, class_names=("d", "b"))
    after = append_rows(before, rows, np.full(3, DATABASE, dtype=np.uint8))
    assert after.read(start=100)["labels"].to_pylist() == [[1, 3], [], [1]]


def test_a_copy_is_the_same_and_may_be_extended(tmp_path, small_parts):
    manifest = make(tmp_path / "m")
    copy = manifest.copy_to(str(tmp_path / "run" / "manifest.parquet"))
    assert copy.sha256 == manifest.sha256
    assert manifest.copy_to(copy.uri).sha256 == manifest.sha256
    longer = append(manifest, pa.table({"uri": ["x"]}), None, [DATABASE])
    assert longer.copy_to(copy.uri).sha256 == longer.sha256
    assert copy.uri != longer.uri
    other = make(tmp_path / "other", n=20)
    with pytest.raises(DataError, match="holds another manifest"):
        other.copy_to(copy.uri)
    with pytest.raises(DataError, match="holds another manifest"):
        Manifest.open(str(tmp_path / "other")).copy_to(manifest.uri)


def test_summary_counts_match_loops(tmp_path, small_parts):
    summary = make(tmp_path / "m").summary().to_dict()
    labels = label_lists(100).to_pylist()
    train = expected(100, "train")
    similar = sum(bool(set(labels[a]) & set(labels[b])) for i, a in enumerate(train) for b in train[i + 1 :])
    pairs = len(train) * (len(train) - 1) // 2
    assert summary["train_pairs"]["similar"] == similar
    assert summary["train_pairs"]["pairs"] == pairs
    assert summary["train_pairs"]["dissimilar_per_similar"] == pytest.approx((pairs - similar) / similar)
    query = summary["splits"]["query"]
    of_query = [labels[i] for i in expected(100, "query")]
    assert query["labels_per_image"] == pytest.approx(sum(map(len, of_query)) / len(of_query))
    assert query["labelled"] == query["rows"] == len(of_query)


def test_unknown_splits_and_columns_are_named(tmp_path):
    manifest = make(tmp_path / "m")
    with pytest.raises(DataError, match="there is no split 'test'"):
        manifest.read("test")
    with pytest.raises(DataError, match="has no column 'image': row_id, uri, labels, splits"):
        manifest.read(columns=["uri", "image"])


def test_a_killed_writer_leaves_no_manifest(tmp_path, small_parts):
    """Only the staging folder is there before the rename; readers never see it under the name."""
    seen = []

    def payload(start: int, stop: int) -> pa.Table:
        seen.append(storage.exists(str(tmp_path / "m")))
        return pa.table({"uri": [f"{i}" for i in range(start, stop)]})

    write_manifest(str(tmp_path / "m"), SourceRows(100, payload, block_rows=16), flags_of(100))
    assert not any(seen)
