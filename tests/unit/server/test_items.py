"""Items, labels and thumbnails behind the routes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.server import IndexService
from hashnet.server.app import MAX_DECODING
from hashnet.server.http_server import RequestMiddleware
from hashnet.store import CodeStore, write_store
from hashnet.store.lookup import ItemLookup
from tests.support.serving_app import BASE, error_of
from tests.support.small_run import some_codes


def test_few_thumbnails_are_decoded_at_once(
    app: Callable[..., RequestMiddleware], index: BinaryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def decode(self: ItemLookup, id_: int) -> tuple[bytes, str]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return b"a picture", "image/png"

    monkeypatch.setattr(ItemLookup, "thumbnail", decode)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url=BASE) as http:
            paths = [f"/v1/items/{id_}/thumbnail" for id_ in index.ids()[:12]]
            return await asyncio.gather(*map(http.get, paths))

    assert {response.status_code for response in asyncio.run(main())} == {200}
    assert most <= MAX_DECODING


def test_labels_are_found_although_another_item_was_removed_meanwhile(
    app: Callable[..., RequestMiddleware], own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two added items are found; one of them is gone when their labels are looked up."""
    codes = some_codes(2, seed=9)
    writer = BinaryIndex.load(f"{own_run}/index")
    writer.add(codes, ids=[9000, 9001], labels=np.eye(10, dtype=np.uint8)[3:5])
    asgi_app = app(folder=own_run)
    look, calls = IndexService.lookup, 0

    async def look_after_the_removal(self: IndexService, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        writer.remove([9001])
        self.index.follow()
        return await look(self, *arguments, **options)

    monkeypatch.setattr(IndexService, "lookup", look_after_the_removal)
    body = {"codes": [code.tobytes().hex() for code in codes], "k": 1, "items": True}
    with TestClient(asgi_app, base_url=BASE) as http:
        results = http.post("/v1/search", json=body).json()["results"]
    assert [(item["id"], item["labels"]) for result in results for item in result["items"]] == [
        (9000, [3]),
        (9001, None),
    ]
    assert calls == 1  # the items of all queries are looked up together


def test_an_item_is_looked_up_once(
    app: Callable[..., RequestMiddleware], own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two lookups, the second response may come from a replica that has not seen it yet."""
    writer = BinaryIndex.load(f"{own_run}/index")
    writer.add(some_codes(1, seed=9), ids=[9000], labels=np.eye(10, dtype=np.uint8)[3:4])
    look, calls = IndexService.lookup, []

    async def counted(self: IndexService, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return await look(self, *arguments, **options)

    monkeypatch.setattr(IndexService, "lookup", counted)
    with TestClient(app(folder=own_run), base_url=BASE) as http:
        assert http.get("/v1/items/9000").json()["labels"] == [3]
    assert len(calls) == 1


def test_items_encoded_later_are_known(app: Callable[..., RequestMiddleware], own_run: str) -> None:
    """The database grows: more codes in the store, then a new index version; nothing is restarted."""

    asgi_app = app(folder=own_run)
    store = CodeStore.open(f"{own_run}/codes")
    codes, ids = store.codes(), store.ids()
    new = np.array([5000], dtype=np.int64)
    with TestClient(asgi_app, base_url=BASE) as http:
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
