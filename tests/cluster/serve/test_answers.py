"""What the HTTP application answers, in this process, without Ray."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from fastapi.testclient import TestClient

from hashnet import AsyncClient, BinaryIndex, Encoder
from hashnet.server.backend import PICTURES_AT_ONCE
from hashnet.server.middleware import Guard, digest
from hashnet.server.settings import Tokens
from hashnet.store.lookup import ItemLookup
from tests.support.serving_app import BASE, WRITE, LocalBackend, error_of, picture
from tests.support.small_run import some_codes


def test_health_info_and_description(http: TestClient, index: BinaryIndex) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    info = http.get("/v1/info").json()
    assert (info["n_bits"], info["size"], info["kind"], info["version"]) == (64, 400, "flat", index.version)
    assert info["lineage"]["model_sha256"] == index.lineage["model_sha256"]
    assert info["accepts"] == ["codes", "ids", "images"]
    assert info["class_names"] == list("0123456789")
    assert info["writable"] is False
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths) >= {
        "/healthz",
        "/readyz",
        "/v1/info",
        "/v1/search",
        "/v1/encode",
        "/v1/items/{id}",
        "/metrics",
    }


def test_search_by_every_kind_of_query(http: TestClient, index: BinaryIndex, run: str) -> None:
    ids = index.ids()[:3]
    codes = index.codes(ids)
    expected = index.search(codes, k=5)
    by_codes = http.post(
        "/v1/search", json={"codes": [code.tobytes().hex() for code in codes], "k": 5}
    ).json()
    assert [result["ids"] for result in by_codes["results"]] == expected.ids.tolist()
    assert [result["distances"] for result in by_codes["results"]] == expected.distances.tolist()
    assert by_codes["version"] == index.version
    by_ids = http.post("/v1/search", json={"ids": ids.tolist(), "k": 5}).json()
    assert by_ids["results"] == by_codes["results"]
    pictures = [picture(http, int(id_)) for id_ in ids]
    body = {"images": [base64.b64encode(one).decode() for one in pictures], "k": 5}
    assert http.post("/v1/search", json=body).json()["results"] == by_codes["results"]
    one = http.post("/v1/search?k=5", content=pictures[0], headers={"content-type": "image/png"}).json()
    assert one["results"] == by_codes["results"][:1]
    alone = http.post("/v1/search", json={"ids": ids.tolist(), "k": 5, "exclude_self": True}).json()
    for id_, result in zip(ids.tolist(), alone["results"], strict=True):
        assert id_ not in result["ids"]


def test_radius_and_labels(http: TestClient, index: BinaryIndex) -> None:
    code = index.codes(index.ids()[:1])
    body = {"codes": [code.tobytes().hex()], "radius": 9}
    near = index.search_radius(code, radius=9)[0]
    assert http.post("/v1/search", json=body).json()["results"][0]["ids"] == near.ids.tolist()
    filtered = index.search_radius(code, radius=9, where={"labels": [1, 7]})[0]
    for labels in ([1, 7], ["1", "7"]):
        answer = http.post("/v1/search", json=body | {"labels": labels, "items": True}).json()["results"][0]
        assert answer["ids"] == filtered.ids.tolist()
        assert all(set(item["labels"]) & {1, 7} for item in answer["items"])


def test_a_class_id_is_not_taken_for_a_name(
    http: TestClient, index: BinaryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes whose names are other classes' numbers, as folders sorted as text give them."""
    about = LocalBackend.about
    names = [str(9 - i) for i in range(10)]
    monkeypatch.setattr(LocalBackend, "about", lambda self: about(self) | {"class_names": names})
    code = index.codes(index.ids()[:1])
    body = {"codes": [code.tobytes().hex()]}
    for options, class_id in (("label_ids=1", 1), ("labels=1", 8), ("labels=1&label_ids=8", 8)):
        expected = index.search(code, k=5, where={"labels": [class_id]})
        found = http.post(f"/v1/search?k=5&{options}", json=body).json()["results"][0]
        assert found["ids"] == expected.ids[0].tolist()
    both = http.post("/v1/search?k=5&labels=1&label_ids=1", json=body).json()["results"][0]
    assert both["ids"] == index.search(code, k=5, where={"labels": [1, 8]}).ids[0].tolist()
    assert error_of(http.post("/v1/search?label_ids=x", json=body)) == (422, "invalid_request")


