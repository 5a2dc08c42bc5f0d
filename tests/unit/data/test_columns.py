"""Further columns and keys: from a Parquet file into the manifest, and from there into the code store."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet import BinaryIndex, CodeStore, Manifest
from hashnet.data import append_source, copy_without, make_manifest
from hashnet.encoding.worker import EncodeTask, RowReader, Target, commit_table, encode_features
from hashnet.errors import DataError, IndexMismatch
from hashnet.store import CodesOptions, PlannedPart, StorePlan, StoreWriter, import_codes, write_store

N = 500
DAY = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
KEPT = ["city", "year", "seen", "tags"]


def table(n: int = N) -> pa.Table:
    return pa.table(
        {
            "vector": [[float(i), 1.0] for i in range(n)],
            "label": [i % 3 for i in range(n)],
            "name": [f"item-{i}" for i in range(n)],
            "city": pa.array([("Rome", "Oslo", None)[i % 3] for i in range(n)]).dictionary_encode(),
            "year": pa.array([2000 + i % 25 for i in range(n)], pa.int16()),
            "seen": pa.array(
                [datetime.datetime(2020, 1, 1 + i % 28) for i in range(n)], pa.timestamp("us", "UTC")
            ),
            "tags": [["a", "b"][: i % 3] for i in range(n)],
        }
    )


@pytest.fixture
def file(tmp_path):
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=70)
    return str(tmp_path / "rows.parquet")


class Signs:
    """An encoder of one byte: the number of the row."""

    def logits(self, rows: np.ndarray) -> np.ndarray:
        return np.where((rows[:, :1].astype(int) >> np.arange(8)) & 1, 1.0, -1.0)


def test_columns_and_keys_go_with_the_rows(file, tmp_path):
    manifest = make_manifest(
        "parquet", str(tmp_path / "m"), path=file, feature="vector", key="name", columns=KEPT,
        n_query=20, n_train=50,
    )  # fmt: skip
    assert manifest.schema.names[-5:] == ["key", "city", "year", "seen", "tags"]
    assert Manifest.open(manifest.uri).columns == {
        "key": "string", "city": "string", "year": "int16", "seen": "timestamp[us, tz=UTC]",
        "tags": "list<element: string>",
    }  # fmt: skip
    expected = table().to_pylist()
    for row in manifest.read().to_pylist():
        source = expected[row["row_id"]]
        assert row["key"] == source["name"]
        assert [row[n] for n in ("city", "year", "seen", "tags")] == [
            source[n] for n in ("city", "year", "seen", "tags")
        ]
    kept = copy_without(manifest, str(tmp_path / "fewer"), np.array([0, 7]), {})
    assert kept.read()["key"].to_pylist() == [f"item-{i}" for i in range(N) if i not in (0, 7)]


def test_encoding_carries_them_into_the_store(file, tmp_path):
    manifest = make_manifest(
        "parquet",
        str(tmp_path / "m"),
        path=file,
        feature="vector",
        key="name",
        columns=["year"],
        all_in=["database"],
    )
    part = PlannedPart(manifest.parts[0].name, manifest.parts[0].sha256, N)
    plan = StorePlan("codes", 8, 64, (part,), n_classes=3, columns=manifest.columns)
    writer = StoreWriter(str(tmp_path / "codes"), plan).begin()
    for shard in plan.ranges():
        task = EncodeTask((shard,), shard.start, shard.stop)
        for one, encoded in encode_features(RowReader(manifest, "database"), task, Signs(), "codes"):
            commit_table([Target(writer.uri, plan)], one, encoded)
    writer.finish()
    store = CodeStore.open(writer.uri)
    assert store.columns == ("key", "year")
    assert pq.read_schema(store.paths()[0]).names == ["row_id", "uri", "labels", "code", "key", "year"]
    found = store.read(["row_id", "key", "year"])
    assert found["key"].to_pylist() == [f"item-{i}" for i in range(N)]
    assert found["year"].to_pylist() == [2000 + i % 25 for i in range(N)]
    with pytest.raises(DataError, match="has no column 'yeer'"):
        store.read(["yeer"])


def test_a_store_of_arrays_takes_them_in_the_order_of_the_ids(tmp_path):
    columns = pa.table({"key": ["c", "a", "b"], "size": [3, 1, 2]})
    store = write_store(
        str(tmp_path / "codes"), np.array([[3], [1], [2]], np.uint8), ids=np.array([30, 10, 20]),
        columns=columns, rows_per_shard=2,
    )  # fmt: skip
    assert store.read(["row_id", "key", "size"]).to_pydict() == {
        "row_id": [10, 20, 30], "key": ["a", "b", "c"], "size": [1, 2, 3],
    }  # fmt: skip
    again = write_store(
        str(tmp_path / "again"), np.array([[1], [2], [3]], np.uint8), ids=np.array([10, 20, 30]),
        columns=columns.take([1, 2, 0]), rows_per_shard=2,
    )  # fmt: skip
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in store.shards]
    for wrong, sentence in (
        (pa.table({"key": ["a", "b", "a"]}), "both have id 'a'"),
        (pa.table({"size": [1, 2]}), "3 codes came with 2 columns"),
        (pa.table({"code": [1, 2, 3]}), "the name 'code' is taken"),
        (pa.table({"id": [1, 2, 3]}), r"the name 'id' is taken .*; rename the column, .* \(id= reads ids\)"),
        (pa.table({"key": [1.5, 2, 3]}), "column 'key' is double; keys are texts or whole numbers"),
        (pa.table({"x": [{"y": 1}] * 3}), "column 'x' is struct"),
    ):
        with pytest.raises((DataError, ValueError), match=sentence):
            write_store(str(tmp_path / "wrong"), np.zeros((3, 1), np.uint8), columns=wrong)


@pytest.mark.parametrize("name", ["id", "labels", "code", "distance", "score"])
def test_what_an_index_would_refuse_is_refused_here(tmp_path, name):
    """By manifests, by stores from Parquet and by the index alike: an import is never for nothing."""
    rows = pa.table({"vector": [[1.0] * 8, [2.0] * 8], "codes": [b"a", b"b"], name: [4, 2]})
    file, where = str(tmp_path / "rows.parquet"), str(tmp_path / "out")
    pq.write_table(rows, file)
    with pytest.raises(IndexMismatch, match=f"a column cannot be called '{name}'"):
        BinaryIndex.from_arrays(np.zeros((2, 1), np.uint8), columns=rows.select([name]))
    with pytest.raises(DataError, match=f"the name '{name}' is taken"):
        make_manifest(
            "parquet", where, path=file, feature="vector", label="codes", columns=[name], all_in=["database"]
        )
    with pytest.raises(DataError, match=f"the name '{name}' is taken"):
        import_codes(CodesOptions(path=file, code="codes", columns=[name]), where)


def test_whole_numbers_as_keys_become_text(tmp_path):
    file = str(tmp_path / "rows.parquet")
    rows = pa.table({"vector": [[1.0] * 8, [2.0] * 8], "code": [b"a", b"b"], "number": [7, 2**40]})
    pq.write_table(rows, file)
    store = import_codes(CodesOptions(path=file, key="number"), str(tmp_path / "codes"))
    index = BinaryIndex.build(store)
    assert index.search(store.codes(), 1, where=f"key = '{2**40}'").ids.tolist() == [[1], [1]]
    manifest = make_manifest(
        "parquet", str(tmp_path / "m"), path=file, feature="vector", key="number", all_in=["database"]
    )
    assert manifest.read()["key"].to_pylist() == ["7", str(2**40)]


def test_stores_with_such_names_are_read_as_before(tmp_path, monkeypatch):
    """A store that an older version made of columns that no index can have."""
    from hashnet.data import columns as module

    monkeypatch.setattr(module, "RESERVED", frozenset())
    codes = np.array([[3], [1]], np.uint8)
    write_store(str(tmp_path / "codes"), codes, columns=pa.table({"id": [5, 6], "year": [1, 2]}))
    monkeypatch.undo()
    store = CodeStore.open(str(tmp_path / "codes"))
    assert store.read(["row_id", "id"]).to_pydict() == {"row_id": [0, 1], "id": [5, 6]}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"columns": ["yaer"]}, r"has no column 'yaer'; did you mean 'year'\?"),
        ({"key": "city"}, "the keys of .*: row 2 has no id"),
        ({"key": "label"}, "both have id '0'"),
        ({"columns": ["all"], "label": "label"}, None),
    ],
)
def test_what_cannot_be_kept_is_named(file, tmp_path, options, sentence):
    words = {"path": file, "feature": "vector", "all_in": ["database"]} | options
    if sentence is None:
        made = make_manifest("parquet", str(tmp_path / "m"), **words)
        assert list(made.columns) == ["name", "city", "year", "seen", "tags"]
        return
    with pytest.raises(DataError, match=sentence):
        make_manifest("parquet", str(tmp_path / "m"), **words)


def test_appended_rows_have_keys_of_their_own(file, tmp_path):
    words = {"feature": "vector", "label": "label"}
    made = make_manifest("parquet", str(tmp_path / "m"), path=file, key="name", all_in=["database"], **words)
    pq.write_table(table(30), tmp_path / "more.parquet")
    more = str(tmp_path / "more.parquet")
    with pytest.raises(DataError, match="the key 'item-0' is in the manifest already, with another uri"):
        append_source(made, "parquet", path=more, key="name", **words)
    with pytest.raises(DataError, match="have keys, the new ones have none; give them with key="):
        append_source(made, "parquet", path=more, **words)
    renamed = table(30).set_column(2, "name", [[f"new-{i}" for i in range(30)]])
    pq.write_table(renamed, tmp_path / "more.parquet")
    longer = append_source(made, "parquet", path=more, key="name", **words)
    assert longer.read(start=N)["key"].to_pylist()[:2] == ["new-0", "new-1"]
