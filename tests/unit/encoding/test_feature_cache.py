"""Kept features: each picture passes through the backbone once, and damaged files are never used."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from hashnet.data.writer import SourceRows, append_rows, write_manifest
from hashnet.encoding import BackboneFeatures, feature_cache
from hashnet.encoding.feature_cache import FeatureCache
from hashnet.models import build_model

N = 50
PIXELS = np.random.default_rng(0).integers(0, 256, size=(N + 10, 3, 32, 32), dtype=np.uint8)


def rows(n: int, first: int = 0) -> SourceRows:
    table = pa.table({"uri": [f"{i}.jpg" for i in range(first, first + n)]})
    return SourceRows(n, lambda a, b: table[a:b])


@pytest.fixture
def manifest(tmp_path):
    return write_manifest(str(tmp_path / "manifest.parquet"), rows(N), np.full(N, 4, np.uint8))


class Reader:
    """Pictures by position in ``row_ids``; ``seen`` are the row ids that were decoded, 7 cannot be read."""

    def __init__(self, row_ids: np.ndarray) -> None:
        self.row_ids, self.seen = row_ids, []

    def __call__(self, at: np.ndarray):
        ids = self.row_ids[at]
        self.seen += ids.tolist()
        return PIXELS[ids], ids != 7


def model(seed: int = 0):
    torch.manual_seed(seed)
    return build_model("small_cnn", 16)


def features(manifest, folder, **changes) -> BackboneFeatures:
    return BackboneFeatures(**{"model": model(), "manifest": manifest, "folder": str(folder)} | changes)


def test_a_picture_is_computed_once_and_later_read_back_to_the_bit(manifest, tmp_path):
    ids = np.array([3, 40, 7, 12])
    first, usable = features(manifest, tmp_path / "cache")(ids, Reader(ids))
    assert usable.tolist() == [True, True, False, True]
    assert not first[2].any()
    wanted = BackboneFeatures(model()).engine.run(PIXELS[ids[usable]], "features")
    assert np.array_equal(first[usable], wanted)

    more, read = np.arange(N), Reader(np.arange(N))
    again = features(manifest, tmp_path / "cache")
    assert again.missing(more) == N - 3
    values, _ = again(more, read)
    assert sorted(read.seen) == [i for i in range(N) if i not in (3, 40, 12)]  # 7 is tried again
    assert np.array_equal(values[ids[usable]], wanted)
    assert np.array_equal(again.logits(values[:5]), again.engine.run(PIXELS[:5]))


@pytest.mark.parametrize("kept_rows", [8, 4096])
def test_what_was_computed_before_an_interruption_is_kept(manifest, tmp_path, monkeypatch, kept_rows):
    monkeypatch.setattr(feature_cache, "FILE_ROWS", kept_rows)
    ids = np.arange(40)  # two batches of the engine

    class Broken(Reader):
        def __call__(self, at):
            if at[0] >= 32:
                raise KeyboardInterrupt
            return super().__call__(at)

    with pytest.raises(KeyboardInterrupt):
        features(manifest, tmp_path / "cache")(ids, Broken(ids))
    assert features(manifest, tmp_path / "cache").missing(ids) == (9 if kept_rows == 8 else 40)


def flip(data: bytearray) -> bytes:
    data[len(data) // 2] ^= 1
    return bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda data: bytes(data[:-1]), lambda data: b""])
def test_a_damaged_file_is_never_used(manifest, tmp_path, caplog, damage):
    ids = np.array([1, 2])
    wanted, _ = features(manifest, tmp_path)(ids, Reader(ids))
    (file,) = tmp_path.glob("features-*/*.npz")
    file.write_bytes(damage(bytearray(file.read_bytes())))
    read = Reader(ids)
    found, _ = features(manifest, tmp_path)(ids, read)
    assert read.seen == [1, 2]
    assert np.array_equal(found, wanted)
    assert "is damaged; its features are computed again" in caplog.text


def test_another_backbone_engine_or_place_of_the_pictures_shares_nothing(manifest, tmp_path):
    ids = np.arange(3)
    features(manifest, tmp_path)(ids, Reader(ids))
    assert features(manifest, tmp_path).missing(ids) == 0
    for changes in ({"model": model(1)}, {"engine": "cpu-eager"}, {"base_uri": "/elsewhere"}):
        assert features(manifest, tmp_path, **changes).missing(ids) == 3
    other_head = model()
    torch.nn.init.ones_(other_head.head.fch.weight)
    assert features(manifest, tmp_path, model=other_head).missing(ids) == 0


def test_rows_of_another_manifest_are_not_taken_and_those_of_an_extended_one_are(manifest, tmp_path):
    ids = np.arange(N)
    features(manifest, tmp_path / "cache")(ids, Reader(ids))
    other = write_manifest(str(tmp_path / "other"), rows(N - 1), np.full(N - 1, 4, np.uint8))
    assert features(other, tmp_path / "cache").missing(ids[:-1]) == N - 1
    grown = append_rows(manifest, rows(10, first=N), np.full(10, 4, np.uint8))
    assert features(grown, tmp_path / "cache").missing(np.arange(N + 10)) == 11  # the new ones, and 7


def test_large_manifests_are_not_kept(manifest, tmp_path):
    ids = np.arange(3)
    features(manifest, tmp_path / "cache", max_bytes=100)(ids, Reader(ids))
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_reported_and_nothing_else(manifest, tmp_path, monkeypatch, caplog):
    from hashnet.errors import StorageError

    def refuse(uri, data):
        raise StorageError(f"cannot write {uri}: No space left on device")

    monkeypatch.setattr(feature_cache.storage, "write_bytes", refuse)
    cache = FeatureCache(str(tmp_path), manifest, 2, "key")
    cache.put(np.array([5, 4]), np.array([[1, 2], [3, 4]]))
    assert "features are not kept for later" in caplog.text
    assert cache.get(np.array([4]))[0].tolist() == [[0, 0]]