def test_items_and_thumbnails(http: TestClient, index: BinaryIndex) -> None:
    id_ = int(index.ids()[17])
    item = http.get(f"/v1/items/{id_}").json()
    assert item["uri"] == f"digits/{id_:04d}.png"
    assert item["label_names"] == [str(item["labels"][0])]
    assert item["code"] == index.codes([id_]).tobytes().hex()
    small = http.get(item["thumbnail"])
    assert small.headers["content-type"] == "image/png"
    assert small.content.startswith(b"\x89PNG")
    again = http.get(item["thumbnail"], headers={"if-none-match": small.headers["etag"]})
    assert again.status_code == 304
    some = http.get("/v1/items?n=10&seed=3").json()["items"]
    assert len({one["id"] for one in some}) == 10
    query_row = next(i for i in range(1797) if not index.contains([i])[0])  # in the manifest, not indexed
    assert error_of(http.get(f"/v1/items/{query_row}/thumbnail")) == (404, "unknown_id")


def test_few_thumbnails_are_decoded_at_once(
    app: Callable[..., Guard], index: BinaryIndex, monkeypatch: pytest.MonkeyPatch
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

    assert {answer.status_code for answer in asyncio.run(main())} == {200}
    assert most <= PICTURES_AT_ONCE


def test_encode(http: TestClient, index: BinaryIndex, run: str) -> None:
    id_ = int(index.ids()[4])
    body = {"images": [base64.b64encode(picture(http, id_)).decode()]}
    answer = http.post("/v1/encode", json=body).json()
    assert answer == {"n_bits": 64, "codes": [index.codes([id_]).tobytes().hex()]}


@pytest.mark.parametrize("engine", ["kernel", "faiss"])
def test_the_client_gets_what_the_local_index_says(app: Callable[..., Guard], run: str, engine: str) -> None:
    local = BinaryIndex.load(f"{run}/index", engine=engine)
    codes = some_codes(700)
    guard = app(engine=engine)
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4)

    async def main() -> None:
        async with AsyncClient(BASE, transport=httpx.ASGITransport(guard), batch=100) as client:
            assert await client.search(codes, k=500) == local.search(codes, k=500)  # more than there are: -1
            assert await client.search(codes, k=7) == local.search(codes, k=7)
            assert await client.search_radius(codes, radius=16) == local.search_radius(codes, radius=16)
            where = {"labels": [3]}
            assert await client.search(codes, k=9, labels=[3]) == local.search(codes, k=9, where=where)
            ids = local.ids()[:50]
            expected = local.search(local.codes(ids), k=9, exclude_self=ids)
            assert await client.search(ids=ids, k=9, exclude_self=True) == expected
            pictures = [await client.thumbnail(int(id_)) for id_ in ids[:5]]
            assert (await client.encode(pictures) == encoder.encode(pictures)).all()

    asyncio.run(main())


@pytest.mark.slow
def test_the_description_is_true(app: Callable[..., Guard], own_run: str) -> None:
    """Many more requests than the test of the real server sends, in this process."""
    import schemathesis

    from tests.support.api_description import exercise

    guard = app(tokens=Tokens(write=digest(WRITE)), folder=own_run)
    schema = schemathesis.openapi.from_asgi("/openapi.json", guard, headers={"host": "127.0.0.1"})
    statuses = exercise(schema, {"authorization": f"Bearer {WRITE}", "host": "127.0.0.1"}, max_examples=150)
    assert statuses[200] > 200
    assert set(statuses) <= {200, 304, 400, 404, 409, 413, 415, 422, 503}
