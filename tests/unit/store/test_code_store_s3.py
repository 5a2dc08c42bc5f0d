"""The store on an object store: a real S3-speaking server on loopback."""

from __future__ import annotations

import numpy as np
import pytest

from hashnet import CodeStore
from hashnet.errors import FormatError, StorageError
from hashnet.io import storage
from hashnet.store import read_records, write_store


def test_a_store_on_s3_is_the_store_on_disk(bucket, tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, size=(50, 8), dtype=np.uint8)
    labels = rng.integers(0, 4, size=50)
    remote = write_store(storage.join(bucket, "demo", "codes"), codes, labels=labels, rows_per_shard=16)
    local = write_store(str(tmp_path / "codes"), codes, labels=labels, rows_per_shard=16)
    assert remote.sha256 == local.sha256
    assert np.array_equal(CodeStore.open(remote.uri).codes(), codes)
    assert np.array_equal(remote.labels(), local.labels())
    remote.verify()
    for shard in local.shards:
        data = storage.read_bytes(storage.join(remote.uri, shard.file))
        assert data == (tmp_path / "codes" / shard.file).read_bytes()


def test_each_file_is_one_put_under_its_final_name(bucket):
    uri = storage.join(bucket, "names", "codes")
    write_store(uri, np.zeros((5, 2), np.uint8), rows_per_shard=3)
    assert storage.list_names(uri) == [
        "_SUCCESS", "_plan.json", "_records", "codes-00000.parquet", "codes-00001.parquet", "manifest.json",
    ]  # fmt: skip
    assert list(read_records(uri)) == ["codes-00000", "codes-00001"]


def test_an_unfinished_store_on_s3_is_refused(bucket):
    uri = storage.join(bucket, "cut", "codes")
    write_store(uri, np.zeros((5, 2), np.uint8))
    storage.delete(storage.join(uri, "_SUCCESS"))
    with pytest.raises(FormatError, match="not complete: 1 of 1 shards"):
        CodeStore.open(uri)


def test_a_bucket_that_is_not_there_is_a_clear_error(bucket):
    uri = bucket.replace("s3://runs", "s3://nobody")
    with pytest.raises(StorageError, match="s3://nobody"):
        write_store(storage.join(uri, "codes"), np.zeros((5, 2), np.uint8))
