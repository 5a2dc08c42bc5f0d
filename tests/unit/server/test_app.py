"""The endpoints, over a small run in this process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from hashnet import AsyncClient, BinaryIndex, Encoder
from hashnet.client import wire
from hashnet.index.kinds import KINDS
from hashnet.server import Access, BatchEncoder, ServeConfig, ServedRun
from hashnet.server.http_server import RequestMiddleware
from tests.support.serving_app import BASE, WRITE, error_of, make_app, picture
from tests.support.small_run import some_codes


def test_health_info_and_description(http: TestClient, index: BinaryIndex) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    info = http.get("/v1/info").json()
    assert (info["n_bits"], info["size"], info["kind"], info["version"]) == (64, 400, "flat", index.version)
    assert info["lineage"]["model_sha256"] == index.lineage["model_sha256"]
    assert info["accepts"] == ["codes", "ids", "keys", "images"]
    assert info["class_names"] == list("0123456789")
    assert info["writable"] is False
    described = http.get("/openapi.json").json()
    paths = described["paths"]
    assert all(f" {column} (" in described["info"]["description"] for column in wire.COLUMNS.values())
    assert set(paths) >= {
        "/healthz",
        "/readyz",
        "/v1/info",
        "/v1/search",
        "/v1/encode",
        "/v1/items/{id}",
        "/metrics",
    }


def test_paths_and_methods_that_are_not_there(http: TestClient) -> None:
    for path in ("/v1", "/v1/items/1/x", "/v1/info/", "/static/none.js"):
        assert error_of(http.get(path)) == (404, "not_found")
    for method, path, allowed in (
        ("GET", "/v1/search", "POST"),
        ("POST", "/v1/info", "GET"),
        ("HEAD", "/healthz", "GET"),
    ):
        response = http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
    for wrong in ("x", "-1", str(2**63)):
        assert error_of(http.get(f"/v1/items/{wrong}")) == (422, "invalid_request")
    assert error_of(http.get("/v1/items?n=101")) == (422, "invalid_request")


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
        response = http.post("/v1/search", json=body | {"labels": labels, "items": True}).json()["results"][0]
        assert response["ids"] == filtered.ids.tolist()
        assert all(set(item["labels"]) & {1, 7} for item in response["items"])


def test_a_class_id_is_not_taken_for_a_name(run: str, encoder: BatchEncoder, index: BinaryIndex) -> None:
    """Classes whose names are other classes' numbers, as folders sorted as text give them."""
    served = replace(ServedRun.open(ServeConfig(run=run)), class_names=[str(9 - i) for i in range(10)])
    http = TestClient(make_app(served, encoder), base_url=BASE)
    code = index.codes(index.ids()[:1])
    body = {"codes": [code.tobytes().hex()]}
    for options, class_id in (("label_ids=1", 1), ("labels=1", 8), ("labels=1&label_ids=8", 8)):
        expected = index.search(code, k=5, where={"labels": [class_id]})
        found = http.post(f"/v1/search?k=5&{options}", json=body).json()["results"][0]
        assert found["ids"] == expected.ids[0].tolist()
    both = http.post("/v1/search?k=5&labels=1&label_ids=1", json=body).json()["results"][0]
    assert both["ids"] == index.search(code, k=5, where={"labels": [1, 8]}).ids[0].tolist()
    assert error_of(http.post("/v1/search?label_ids=x", json=body)) == (422, "invalid_request")
    named = body | {"where": "labels in ('1', 1)", "k": 5}
    assert http.post("/v1/search", json=named).json()["results"][0]["ids"] == both["ids"]
    unknown = http.post("/v1/search", json=body | {"where": "labels = 'cat'"})
    assert error_of(unknown) == (422, "invalid_request")
    assert "there is no label 'cat'" in unknown.text


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


