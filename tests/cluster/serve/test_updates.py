"""Adding, removing, and following new versions of the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from hashnet import AsyncClient, BinaryIndex
from hashnet.errors import LineageMismatch
from hashnet.server.index_holder import IndexHolder
from hashnet.server.middleware import Guard, digest
from hashnet.server.settings import ServeConfig, Tokens
from hashnet.server.startup import look_over
from hashnet.server.writer import Writer
from tests.support.serving_app import BASE, CODE, WRITE, LocalBackend, error_of
from tests.support.small_run import make_model, some_codes


def test_add_and_remove(app: Callable[..., Guard], own_run: str) -> None:
    guard = app(tokens=Tokens(write=digest(WRITE)), folder=own_run)
    codes = some_codes(3, seed=9)
    before = BinaryIndex.load(f"{own_run}/index")

    async def main() -> None:
        transport = httpx.ASGITransport(guard)
        async with AsyncClient(BASE, transport=transport, token=WRITE) as client:
            version = await client.add(codes, ids=[9000, 9001, 9002], labels=[[1], [2, 3], []])
            assert version == before.version + 1
            hits = await client.search(codes, k=1)
            assert hits.ids[:, 0].tolist() == [9000, 9001, 9002]
            assert hits.version == version
            item = await client.item(9001)
            assert (item["labels"], item["uri"], item["thumbnail"]) == ([2, 3], None, None)
            for bad_ids, status, code in (
                ([9000, 7, 8], 409, "id_taken"),
                ([5, 5, 6], 422, "invalid_request"),
            ):
                with pytest.raises(Exception, match=r"already|different") as caught:
                    await client.add(codes, ids=bad_ids)
                assert (caught.value.status, caught.value.code) == (status, code)  # type: ignore[attr-defined]
            with pytest.raises(Exception, match="class 10"):
                await client.add(codes, ids=[1, 2, 3], labels=[[10], [], []])
            taken = int(before.ids()[0])
            gone = await client.remove([9000, taken])
            assert gone == version + 1
            assert 9000 not in (await client.search(codes, k=5)).ids
            # an id given to something else is not told as what it was
            await client.add(codes[:1], ids=[taken])
            item = await client.item(taken)
            assert (item["uri"], item["thumbnail"]) == (None, None)

    asyncio.run(main())
    after = BinaryIndex.load(f"{own_run}/index")
    assert after.version == before.version + 3
    assert after.contains([9001, 9002]).all()


def test_a_change_is_repeated_where_somebody_else_writes_too(
    own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the disk and the commit somebody adds an item, as often as ``times`` says."""
    writer = Writer(f"{own_run}/index", None)
    codes, size = some_codes(2, seed=9), len(writer.index)
    refresh, times, others = BinaryIndex.refresh, 1, iter(range(9000, 9010))

    def refresh_and_be_overtaken(self: BinaryIndex) -> bool:
        nonlocal times
        done = refresh(self)
        if times:
            BinaryIndex.load(f"{own_run}/index").add(codes[1:], ids=[next(others)])
            times -= 1
        return done

    monkeypatch.setattr(BinaryIndex, "refresh", refresh_and_be_overtaken)
    assert writer.write("add", codes[:1], np.array([8000]), None) == (3, size + 2)
    times = 1
    assert writer.write("remove", np.array([8000])) == (5, size + 2)
    times = 1  # the id that the other one takes meanwhile
    taken = writer.write("add", codes[:1], np.array([9002]), None)
    assert (taken[0], taken[-1]) == ("id_taken", 409)
    monkeypatch.setattr("hashnet.server.writer.ATTEMPTS", 2)
    times = 3
    given_up = writer.write("add", codes[:1], np.array([8001]), None)
    assert (given_up[0], given_up[-1]) == ("unavailable", 503)
    assert not BinaryIndex.load(f"{own_run}/index").contains([8001]).any()


