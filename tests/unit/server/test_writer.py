"""Changes to the index through the API."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.server import Access, AddItems, ApiError, IndexWriter, RemoveItems, Written
from hashnet.server.http_server import RequestMiddleware
from tests.support.serving_app import BASE, CODE, WRITE, error_of
from tests.support.small_run import some_codes


def test_changes_that_arrive_together_are_one_version(own_run: str) -> None:
    writer = IndexWriter(f"{own_run}/index")
    before = BinaryIndex.load(f"{own_run}/index")
    other = BinaryIndex.load(f"{own_run}/index")
    codes = some_codes(9, seed=9)

    async def main() -> None:
        first = asyncio.create_task(writer.write(AddItems(codes[:1], np.array([8000]))))
        await asyncio.sleep(0)  # the first is being written while the others arrive
        others = [writer.write(AddItems(codes[i : i + 1], np.array([8000 + i]))) for i in range(1, 8)]
        taken = writer.write(AddItems(codes[:2], np.array([8100, 8003])))
        unknown = writer.write(RemoveItems(np.array([8001, 99_999])))
        *written, id_taken, not_there = await asyncio.gather(*others, taken, unknown, return_exceptions=True)
        assert (await first).version == before.version + 1
        assert {one.version for one in written} == {before.version + 2}  # type: ignore[union-attr]
        assert {one.size for one in written} == {len(before) + 8}  # type: ignore[union-attr]
        assert isinstance(id_taken, ApiError)
        assert isinstance(not_there, ApiError)
        assert [(e.code, e.status) for e in (id_taken, not_there)] == [("id_taken", 409), ("unknown_id", 404)]

    asyncio.run(main())
    other.refresh()
    assert other.contains(np.arange(8000, 8008)).all()
    assert not other.contains([8100]).any()  # a change is applied completely or not at all


def test_a_writer_starts_from_what_another_process_wrote(own_run: str) -> None:
    writer = IndexWriter(f"{own_run}/index")
    codes, size = some_codes(2, seed=9), len(BinaryIndex.load(f"{own_run}/index"))
    assert writer.commit([AddItems(codes[:1], np.array([8000]))]) == [Written(2, size + 1)]
    BinaryIndex.load(f"{own_run}/index").add(codes[1:], ids=[9000])
    assert writer.commit([RemoveItems(np.array([8000]))]) == [Written(4, size + 1)]
    (taken,) = writer.commit([AddItems(codes[:1], np.array([9000]))])
    assert isinstance(taken, ApiError)
    assert (taken.code, taken.status) == ("id_taken", 409)


def test_an_upsert_replaces_items_and_their_labels(own_run: str) -> None:
    writer = IndexWriter(f"{own_run}/index")
    codes, ids = some_codes(2, seed=9), np.array([int(BinaryIndex.load(f"{own_run}/index").ids()[0]), 8000])
    writer.commit([AddItems(codes, ids, [[1], [2]], upsert=True)])
    writer.commit([AddItems(codes, ids, [[3], [4]], upsert=True)])
    index = BinaryIndex.load(f"{own_run}/index")
    assert (index.codes(ids) == codes).all()
    assert index.labels(ids) == [[3], [4]]


def test_a_full_disk_refuses_the_write_and_loses_nothing(
    own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = IndexWriter(f"{own_run}/index")
    codes = some_codes(2, seed=9)
    assert isinstance(writer.commit([AddItems(codes[:1], np.array([8000]))])[0], Written)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        (refused,) = writer.commit([AddItems(codes[1:], np.array([8001]))])
    assert isinstance(refused, ApiError)
    assert (refused.code, refused.status) == ("disk_full", 507)
    assert isinstance(writer.commit([AddItems(codes[1:], np.array([8002]))])[0], Written)
    index = BinaryIndex.load(f"{own_run}/index")
    assert index.contains([8000, 8001, 8002]).tolist() == [True, False, True]


def test_nothing_is_added_to_an_index_of_another_model(
    app: Callable[..., RequestMiddleware], own_run: str
) -> None:
    asgi_app = app(access=Access.of(write=WRITE), folder=own_run)
    other = BinaryIndex.from_arrays(some_codes(5), lineage={"model_sha256": "f" * 64})
    other.save(f"{own_run}/index")
    body, headers = {"item_ids": [9000], "codes": [CODE]}, {"authorization": f"Bearer {WRITE}"}
    with TestClient(asgi_app, base_url=BASE) as http:
        refused = http.post("/v1/items", json=body, headers=headers)
        assert error_of(refused) == (409, "index_changed")
        assert "f" * 64 in refused.text
        assert http.get("/v1/info").json()["size"] == 400  # the old version is still served
    assert len(BinaryIndex.load(f"{own_run}/index")) == 5


def test_a_writer_compacts_in_the_background(own_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashnet.server.writer.COMPACT_ROWS", 50)
    monkeypatch.setattr("hashnet.server.writer.COMPACT_SHARE", 0.1)
    writer = IndexWriter(f"{own_run}/index")
    codes = some_codes(130, seed=9)

    async def main() -> None:
        await writer.write(AddItems(codes[:20], np.arange(20) + 8000))  # a twentieth: not yet
        assert writer._compaction is None
        await writer.write(AddItems(codes[20:], np.arange(110) + 8020))
        assert writer._compaction is not None
        assert writer._compaction.result(60)
        assert writer.open()[0].describe()["added_rows"] == 0

    asyncio.run(main())
    index = BinaryIndex.load(f"{own_run}/index")
    assert (len(index), index.describe()["segments"]) == (530, 1)
    assert (index.codes(np.arange(130) + 8000) == codes).all()


def test_a_change_over_several_slices_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """Item i belongs to slice i % 3."""
    codes, folders = some_codes(30), [str(tmp_path / str(number)) for number in range(3)]
    for number, folder in enumerate(folders):
        BinaryIndex.from_arrays(codes[number::3], ids=np.arange(number, 30, 3)).save(folder)
    writer = IndexWriter(*folders)
    changes = [
        AddItems(codes[:4], np.array([100, 101, 102, 103])),
        AddItems(codes[:3], np.array([200, 201, 29])),  # 29 is taken
        RemoveItems(np.array([0, 1, 100])),
        RemoveItems(np.array([2, 999])),  # 999 is unknown
        AddItems(codes[5:7], np.array([3, 300]), upsert=True),
    ]
    added, taken, removed, unknown, replaced = writer.commit(changes)
    assert added == removed == replaced == Written(2 * 3, 30 + 4 - 3 + 1)
    assert [(e.code, e.status) for e in (taken, unknown)] == [("id_taken", 409), ("unknown_id", 404)]  # type: ignore[union-attr]
    slices = [BinaryIndex.load(folder, engine="faiss") for folder in folders]
    held = np.sort(np.concatenate([part.ids() for part in slices])).tolist()
    assert held == [*range(2, 30), 101, 102, 103, 300]
    assert (slices[0].codes([3, 300]) == codes[5:7]).all()
    for number, part in enumerate(slices):
        assert (part.ids() % 3 == number).all()
