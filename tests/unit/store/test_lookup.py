"""Items by id: from shards in order and mended ones, in bounded memory; pictures from the manifest alone."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet.data.manifest import Manifest
from hashnet.data.sources import make_manifest
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.errors import BadImage, FormatError
from hashnet.store import CodeStore, write_store
from hashnet.store import lookup as catalogs
from hashnet.store.lookup import ItemLookup, shrink

RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 256, (1000, 4), dtype=np.uint8)
IDS = np.sort(RNG.choice(100_000, 1000, replace=False))


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> ItemLookup:
    uri = str(tmp_path_factory.mktemp("catalog") / "codes")
    uris = [f"pictures/{id_}.jpg" for id_ in IDS]
    uris[3] = "s3://bucket/a.jpg?secret_key=abc"
    return ItemLookup(write_store(uri, CODES, ids=IDS, labels=IDS % 7, uris=uris, rows_per_shard=64))


def test_every_item_is_found_and_nothing_else(catalog: ItemLookup) -> None:
    by_id = {int(id_): code.tobytes().hex() for id_, code in zip(IDS, CODES, strict=True)}
    for id_ in [*IDS[::37].tolist(), int(IDS[0]), int(IDS[-1])]:
        item = catalog.item(id_)
        assert item is not None
        assert (item.id, item.code, item.labels) == (id_, by_id[id_], [id_ % 7])
    for id_ in range(0, 100_000, 997):
        assert (catalog.item(id_) is not None) == (id_ in by_id)
    for id_ in (-1, -(2**63), 100_001, 2**63 - 1):
        assert catalog.item(id_) is None
    assert [item and item.id for item in catalog.items([int(IDS[9]), -5, int(IDS[2])])] == [
        IDS[9],
        None,
        IDS[2],
    ]


def test_mended_shards_are_looked_through(catalog: ItemLookup) -> None:
    """A shard of retried rows holds ids out of order: as if the shards 2 and 9 were such."""
    store = CodeStore.open(catalog.store.uri)
    for i in (2, 9):
        store.shards[i] = dataclasses.replace(store.shards[i], repair=True)
    mended = ItemLookup(store)
    assert [item and item.id for item in mended.items(IDS[::7])] == IDS[::7].tolist()
    assert mended.item(-1) is None


def test_a_store_that_grows_while_it_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread opens it again between the reading of a shard and the keeping of what was read."""
    uri = str(tmp_path / "codes")
    catalog = ItemLookup(write_store(uri, CODES[:10], ids=np.arange(10)))
    read, grown = pq.ParquetFile, False

    def read_and_grow(source: Any, **options: Any) -> Any:
        nonlocal grown
        file = read(source, **options)
        if not grown:
            grown = True
            write_store(uri, CODES[:11], ids=np.arange(11), overwrite=True)
            assert catalog.refresh()
        return file

    monkeypatch.setattr(pq, "ParquetFile", read_and_grow)
    for id_ in (3, 10):
        item = catalog.item(id_)
        assert item is not None
        assert (item.id, item.code) == (id_, CODES[id_].tobytes().hex())
    assert grown


@pytest.mark.parametrize("cut_off", [True, False])
def test_a_damaged_shard_is_said_to_be(tmp_path: Path, cut_off: bool) -> None:
    """Its end holds the last id; the rows lie before it."""
    catalog = ItemLookup(write_store(str(tmp_path), CODES, ids=IDS))
    (path,) = (Path(path) for path in catalog.store.paths())
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] if cut_off else bytes(half) + data[half:])
    with pytest.raises(FormatError, match=r"codes-00000\.parquet is damaged: its sha256 is"):
        catalog.item(int(IDS[0]))


def test_options_of_a_uri_are_not_told(catalog: ItemLookup) -> None:
    item = catalog.item(int(IDS[3]))
    assert item is not None
    assert item.uri == "s3://bucket/a.jpg"


def test_memory_is_bounded(catalog: ItemLookup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "CACHE_BYTES", 10_000)
    small = ItemLookup(catalog.store)
    for id_ in IDS[::5]:
        assert small.item(int(id_)) is not None
    assert 0 < small._tables.bytes <= 10_000


def test_a_sample_is_of_indexed_ids_and_repeatable(catalog: ItemLookup) -> None:
    some = catalog.sample(24, seed=1)
    assert len(set(some)) == 24
    assert set(some) <= set(IDS.tolist())
    assert catalog.sample(24, seed=1) == some
    assert catalog.sample(24, seed=2) != some
    assert len(catalog.sample(5000)) == 4 * 64  # four shards are read, not all


def test_thumbnails_of_pictures_kept_inside(tmp_path: Path) -> None:
    manifest = make_manifest("digits", str(tmp_path / "manifest.parquet"))
    store = write_store(str(tmp_path / "codes"), CODES, ids=np.arange(1000))
    catalog = ItemLookup(store, Manifest.open(manifest.uri, verify=False))
    picture = catalog.thumbnail(5)
    assert picture is not None
    data, kind = picture
    assert (kind, data[:4]) == ("image/png", b"\x89PNG")  # 8 x 8 pixels stay as they are
    assert catalog.thumbnail(5) is picture  # kept
    assert catalog.thumbnail(10_000_000) is None
    assert ItemLookup(store).thumbnail(5) is None


def test_a_picture_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "pictures"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(20):
            Image.new("RGB", (300, 200), (i * 10, 0, 0)).save(folder / name / f"{i}.jpg")
    manifest = make_manifest(
        "imagefolder", str(tmp_path / "m.parquet"), path=str(folder), n_query=4, n_train=10
    )
    catalog = ItemLookup(write_store(str(tmp_path / "codes"), CODES[:40], ids=np.arange(40)), manifest)
    found = catalog.thumbnail(0)
    assert found is not None
    assert found[1] == "image/jpeg"
    assert Image.open(io.BytesIO(found[0])).size == (256, 171)
    for file in folder.glob("b/*.jpg"):
        file.unlink()
    with pytest.raises(BadImage):
        catalog.thumbnail(39)


def test_relative_pictures_are_found_from_base_uri(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    table = pa.table({"uri": ["a.png"]})
    rows = SourceRows(1, lambda start, stop: table[start:stop], modality="image")
    manifest = write_manifest(str(tmp_path / "m.parquet"), rows, np.array([4], dtype=np.uint8))
    store = write_store(str(tmp_path / "codes"), CODES[:1], ids=np.arange(1))
    assert ItemLookup(store, manifest, str(tmp_path)).thumbnail(0) is not None
    with pytest.raises(BadImage, match="missing"):
        ItemLookup(store, manifest).thumbnail(0)


def test_shrinking_is_bounded() -> None:
    from PIL import Image

    sink = io.BytesIO()
    Image.new("L", (9000, 9000)).save(sink, "PNG")  # 81 megapixels in a few kilobytes
    with pytest.raises(BadImage, match="too_large"):
        shrink(sink.getvalue())