def test_labels_are_told_although_another_item_was_removed_meanwhile(
    app: Callable[..., Guard], own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two added items are found; one of them is gone when their labels are looked up."""
    codes = some_codes(2, seed=9)
    writer = BinaryIndex.load(f"{own_run}/index")
    writer.add(codes, ids=[9000, 9001], labels=np.eye(10, dtype=np.uint8)[3:5])
    guard = app(folder=own_run)
    look, calls = LocalBackend.look, 0

    async def look_after_the_removal(self: LocalBackend, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        writer.remove([9001])
        self.index.follow()
        return await look(self, *arguments, **options)

    monkeypatch.setattr(LocalBackend, "look", look_after_the_removal)
    body = {"codes": [code.tobytes().hex() for code in codes], "k": 1, "items": True}
    with TestClient(guard, base_url=BASE) as http:
        results = http.post("/v1/search", json=body).json()["results"]
    assert [(item["id"], item["labels"]) for result in results for item in result["items"]] == [
        (9000, [3]),
        (9001, None),
    ]
    assert calls == 1  # the items of all queries are looked up together


def test_an_item_is_looked_up_once(
    app: Callable[..., Guard], own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked twice, the second answer may come from a replica that has not seen it yet."""
    writer = BinaryIndex.load(f"{own_run}/index")
    writer.add(some_codes(1, seed=9), ids=[9000], labels=np.eye(10, dtype=np.uint8)[3:4])
    look, calls = LocalBackend.look, []

    async def counted(self: LocalBackend, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return await look(self, *arguments, **options)

    monkeypatch.setattr(LocalBackend, "look", counted)
    with TestClient(app(folder=own_run), base_url=BASE) as http:
        assert http.get("/v1/items/9000").json()["labels"] == [3]
    assert len(calls) == 1


def test_a_version_of_another_model_is_not_taken_over(own_run: str) -> None:
    first = BinaryIndex.load(f"{own_run}/index")
    holder = IndexHolder(f"{own_run}/index", model_sha256=first.lineage["model_sha256"])
    BinaryIndex.from_arrays(some_codes(5), lineage={"model_sha256": "f" * 64}).save(f"{own_run}/index")
    assert not holder.follow()
    assert holder.version == first.version
    BinaryIndex.from_arrays(some_codes(5), lineage=first.lineage).save(f"{own_run}/index")
    assert holder.follow()
    assert len(holder.index) == 5


def test_nothing_is_added_to_an_index_of_another_model(app: Callable[..., Guard], own_run: str) -> None:
    guard = app(tokens=Tokens(write=digest(WRITE)), folder=own_run)
    other = BinaryIndex.from_arrays(some_codes(5), lineage={"model_sha256": "f" * 64})
    other.save(f"{own_run}/index")
    body, headers = {"item_ids": [9000], "codes": [CODE]}, {"authorization": f"Bearer {WRITE}"}
    with TestClient(guard, base_url=BASE) as http:
        refused = http.post("/v1/items", json=body, headers=headers)
        assert error_of(refused) == (409, "index_changed")
        assert "f" * 64 in refused.text
        assert http.get("/v1/info").json()["size"] == 400  # the old version goes on answering
    assert len(BinaryIndex.load(f"{own_run}/index")) == 5


def test_an_index_built_anew_is_followed(tmp_path: Path) -> None:
    import shutil

    folder = str(tmp_path / "index")
    first = BinaryIndex.from_arrays(some_codes(5))
    first.save(folder)
    first.add(some_codes(1), ids=[7])
    holder = IndexHolder(folder)
    assert holder.version == 2
    shutil.rmtree(folder)
    assert not holder.follow()  # gone: the old one goes on answering
    BinaryIndex.from_arrays(some_codes(9)).save(folder)
    assert holder.follow()
    assert (holder.version, len(holder.index)) == (1, 9)
    assert not holder.follow()
    shutil.rmtree(folder)
    BinaryIndex.from_arrays(some_codes(4)).save(folder)  # once more version 1
    assert holder.follow()
    assert (holder.version, len(holder.index)) == (1, 4)
    for n_bits, followed in ((128, False), (64, True)):  # one that does not fit, and what was meant
        shutil.rmtree(folder)
        BinaryIndex.from_arrays(some_codes(3, n_bits=n_bits)).save(folder)
        assert holder.follow() == followed
    assert len(holder.index) == 3


def test_a_version_with_labels_is_filtered_by_them(app: Callable[..., Guard], own_run: str) -> None:
    """Built without labels, asked, then built with them and followed; and the other way round."""
    from hashnet.store.code_store import CodeStore

    store = CodeStore.open(f"{own_run}/codes")
    plain, labelled = (BinaryIndex.build(store, labels=keep) for keep in (False, True))
    plain.save(f"{own_run}/index")
    ask = {"codes": [CODE], "labels": [3], "k": 5}
    with TestClient(app(folder=own_run), base_url=BASE) as http:
        assert error_of(http.post("/v1/search", json=ask)) == (422, "no_labels")
        labelled.save(f"{own_run}/index")
        found = http.post("/v1/search", json=ask | {"min_version": labelled.version}).json()
        assert len(found["results"][0]["ids"]) == 5
        assert error_of(http.post("/v1/search", json=ask | {"labels": [10]})) == (422, "unknown_label")
        BinaryIndex.build(store, labels=False).save(f"{own_run}/index")
        again = http.post("/v1/search", json=ask | {"min_version": labelled.version + 1})
        assert error_of(again) == (422, "no_labels")


def test_items_are_those_of_the_code_store_given(own_run: str) -> None:
    """Encoded anew beside RUN/codes, as an upgrade does."""
    import shutil

    from hashnet.server.startup import open_catalog

    shutil.move(f"{own_run}/codes", f"{own_run}/codes-2")
    assert look_over(ServeConfig(run=own_run)).paths["codes"] is None
    config = ServeConfig(run=own_run, codes=f"{own_run}/codes-2", base_uri="/pictures")
    catalog = open_catalog(look_over(config).paths)
    assert catalog is not None
    assert (catalog.store.uri, catalog.base_uri) == (f"{own_run}/codes-2", "/pictures")


def test_items_encoded_later_are_known(app: Callable[..., Guard], own_run: str) -> None:
    """The database grows: more codes in the store, then a new index version; nothing is restarted."""
    from hashnet.store.code_store import CodeStore, write_store

    guard = app(folder=own_run)
    store = CodeStore.open(f"{own_run}/codes")
    codes, ids = store.codes(), store.ids()
    new = np.array([5000], dtype=np.int64)
    with TestClient(guard, base_url=BASE) as http:
        assert error_of(http.get("/v1/items/5000")) == (404, "unknown_id")
        grown = write_store(
            store.uri,
            np.concatenate([codes, some_codes(1)]),
            ids=np.concatenate([ids, new]),
            labels=np.concatenate([store.labels(), np.eye(10, dtype=np.uint8)[:1]]),
            uris=[*store.uris(), "digits/new.png"],
            lineage=store.lineage,
            overwrite=True,
        )
        BinaryIndex.build(grown).save(f"{own_run}/index")
        http.post("/v1/search", json={"ids": [int(ids[0])], "min_version": 2})
        item = http.get("/v1/items/5000").json()
    assert (item["uri"], item["labels"]) == ("digits/new.png", [0])


def test_a_model_that_did_not_make_the_index_is_refused_with_both_hashes(
    own_run: str, tmp_path: Path
) -> None:
    other = make_model(str(tmp_path / "model"), seed=1)
    with pytest.raises(LineageMismatch) as caught:
        look_over(ServeConfig(run=own_run, model=str(tmp_path / "model")))
    for sha256 in (other, BinaryIndex.load(f"{own_run}/index").lineage["model_sha256"]):
        assert sha256 in str(caught.value)
    without = look_over(ServeConfig(run=own_run, model="none"))
    assert without.fixed["modality"] is None


def test_a_batch_is_answered_by_one_version_and_errors_stay_apart(run: str, index: BinaryIndex) -> None:
    from hashnet.server.calls import IndexAsk

    holder = IndexHolder(f"{run}/index")
    codes = some_codes(6)
    asks = [
        IndexAsk(codes=codes[:2], k=3),
        IndexAsk(ids=np.array([99_999]), k=3),
        IndexAsk(codes=codes[2:], k=3),
        IndexAsk(codes=codes, radius=10),
        IndexAsk(codes=codes, k=3, deadline=0.0),
    ]
    answers = holder.answer(asks)
    assert {answer.version for answer in answers} == {index.version}
    assert answers[0].hits == index.search(codes[:2], k=3)
    assert answers[1].error is not None
    assert answers[1].error[0] == "unknown_id"
    assert answers[2].hits == index.search(codes[2:], k=3)
    assert answers[3].hits == index.search_radius(codes, radius=10)
    assert answers[4].error is not None
    assert answers[4].error[0] == "timeout"


def test_each_radius_search_of_a_batch_keeps_its_own_bound(run: str, index: BinaryIndex) -> None:
    from hashnet.server.calls import IndexAsk

    holder = IndexHolder(f"{run}/index")
    codes = some_codes(40)
    asks = [  # every query has all 400 items within 64 bits
        IndexAsk(codes=codes[:1], radius=64, max_hits=399),
        IndexAsk(codes=codes, radius=64, max_hits=40 * 400),
        IndexAsk(codes=codes[:5], radius=64, max_hits=5 * 400 - 1, want_hit_codes=True),
        IndexAsk(codes=codes[:5], radius=64, max_hits=5 * 400, want_hit_codes=True),
    ]
    small, all_of_it, one_too_many, just_enough = holder.answer(asks)
    assert all_of_it.hits == index.search_radius(codes, radius=64)
    assert just_enough.hits == index.search_radius(codes[:5], radius=64)
    assert just_enough.hit_codes is not None
    assert len(just_enough.hit_codes) == 5 * 400
    for answer, bound in ((small, "399"), (one_too_many, "1,999")):
        assert answer.error is not None
        assert (answer.error[0], answer.error[2]) == ("too_many_hits", 413)
        assert f"more than {bound} items" in answer.error[1]
    ids = index.ids()[:3]
    near = [IndexAsk(ids=ids[i : i + 1], radius=64, exclude_self=True, max_hits=399 - i) for i in range(3)]
    alone = holder.answer(near)  # 399 others each
    assert alone[0].hits == index.search_radius(index.codes(ids[:1]), radius=64, exclude_self=ids[:1])
    assert [answer.error is None for answer in alone] == [True, False, False]


def test_an_emptied_index_answers_with_nothing(tmp_path: Path) -> None:
    from hashnet.server.calls import IndexAsk

    index = BinaryIndex.from_arrays(some_codes(3))
    index.save(str(tmp_path / "index"))
    index.remove([0, 1, 2])
    holder = IndexHolder(str(tmp_path / "index"))
    found, near = holder.answer([IndexAsk(codes=some_codes(2), k=4), IndexAsk(codes=some_codes(2), radius=4)])
    assert (found.hits.ids == -1).all()  # type: ignore[union-attr]
    assert [len(hit) for hit in near.hits] == [0, 0]  # type: ignore[union-attr]