def test_encode(http: TestClient, index: BinaryIndex, run: str) -> None:
    id_ = int(index.ids()[4])
    body = {"images": [base64.b64encode(picture(http, id_)).decode()]}
    response = http.post("/v1/encode", json=body).json()
    assert response == {"n_bits": 64, "codes": [index.codes([id_]).tobytes().hex()]}


@pytest.mark.parametrize("engine", ["kernel", "faiss"])
def test_the_client_gets_what_the_local_index_says(
    app: Callable[..., RequestMiddleware], run: str, engine: str
) -> None:
    local = BinaryIndex.load(f"{run}/index", engine=engine)
    codes = some_codes(700)
    asgi_app = app(engine=engine)
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4)

    async def main() -> None:
        async with AsyncClient(BASE, transport=httpx.ASGITransport(asgi_app), batch=100) as client:
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
def test_the_description_is_true(
    app: Callable[..., RequestMiddleware], own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more requests than the test of the real server sends, in this process."""
    monkeypatch.setattr("hashnet.server.live_index.WAIT_FOR_VERSION_S", 0.01)  # any number is asked for
    import schemathesis

    from tests.support.api_description import exercise

    asgi_app = app(access=Access.of(write=WRITE), folder=own_run)
    schema = schemathesis.openapi.from_asgi("/openapi.json", asgi_app, headers={"host": "127.0.0.1"})
    statuses = exercise(schema, {"authorization": f"Bearer {WRITE}", "host": "127.0.0.1"}, max_examples=150)
    assert statuses[200] > 150  # random keys and names of columns are not there, and are refused
    assert set(statuses) <= {200, 304, 400, 404, 409, 413, 415, 422, 503}


def test_add_and_remove(app: Callable[..., RequestMiddleware], own_run: str) -> None:
    asgi_app = app(access=Access.of(write=WRITE), folder=own_run)
    codes = some_codes(3, seed=9)
    before = BinaryIndex.load(f"{own_run}/index")

    async def main() -> None:
        transport = httpx.ASGITransport(asgi_app)
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
            # an id given to something else is not described as the old item
            await client.add(codes[:1], ids=[taken])
            item = await client.item(taken)
            assert (item["uri"], item["thumbnail"]) == (None, None)

    asyncio.run(main())
    after = BinaryIndex.load(f"{own_run}/index")
    assert after.version == before.version + 3
    assert after.contains([9001, 9002]).all()


def test_asymmetric_ranking(app: Callable[..., RequestMiddleware], run: str, encoder: BatchEncoder) -> None:
    local = BinaryIndex.load(f"{run}/index")
    asgi_app, ids = app(), local.ids()[:7]

    async def main() -> None:
        async with AsyncClient(BASE, transport=httpx.ASGITransport(asgi_app), batch=3) as client:
            pictures = [await client.thumbnail(int(id_)) for id_ in ids]
            logits = encoder.encoder.logits(pictures)
            hits = await client.search(pictures, k=9, ranking="asymmetric")
            expected = local.search(logits=logits, k=9)
            assert (hits.ids == expected.ids).all()
            assert hits.scores is not None
            assert np.allclose(hits.scores, expected.scores, rtol=1e-5)
            few = await client.search(pictures, k=9, ranking="asymmetric", oversample=1.5)
            assert (few.ids == local.search(logits=logits, k=9, oversample=1.5).ids).all()
            assert (few.ids != hits.ids).any()  # only the nearest 14 by Hamming distance were scored
            filtered = await client.search(pictures, k=5, ranking="asymmetric", labels=[3])
            assert (filtered.ids == local.search(logits=logits, k=5, where={"labels": [3]}).ids).all()
            for bad in ({"codes": ["00" * 8]}, {"ids": [int(ids[0])]}):
                refused = await client._http.post("/v1/search", json=bad | {"ranking": "asymmetric"})
                assert error_of(refused) == (422, "invalid_request")
            body = {"images": [base64.b64encode(pictures[0]).decode()], "k": 3, "ranking": "asymmetric"}
            as_json = {"accept": "application/json"}
            (one,) = (await client._http.post("/v1/search", json=body, headers=as_json)).json()["results"]
            assert one["ids"] == expected.ids[0, :3].tolist()
            assert one["scores"] == sorted(one["scores"], reverse=True)

    asyncio.run(main())


def test_ids_as_text_are_exact(app: Callable[..., RequestMiddleware], own_run: str) -> None:
    large = 2**63 - 5
    BinaryIndex.load(f"{own_run}/index").add(some_codes(1, seed=9), ids=[large])
    with TestClient(app(folder=own_run), base_url=BASE) as http:
        body = {"ids": [str(large)], "k": 1, "items": True, "text_ids": True}
        (found,) = http.post("/v1/search", json=body).json()["results"]
        assert (found["ids"], found["items"][0]["id"]) == ([str(large)], str(large))
        assert http.get(f"/v1/items/{large}?text_ids=true").json()["id"] == str(large)
        assert all(isinstance(one["id"], str) for one in http.get("/v1/items?text_ids=true").json()["items"])
        for wrong in ("x", "-1", "1.0", str(2**63)):
            assert error_of(http.post("/v1/search", json={"ids": [wrong]})) == (422, "invalid_request")


def test_a_readded_id_reports_its_new_labels(app: Callable[..., RequestMiddleware], own_run: str) -> None:
    """With the same code as before, so that the code store seems to know it."""
    index = BinaryIndex.load(f"{own_run}/index")
    id_ = int(index.ids()[0])
    code, (old,) = index.codes([id_]), index.labels([id_]) or [[]]
    new = (old[0] + 1) % 10
    asgi_app = app(access=Access.of(write=WRITE), folder=own_run)
    headers = {"authorization": f"Bearer {WRITE}"}
    with TestClient(asgi_app, base_url=BASE, headers=headers) as http:
        http.post("/v1/items/remove", json={"ids": [id_]})
        body = {"item_ids": [id_], "codes": [code.tobytes().hex()], "labels": [[str(new)]]}
        version = http.post("/v1/items", json=body).json()["version"]
        assert http.get(f"/v1/items/{id_}?min_version={version}").json()["labels"] == [new]
        body = {"ids": [id_], "k": 1, "items": True}
        (found,) = http.post("/v1/search", json=body).json()["results"]
        assert found["items"][0]["labels"] == (
            [new] if found["ids"] == [id_] else found["items"][0]["labels"]
        )
        body = {"item_ids": [id_], "codes": [code.tobytes().hex()], "upsert": True}
        version = http.post("/v1/items", json=body | {"columns": {"uri": ["new.png"]}}).json()["version"]
        item = http.get(f"/v1/items/{id_}?min_version={version}").json()
        assert (item["uri"], item["thumbnail"]) == ("new.png", None)  # that of the old picture is not its own


def test_columns_keys_and_conditions(tmp_path: Path) -> None:
    codes = some_codes(60)
    columns = {"year": list(range(1960, 2020)), "uri": [f"pictures/{i}.jpg" for i in range(60)]}
    keys = [f"sku-{i}" for i in range(60)]
    BinaryIndex.from_arrays(codes, columns=columns, keys=keys).save(str(tmp_path / "run/index"))
    served = ServedRun.open(ServeConfig(run=str(tmp_path / "run")))
    asgi_app = make_app(served, None, access=Access.of(write=WRITE))

    async def main() -> None:
        transport = httpx.ASGITransport(asgi_app)
        async with AsyncClient(BASE, transport=transport, token=WRITE) as client:
            local = BinaryIndex.load(str(tmp_path / "run/index"))
            condition = "year >= 2000"
            assert await client.search(codes, k=5, where=condition) == local.search(
                codes, k=5, where=condition
            )
            near = await client.search_radius(codes, radius=16, where=condition)
            assert near == local.search_radius(codes, radius=16, where=condition)
            with pytest.raises(Exception, match="no column 'jear'"):
                await client.search(codes, where="jear > 1")
            new = {"key": ["sku-900"], "year": [2030], "uri": ["pictures/new.jpg"]}
            await client.add(some_codes(1, seed=9), ids=[900], columns=new)
            item = await client.item(900)
            assert (item["uri"], item["columns"]) == (
                "pictures/new.jpg",
                {"year": 2030, "uri": "pictures/new.jpg", "key": "sku-900"},
            )
            assert (await client.search(codes[:1], k=1, where="year = 2030")).ids.tolist() == [[900]]
            with pytest.raises(Exception, match="sku-900"):
                await client.add(some_codes(1), ids=[901], columns={"key": ["sku-900"]})
            body = {"item_ids": [902], "codes": ["00" * 8], "keys": ["sku-902"], "columns": {"year": [2031]}}
            assert (await client._http.post("/v1/items", json=body)).status_code == 200

    asyncio.run(main())
    after = BinaryIndex.load(str(tmp_path / "run/index"))
    assert after.ids_of(["sku-902"]).tolist() == [902]


def test_items_take_a_uri_and_a_key_although_the_index_has_no_columns(
    app: Callable[..., RequestMiddleware], own_run: str
) -> None:
    asgi_app = app(access=Access.of(write=WRITE), folder=own_run)
    old = int(BinaryIndex.load(f"{own_run}/index").ids()[0])

    async def main() -> None:
        transport = httpx.ASGITransport(asgi_app)
        async with AsyncClient(BASE, transport=transport, token=WRITE) as client:
            columns = {"uri": ["new.jpg"], "key": ["new"]}
            await client.add(some_codes(1, seed=9), ids=[9000], labels=[["3"]], columns=columns)
            item = await client.item(9000)
            assert (item["uri"], item["columns"]["key"], item["label_names"]) == ("new.jpg", "new", ["3"])
            before = await client.item(old)
            assert before["uri"] is not None  # the code store's
            assert before["columns"] == {"uri": None, "key": None}
            assert (await client.search(some_codes(1), k=1, where="key = 'new'")).ids.tolist() == [[9000]]
            with pytest.raises(Exception, match="no column 'colour'"):
                await client.add(some_codes(1), ids=[9001], columns={"colour": ["red"]})

    asyncio.run(main())
    index = BinaryIndex.load(f"{own_run}/index")
    assert index.ids_of(["new"]).tolist() == [9000]
    assert len(index) == 401


@pytest.mark.parametrize("engine", ["kernel", "faiss"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_served_as_it_is_searched(tmp_path: Path, kind: str, engine: str) -> None:
    """To the last id, with rows added and removed since it was built."""
    codes, labels = some_codes(600), np.arange(600) % 3
    index = BinaryIndex.from_arrays(codes, np.arange(600) * 3, kind, labels=labels)
    index.save(str(tmp_path / "run/index"))
    index.remove([0, 300])
    index.add(codes[:40], ids=np.arange(40) * 3 + 1, labels=labels[:40])
    local = BinaryIndex.load(str(tmp_path / "run/index"), engine=engine)
    served = ServedRun.open(ServeConfig(run=str(tmp_path / "run"), search_engine=engine))
    asgi_app = make_app(served, None, engine=engine)
    queries = some_codes(100, seed=5)

    async def main() -> None:
        async with AsyncClient(BASE, transport=httpx.ASGITransport(asgi_app), batch=30) as client:
            assert await client.search(queries, k=20) == local.search(queries, k=20)
            assert await client.search(queries[:1], k=1) == local.search(queries[:1], k=1)
            assert await client.search_radius(queries, radius=3) == local.search_radius(queries, radius=3)
            where = {"labels": [1]}
            assert await client.search(queries, k=9, labels=[1]) == local.search(queries, k=9, where=where)
            ids = local.ids()[:30]
            expected = local.search(local.codes(ids), k=5, exclude_self=ids)
            assert await client.search(ids=ids, k=5, exclude_self=True) == expected

    asyncio.run(main())
