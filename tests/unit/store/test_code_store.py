"""CodeStore and write_store: what goes in comes out, here and in other readers."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet import CodeStore
from hashnet.errors import CodeError, ConfigError, DataError, FormatError
from hashnet.store import FeatureStore, write_store


def random_store(folder, n=100, n_bytes=6, rows_per_shard=16, labels=True, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, size=(n, n_bytes), dtype=np.uint8)
    ids = rng.permutation(10 * n)[:n].astype(np.int64)
    multi_hot = (rng.random((n, 5)) < 0.3).astype(np.uint8) if labels else None
    uris = [f"s3://bucket/{i}.jpg" for i in ids]
    store = write_store(str(folder), codes, ids, multi_hot, uris, rows_per_shard=rows_per_shard)
    return store, codes, ids, multi_hot, uris


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 60),
    n_bytes=st.sampled_from([1, 6, 8, 16]),
    per_shard=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_what_goes_in_comes_out(tmp_path_factory, n, n_bytes, per_shard, seed):
    folder = tmp_path_factory.mktemp("codes")
    store, codes, ids, labels, uris = random_store(folder, n, n_bytes, per_shard, seed=seed)
    order = np.argsort(ids)
    assert len(store) == n
    assert store.n_bits == n_bytes * 8
    assert store.ids().tolist() == ids[order].tolist()
    assert store.codes().tolist() == codes[order].tolist()
    assert store.labels().tolist() == labels[order].tolist()
    assert store.uris() == [uris[i] for i in order]
    assert len(store.shards) == -(-n // per_shard)


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 100, 1000])
def test_blocks_have_the_asked_size_and_all_rows_in_order(tmp_path, rows):
    store, *_ = random_store(tmp_path / "c")
    blocks = list(store.blocks(rows))
    assert [len(ids) for ids, _, _ in blocks[:-1]] == [rows] * (len(blocks) - 1)
    assert np.concatenate([ids for ids, _, _ in blocks]).tolist() == store.ids().tolist()
    assert np.concatenate([codes for _, codes, _ in blocks]).tolist() == store.codes().tolist()
    assert np.concatenate([labels for _, _, labels in blocks]).tolist() == store.labels().tolist()


def test_labels_are_optional(tmp_path):
    store, *_ = random_store(tmp_path / "c", labels=False)
    assert store.labels() is None
    assert store.n_classes is None
    assert all(labels is None for _, _, labels in store.blocks())


def test_ids_default_to_positions_and_class_ids_are_labels(tmp_path):
    store = write_store(str(tmp_path / "c"), np.zeros((3, 2), np.uint8), labels=np.array([2, 0, 1]))
    assert store.ids().tolist() == [0, 1, 2]
    assert store.labels().tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert store.uris() == [None, None, None]


def test_equal_content_has_an_equal_fingerprint(tmp_path):
    first, *_ = random_store(tmp_path / "a")
    second, *_ = random_store(tmp_path / "b")
    other, *_ = random_store(tmp_path / "c", seed=1)
    assert first.sha256 == second.sha256 != other.sha256
    for shard in first.shards:
        assert (tmp_path / "a" / shard.file).read_bytes() == (tmp_path / "b" / shard.file).read_bytes()


def test_statistics(tmp_path):
    codes = np.array([[0b10000000], [0b10000001], [0b10000001]], np.uint8)
    store = write_store(str(tmp_path / "c"), codes, rows_per_shard=2)
    assert store.statistics["distinct_codes"] == 2
    assert store.statistics["bit_balance"] == [1, 0, 0, 0, 0, 0, 0, round(2 / 3, 6)]


def test_mistakes_are_named(tmp_path):
    codes = np.zeros((3, 2), np.uint8)
    with pytest.raises(CodeError, match="3 codes came with 2 ids"):
        write_store(str(tmp_path / "c"), codes, ids=np.array([1, 2]))
    with pytest.raises(CodeError, match="1 of 3 are repeated"):
        write_store(str(tmp_path / "c"), codes, ids=np.array([1, 2, 1]))
    with pytest.raises(CodeError, match=r"ids must be >= 0 .*got -5"):
        write_store(str(tmp_path / "c"), codes, ids=[-5, 1, 2])
    with pytest.raises(CodeError, match=r"ids must be whole numbers.*got float64"):
        write_store(str(tmp_path / "c"), codes, ids=[0, 1.7, 2])
    with pytest.raises(CodeError, match=f"ids must fit into int64, got {2**63}"):
        write_store(str(tmp_path / "c"), codes, ids=np.array([0, 1, 2**63], np.uint64))
    write_store(str(tmp_path / "c"), codes)
    with pytest.raises(DataError, match="holds a store already"):
        write_store(str(tmp_path / "c"), codes)
    store = write_store(str(tmp_path / "c"), codes[:1], overwrite=True)
    assert len(store) == 1
    with pytest.raises(ConfigError, match="rows must be a whole number of at least 1"):
        next(store.blocks(rows=0))


def test_only_the_list_counts_not_what_lies_about(tmp_path):
    store, *_ = random_store(tmp_path / "c")
    stray = pa.table({"row_id": pa.array([1], pa.int64())})
    pq.write_table(stray, tmp_path / "c" / "codes-99999.parquet")
    (tmp_path / "c" / "codes-00000.parquet.tmp-abc").write_bytes(b"half")
    assert CodeStore.open(store.uri).ids().tolist() == store.ids().tolist()


def test_an_unfinished_folder_is_not_a_store(tmp_path):
    random_store(tmp_path / "c")
    (tmp_path / "c" / "_SUCCESS").unlink()
    with pytest.raises(FormatError, match="not complete: 7 of 7 shards are there and no _SUCCESS"):
        CodeStore.open(str(tmp_path / "c"))
    with pytest.raises(FormatError, match="does not exist; run jobs"):
        CodeStore.open(str(tmp_path / "nowhere"))


def test_newer_and_foreign_formats_are_refused(tmp_path):
    random_store(tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"format_version": 99}))
    with pytest.raises(FormatError, match="format version 99"):
        CodeStore.open(str(tmp_path / "c"))
    path.write_text(json.dumps(about))
    with pytest.raises(FormatError, match="not a hashnet features"):
        FeatureStore.open(str(tmp_path / "c"))
    path.write_text(json.dumps({"kind": "codes", "format_version": 1}))
    with pytest.raises(FormatError, match="lacks"):
        CodeStore.open(str(tmp_path / "c"))


def test_damage_is_found(tmp_path):
    store, *_ = random_store(tmp_path / "c")
    store.verify()
    path = tmp_path / "c" / store.shards[1].file
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="sha256"):
        store.verify()
    pq.write_table(
        pq.read_table(tmp_path / "c" / store.shards[0].file).slice(1), tmp_path / "c" / store.shards[0].file
    )
    with pytest.raises(FormatError, match=r"codes-00000\.parquet is damaged: its sha256 is"):
        next(store.tables())
    store = CodeStore.open(store.uri, verify=False)
    with pytest.raises(FormatError, match="has 15 rows, its record says 16"):
        store.ids()


def test_lineage_is_in_every_shard(tmp_path):
    lineage = {"model_sha256": "abc", "engine": "cpu-eager", "dtype": "float32", "versions": {"torch": "2"}}
    store = write_store(str(tmp_path / "c"), np.zeros((3, 6), np.uint8), lineage=lineage)
    metadata = pq.read_schema(store.paths()[0]).metadata
    assert metadata[b"hashnet.model_sha256"] == b"abc"
    assert metadata[b"hashnet.n_bits"] == b"48"
    assert metadata[b"hashnet.bit_order"] == b"msb first, 1 where >= 0"
    assert metadata[b"hashnet.engine"] == b"cpu-eager"
    assert metadata[b"hashnet.dtype"] == b"float32"
    assert metadata[b"hashnet.format_version"] == b"1"
    assert json.loads(metadata[b"hashnet.versions"]) == {"torch": "2"}
    assert len(metadata[b"hashnet.manifest_part_sha256"]) == 64
    assert store.lineage["model_sha256"] == "abc"


def test_columns_are_plain_parquet_types(tmp_path):
    store, *_ = random_store(tmp_path / "c")
    columns = pq.ParquetFile(store.paths()[0]).schema
    code = next(column for column in map(columns.column, range(len(columns))) if column.name == "code")
    # Bare fixed-length bytes: the one form that Spark takes for binary; with a logical type it refuses them.
    assert (code.physical_type, code.length, code.logical_type.type) == ("FIXED_LEN_BYTE_ARRAY", 6, "NONE")
    schema = pq.read_schema(store.paths()[0])
    assert schema.field("row_id").type == pa.int64()
    assert schema.field("uri").type == pa.string()
    assert schema.field("labels").type == pa.list_(pa.int32())
    assert schema.field("code").type == pa.binary(6)


def read_with_pandas(paths):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(paths)
    return frame["row_id"].tolist(), frame["code"].tolist(), [list(labels) for labels in frame["labels"]]


def read_with_polars(paths):
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(paths)
    return frame["row_id"].to_list(), frame["code"].to_list(), frame["labels"].to_list()


def read_with_duckdb(paths):
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(f"select row_id, code, labels from read_parquet({paths!r})").fetchall()
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


@pytest.mark.parametrize("read", [read_with_pandas, read_with_polars, read_with_duckdb])
def test_other_readers_see_the_same(tmp_path, read):
    store, *_ = random_store(tmp_path / "c")
    ids, codes, labels = read(store.paths())
    assert ids == store.ids().tolist()
    assert [bytes(code) for code in codes] == [row.tobytes() for row in store.codes()]
    assert [list(map(int, row)) for row in labels] == [np.flatnonzero(row).tolist() for row in store.labels()]
