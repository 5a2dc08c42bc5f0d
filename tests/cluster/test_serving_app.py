"""The HTTP application in this process, without Ray: every route, every refusal, bounds, tokens, headers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from cluster.serving import application, proxy, service
from cluster.serving.app import build_app
from cluster.serving.backend import LocalBackend
from cluster.serving.config import Limits, ServeConfig, Tokens, read_tokens
from cluster.serving.encoder_holder import EncoderHolder
from cluster.serving.guard import Guard, digest
from cluster.serving.index_holder import IndexHolder
from cluster.serving.meter import Meter
from cluster.serving.opening import look_over, open_catalog
from hashnet import AsyncClient, BinaryIndex, Encoder, wire
from hashnet.errors import ConfigError, LineageMismatch
from hashnet.queries import Queries
from tests.small_run import make_model, make_run, some_codes

READ, WRITE = "r" * 24, "w" * 24
BASE = "http://127.0.0.1:8000"
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # inside Ray Serve


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def encoder(run: str) -> EncoderHolder:
    return EncoderHolder(f"{run}/model", "cpu-eager", 4, 1_000_000, 2)


def make_app(
    run: str, encoder: EncoderHolder | None, limits: Limits, tokens: Tokens, engine: str, local_only: bool
) -> Guard:
    ground = look_over(ServeConfig(run=run))
    holder = IndexHolder(f"{run}/index", engine, model_sha256=ground.model_sha256)
    catalog = open_catalog(ground.paths["codes"], ground.paths["manifest"])
    backend = LocalBackend(holder, encoder, catalog, ground.fixed, limits.timeout_s)
    return build_app(backend, limits, tokens, local_only, Meter())


@pytest.fixture(scope="module")
def app(run: str, encoder: EncoderHolder) -> Callable[..., Guard]:
    def make(
        limits: Limits | None = None,
        tokens: Tokens | None = None,
        engine: str = "auto",
        folder: str = run,
        local_only: bool = True,
    ) -> Guard:
        return make_app(folder, encoder, limits or Limits(), tokens or Tokens(), engine, local_only)

    return make


@pytest.fixture(scope="module")
def http(app: Callable[..., Guard]) -> Iterator[TestClient]:
    with TestClient(app(), base_url=BASE) as client:
        yield client


@pytest.fixture(scope="module")
def index(run: str) -> BinaryIndex:
    return BinaryIndex.load(f"{run}/index")


def picture(run_client: TestClient, id_: int) -> bytes:
    return run_client.get(f"/v1/items/{id_}/thumbnail").content


def error_of(answer: httpx.Response) -> tuple[int, str]:
    said = answer.json()["error"]
    assert len(said["message"]) > 5
    assert said["request_id"]
    assert "Traceback" not in answer.text
    return answer.status_code, said["code"]


# ---------------------------------------------------------------- answers


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


# ---------------------------------------------------------------- refusals

CODE = "00" * 8
JSON_REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "no query": ({}, 422, "invalid_request"),
    "two kinds": ({"codes": [CODE], "ids": [1]}, 422, "invalid_request"),
    "an unknown field": ({"codes": [CODE], "topk": 3}, 422, "invalid_request"),
    "wrong width": ({"codes": ["00" * 6]}, 422, "wrong_width"),
    "differing widths": ({"codes": ["00", "0000"]}, 422, "wrong_width"),
    "not hex": ({"codes": ["xy"]}, 422, "invalid_request"),
    "features here": ({"features": [[1.0]]}, 422, "not_accepted"),
    "k = 0": ({"codes": [CODE], "k": 0}, 422, "k_out_of_range"),
    "k too large": ({"codes": [CODE], "k": 1001}, 422, "k_out_of_range"),
    "k as text": ({"codes": [CODE], "k": "5"}, 422, "k_out_of_range"),
    "radius below 0": ({"codes": [CODE], "radius": -1}, 422, "radius_out_of_range"),
    "radius too large": ({"codes": [CODE], "radius": 17}, 422, "radius_out_of_range"),
    "k and radius": ({"codes": [CODE], "k": 1, "radius": 1}, 422, "invalid_request"),
    "unknown id": ({"ids": [10_000_000]}, 404, "unknown_id"),
    "unknown label": ({"codes": [CODE], "labels": ["cat"]}, 422, "unknown_label"),
    "label beyond": ({"codes": [CODE], "labels": [10]}, 422, "unknown_label"),
    "not base64": ({"images": ["***"]}, 422, "not_an_image"),
    "not an image": ({"images": [base64.b64encode(b"hello").decode()]}, 422, "not_an_image"),
    "too many items": ({"ids": [0] * 3, "k": 900, "items": True}, 422, "too_many_items"),
    "k as a fraction": ({"codes": [CODE], "k": 1.5}, 422, "k_out_of_range"),
    "k as true": ({"codes": [CODE], "k": True}, 422, "k_out_of_range"),
    "null": ({"codes": [CODE], "ids": None}, 422, "invalid_request"),
    "a negative id": ({"ids": [-1]}, 422, "invalid_request"),
    "too much for JSON": ({"ids": [0] * 300, "k": 900}, 413, "too_many_hits"),
    "a version to come": ({"codes": [CODE], "min_version": 99}, 503, "version_behind"),
    "exclude_self without ids": ({"codes": [CODE], "exclude_self": True}, 422, "invalid_request"),
}


@pytest.mark.parametrize("name", JSON_REFUSALS)
def test_json_refusals(http: TestClient, name: str) -> None:
    body, status, code = JSON_REFUSALS[name]
    answer = http.post("/v1/search", json=body)
    assert error_of(answer) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_other_refusals(http: TestClient) -> None:
    post = http.post
    json_type, arrow = {"content-type": "application/json"}, {"content-type": wire.ARROW}
    assert error_of(post("/v1/search", content=b"{", headers=json_type)) == (400, "invalid_json")
    assert error_of(post("/v1/search", content=b"\xff\xfe", headers=json_type)) == (400, "invalid_json")
    assert error_of(post("/v1/search", content=b"{}", headers={"content-type": "text/plain"})) == (
        415,
        "wrong_content_type",
    )
    assert error_of(post("/v1/search", content=b"", headers={})) == (415, "wrong_content_type")
    assert error_of(post("/v1/search", content=b"junk", headers=arrow)) == (400, "bad_arrow")
    assert error_of(post("/v1/search?k=0", content=b"junk", headers=arrow)) == (422, "k_out_of_range")
    assert error_of(post("/v1/search?k=3", json={"codes": [CODE], "k": 3})) == (422, "invalid_request")
    nothing = wire.write_queries(Queries("ids", np.zeros(0, dtype=np.int64)))
    assert error_of(post("/v1/search", content=nothing, headers=arrow)) == (422, "no_queries")
    narrow = wire.write_queries(Queries("codes", some_codes(2, n_bits=48)))
    assert error_of(post("/v1/search", content=narrow, headers=arrow)) == (422, "wrong_width")
    codes = wire.write_queries(Queries("codes", some_codes(2)))
    assert error_of(post("/v1/encode", content=codes, headers=arrow)) == (422, "invalid_request")
    assert error_of(http.get("/v1/items/abc")) == (422, "invalid_request")
    assert error_of(http.get("/v1/items/99999")) == (404, "unknown_id")
    assert error_of(http.get("/v1/items/../../etc/passwd")) == (404, "not_found")
    assert error_of(http.get("/no/such/path")) == (404, "not_found")
    assert error_of(http.delete("/v1/info")) == (405, "method_not_allowed")


def test_features_and_nan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", modality="features")
    holder = EncoderHolder(f"{run}/model", "cpu-eager", None, 1_000_000, 2)
    index = BinaryIndex.load(f"{run}/index")
    with TestClient(make_app(run, holder, Limits(), Tokens(), "auto", True), base_url=BASE) as http:
        info = http.get("/v1/info").json()
        assert (info["modality"], info["n_features"], info["pictures"]) == ("features", 64, False)
        row = np.linspace(0, 1, 64, dtype=np.float32)
        found = http.post("/v1/search", json={"features": [row.tolist()], "k": 3}).json()["results"][0]
        assert found["ids"] == index.search(holder.encoder.encode(row), k=3).ids[0].tolist()
        json_type = {"content-type": "application/json"}
        for value in ("NaN", "Infinity", "1e999"):
            text = json.dumps({"features": [row.tolist()]}).replace("1.0", value)
            assert error_of(http.post("/v1/search", content=text, headers=json_type)) == (422, "not_finite")
        body = wire.write_queries(Queries("features", np.full((2, 64), np.nan, dtype=np.float32)))
        answer = http.post("/v1/search", content=body, headers={"content-type": wire.ARROW})
        assert error_of(answer) == (422, "not_finite")
        assert error_of(http.post("/v1/search", json={"features": [[1.0]]})) == (422, "wrong_width")
        assert error_of(http.get(f"/v1/items/{int(index.ids()[0])}/thumbnail")) == (404, "no_picture")


# ---------------------------------------------------------------- bounds


def png(width: int, height: int) -> bytes:
    from PIL import Image

    sink = io.BytesIO()
    Image.new("L", (width, height)).save(sink, "PNG")
    return sink.getvalue()


def test_bounds(app: Callable[..., Guard], index: BinaryIndex) -> None:
    limits = Limits(
        max_body_bytes=20_000, max_pixels=1_000_000, max_k=5, max_radius=64, max_batch=3, max_hits=10
    )
    arrow, image = {"content-type": wire.ARROW}, {"content-type": "image/png"}
    with TestClient(app(limits), base_url=BASE) as http:
        assert error_of(http.post("/v1/search", content=b"x" * 20_001, headers=image)) == (413, "too_large")
        pieces = (b"x" * 1000 for _ in range(30))  # without a Content-Length
        assert error_of(http.post("/v1/search", content=pieces, headers=image)) == (413, "too_large")
        bomb = png(2000, 2000)  # 4 megapixels in a few kilobytes
        assert len(bomb) < 20_000
        huge = bytearray(bomb)
        huge[16:24] = (60_000).to_bytes(4, "big") * 2  # what the header says is enough
        huge[29:33] = zlib.crc32(bytes(huge[12:29])).to_bytes(4, "big")
        assert error_of(http.post("/v1/search", content=bytes(huge), headers=image)) == (
            413,
            "image_too_large",
        )
        assert error_of(http.post("/v1/search", content=bomb, headers=image)) == (413, "image_too_large")
        body = wire.write_queries(Queries("codes", some_codes(4)))
        assert error_of(http.post("/v1/search", content=body, headers=arrow)) == (413, "too_many")
        body = wire.write_queries(Queries("codes", some_codes(3)))
        assert error_of(http.post("/v1/search?k=5", content=body, headers=arrow)) == (413, "too_many_hits")
        assert error_of(http.post("/v1/search?k=6", content=body, headers=arrow)) == (422, "k_out_of_range")
        assert error_of(http.post("/v1/search?radius=64", content=body, headers=arrow)) == (
            413,
            "too_many_hits",
        )


def test_items_of_a_radius_search_are_bounded(app: Callable[..., Guard], index: BinaryIndex) -> None:
    body = {"ids": index.ids()[:6].tolist(), "radius": 64}  # 6 x 400 hits
    with TestClient(app(Limits(max_radius=64)), base_url=BASE) as http:
        assert http.post("/v1/search", json=body).status_code == 200
        refused = http.post("/v1/search", json=body | {"items": True})
        assert error_of(refused) == (413, "too_many_hits")
        assert "more than 2,000 items lie within 64 bits" in refused.text


def test_the_encoder_ends_work_that_nobody_waits_for(encoder: EncoderHolder, monkeypatch: Any) -> None:
    pictures = Queries("images", [png(8, 8)] * 50)
    decoded: list[int] = []
    monkeypatch.setattr("cluster.serving.encoder_holder.check_pixels", lambda *_: decoded.append(1))
    late, in_time = encoder.encode([pictures, pictures], [0.0, time.time() + 60])
    assert isinstance(late, tuple)
    assert (late[0], late[2]) == ("timeout", 503)
    assert isinstance(in_time, np.ndarray)
    assert in_time.shape == (50, 8)
    assert len(decoded) == 50  # the late ones were not even decoded


def test_too_many_at_once_are_told_to_come_later(
    app: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = app(Limits(max_inflight=2))
    gate = asyncio.Event()

    async def wait(self: Any) -> dict[str, Any]:
        await gate.wait()
        return {}

    monkeypatch.setattr(LocalBackend, "ask_about", wait)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=BASE) as http:
            waiting = [asyncio.create_task(http.get("/v1/info")) for _ in range(2)]
            await asyncio.sleep(0.05)
            refused = await http.get("/v1/info")
            assert error_of(refused) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await http.get("/healthz")).status_code == 200  # a busy server is still alive
            for task in waiting:
                task.cancel()

    asyncio.run(main())


def test_no_request_takes_longer_than_the_limit(
    app: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Any, *arguments: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(LocalBackend, "ask_index", never)
    monkeypatch.setattr(LocalBackend, "write", never)
    guard = app(Limits(timeout_s=0.2), Tokens(write=digest(WRITE)))
    with TestClient(guard, base_url=BASE) as http:
        answer = http.post("/v1/search", json={"codes": [CODE]})
        assert error_of(answer) == (503, "timeout")
        assert "retry-after" in answer.headers
        headers = {"authorization": f"Bearer {WRITE}"}
        answer = http.post("/v1/items/remove", json={"ids": [1]}, headers=headers)
        assert error_of(answer) == (504, "timeout")  # 503 would say: nothing was done


# ---------------------------------------------------------------- who may ask


def test_tokens(app: Callable[..., Guard]) -> None:
    guard = app(tokens=Tokens(digest(READ), digest(WRITE)), local_only=False)

    def bearer(token: str) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"}

    with TestClient(guard, base_url="http://search.example:8000") as http:
        for path in ("/", "/static/app.js", "/healthz", "/readyz", "/openapi.json"):
            assert http.get(path).status_code == 200
        for path in ("/v1/info", "/v1/items", "/v1/items/1", "/v1/items/1/thumbnail", "/metrics"):
            assert error_of(http.get(path)) == (401, "unauthorized")
            assert http.get(path).headers["www-authenticate"] == "Bearer"
            assert error_of(http.get(path, headers=bearer(READ + "x"))) == (401, "unauthorized")
            assert http.get(path, headers={"authorization": READ}).status_code == 401
            assert http.get(path, headers=bearer(READ)).status_code != 401
            assert http.get(path, headers=bearer(WRITE)).status_code != 401
        change = {"ids": [12_345_678]}
        assert error_of(http.post("/v1/items/remove", json=change)) == (401, "write_token_needed")
        reader = http.post("/v1/items/remove", json=change, headers=bearer(READ))
        assert error_of(reader) == (403, "write_token_needed")
        writer = http.post("/v1/items/remove", json=change, headers=bearer(WRITE))
        assert error_of(writer) == (404, "unknown_id")


def test_without_a_write_token_nobody_writes(http: TestClient) -> None:
    body = {"item_ids": [5000], "codes": [CODE]}
    assert error_of(http.post("/v1/items", json=body)) == (403, "writes_off")
    assert error_of(http.post("/v1/items", json=body, headers={"authorization": "Bearer "})) == (
        403,
        "writes_off",
    )


def test_a_web_page_from_elsewhere_does_not_reach_a_local_server(http: TestClient) -> None:
    assert error_of(http.get("/v1/info", headers={"host": "rebound.example:8000"})) == (421, "wrong_host")
    for host in ("localhost:8000", "127.0.0.1", "127.0.0.7:8000", "[::1]:8000"):
        assert http.get("/v1/info", headers={"host": host}).status_code == 200
    assert (
        "access-control-allow-origin"
        not in http.get("/v1/info", headers={"origin": "http://evil.example"}).headers
    )


def test_listening_outwards_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert read_tokens("127.0.0.1") == ("", "")
    assert read_tokens("::1") == ("", "")
    for host in ("0.0.0.0", "192.168.1.5", "::", "search.example"):
        with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
            read_tokens(host)
    monkeypatch.setenv("HASHNET_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_tokens("0.0.0.0")
    monkeypatch.setenv("HASHNET_TOKEN", READ)
    assert read_tokens("0.0.0.0") == (READ, "")
    monkeypatch.setenv("HASHNET_WRITE_TOKEN", READ)
    with pytest.raises(ConfigError, match="the same"):
        read_tokens("0.0.0.0")


def test_security_headers_everywhere(http: TestClient) -> None:
    for path in ("/", "/static/app.js", "/v1/info", "/no/such", "/healthz"):
        headers = http.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert http.get("/v1/info").headers["cache-control"] == "no-store"


def test_the_page_asks_nobody_else(http: TestClient) -> None:
    for path in ("/", "/static/app.js", "/static/style.css", "/static/icon.svg"):
        text = http.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
    page = http.get("/").text
    assert "style=" not in page  # the content security policy would drop it
    assert "onclick" not in page


# ---------------------------------------------------------------- failures and the log


def test_no_stack_trace_reaches_a_client(app: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Any) -> Any:
        raise RuntimeError("secret detail")

    guard = app()
    monkeypatch.setattr(LocalBackend, "ask_about", fail)
    with TestClient(guard, base_url=BASE, raise_server_exceptions=False) as http:
        answer = http.get("/v1/info")
    assert error_of(answer) == (500, "internal")
    assert "secret" not in answer.text


def test_the_log_has_no_contents(http: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    secret = "0123456789abcdef"
    with caplog.at_level(logging.DEBUG):
        headers = {"authorization": "Bearer top-secret-token", "x-request-id": "my-id-1"}
        http.post("/v1/search", json={"codes": [secret], "k": 3}, headers=headers)
    assert secret not in caplog.text
    assert "top-secret" not in caplog.text
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "hashnet.events"]
    line = next(line for line in lines if line.get("request_id") == "my-id-1")
    assert (line["method"], line["route"], line["status"], line["queries"]) == ("POST", "/v1/search", 200, 1)
    assert line["kind"] == "codes"
    assert line["ms"] > 0


def test_metrics(app: Callable[..., Guard]) -> None:
    with TestClient(app(), base_url=BASE) as http:
        body = wire.write_queries(Queries("codes", some_codes(3)))
        http.post("/v1/search", content=body, headers={"content-type": wire.ARROW})
        http.get("/v1/items/99999")
        text = http.get("/metrics").text
    assert 'hashnet_requests_total{method="POST",route="/v1/search",status="200"} 1.0' in text
    assert 'hashnet_requests_total{method="GET",route="/v1/items/{id}",status="404"} 1.0' in text
    assert 'hashnet_queries_total{route="/v1/search"} 3.0' in text
    assert "hashnet_index_size 400.0" in text


# ---------------------------------------------------------------- updates


@pytest.fixture
def own_run(run: str, tmp_path: Path) -> str:
    """A copy of the run whose index may be changed."""
    import shutil

    shutil.copytree(run, tmp_path / "run")
    return str(tmp_path / "run")


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


def test_items_encoded_later_are_known(app: Callable[..., Guard], own_run: str) -> None:
    """The database grows: more codes in the store, then a new index version; nothing is restarted."""
    from hashnet.store import CodeStore, write_store

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
    from cluster.serving.asks import IndexAsk

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


def test_an_emptied_index_answers_with_nothing(tmp_path: Path) -> None:
    from cluster.serving.asks import IndexAsk

    index = BinaryIndex.from_arrays(some_codes(3))
    index.save(str(tmp_path / "index"))
    index.remove([0, 1, 2])
    holder = IndexHolder(str(tmp_path / "index"))
    found, near = holder.answer([IndexAsk(codes=some_codes(2), k=4), IndexAsk(codes=some_codes(2), radius=4)])
    assert (found.hits.ids == -1).all()  # type: ignore[union-attr]
    assert [len(hit) for hit in near.hits] == [0, 0]  # type: ignore[union-attr]


def test_arrow_columns_besides_the_known_ones_are_refused(app: Callable[..., Guard], own_run: str) -> None:
    guard = app(tokens=Tokens(write=digest(WRITE)), folder=own_run)
    headers = {"content-type": wire.ARROW, "authorization": f"Bearer {WRITE}"}
    codes = wire.binary_column(some_codes(1))
    with TestClient(guard, base_url=BASE) as http:
        for columns in (
            {"code": codes},
            {"code": codes, "id": [1], "extra": [1]},
            {"code": codes, "id": [1], "labels": ["a"]},
            {"code": codes, "id": [1], "labels": [[-1]]},
            {"id": [1]},
        ):
            body = wire.write_table(pa.table(columns))
            assert error_of(http.post("/v1/items", content=body, headers=headers)) == (400, "bad_arrow")


def test_replicas_and_devices_by_configuration(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert application.scaling(2, 0, target=32) == {"num_replicas": 2}
    grows = application.scaling(1, 8, target=32)["autoscaling_config"]
    assert (grows["min_replicas"], grows["max_replicas"]) == (1, 8)
    config = ServeConfig(run=run)
    monkeypatch.setattr(application.session, "resources", lambda: {"CPU": 8.0})
    assert "GPU" not in application.size("encoder", config)
    monkeypatch.setattr(application.session, "resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert application.size("encoder", config)["GPU"] > 0  # a GPU where there is one
    assert "GPU" not in application.size("encoder", ServeConfig(run=run, encoder_device="cpu"))
    assert "GPU" not in application.size("index", config)
    assert application.size("index", ServeConfig(run=run, index_device="cuda", threads=4)) == {
        "CPU": 4.0,
        "GPU": 0.5,
    }
    needs = application.needs(config, look_over(config))
    assert [need.name for need in needs] == ["http", "index", "encoder"]
    with pytest.raises(ConfigError, match="max_index_replicas=1 is below index_replicas=3"):
        ServeConfig(run=run, index_replicas=3, max_index_replicas=1)
    with pytest.raises(ConfigError, match="belong together"):
        ServeConfig(run=run, tls_cert="cert.pem")


def test_what_is_configured_reaches_serve(run: str) -> None:
    config = ServeConfig(
        run=run, index_replicas=3, max_encoder_replicas=5, http_replicas=2, encoder_device="cpu"
    )
    built = application.build(config, look_over(config), Tokens())._bound_deployment
    index, encoder, keeper = (one._bound_deployment for one in built.init_args[:3])
    assert (built.name, built.num_replicas) == ("HttpReplica", 2)
    assert (index.name, index.num_replicas) == ("IndexReplica", 3)
    assert (keeper.name, keeper.num_replicas) == ("Keeper", 1)  # one writer
    scaled = encoder._deployment_config.autoscaling_config
    assert (encoder.name, scaled.min_replicas, scaled.max_replicas) == ("EncoderReplica", 1, 5)


def test_an_operators_serve_needs_a_token(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
        service.application({"run": run})
    monkeypatch.setenv("HASHNET_TOKEN", READ)
    built = service.application({"run": run, "index_replicas": 2, "encoder_device": "cpu"})
    assert built._bound_deployment.name == "HttpReplica"
    with pytest.raises(ConfigError, match="did you mean 'index_replicas'"):
        service.application({"run": run, "index_replica": 2})


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [("/v1/search", "POST", 503, "unavailable"), ("/v1/items", "GET", 503, "unavailable"),
     ("/v1/items", "POST", 504, "timeout"), ("/v1/items/remove", "POST", 504, "timeout")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["silent", "raises"])
def test_a_request_that_serve_lost_is_told_so(
    path: str, method: str, status: int, code: str, how: str
) -> None:
    """A read is sent again; a write may have been done, so 504 and no Retry-After."""

    async def lost(scope: Any, receive: Any, send: Any) -> None:
        if how == "raises":
            raise RuntimeError("secret detail")

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(proxy.Polite(lost))
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            return await http.request(method, path)

    answer = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "secret" not in answer.text


def test_serves_own_503_is_replaced_and_other_answers_pass() -> None:
    async def say(scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        status = int(scope["path"].strip("/"))
        await PlainTextResponse("words of Serve", status)(scope, receive, send)

    http = TestClient(proxy.Polite(say), base_url=BASE)
    busy = http.post("/503")
    assert (busy.json()["error"]["code"], busy.headers["retry-after"]) == ("unavailable", "1")
    assert http.get("/404").text == "words of Serve"


@pytest.mark.slow
def test_the_description_is_true(app: Callable[..., Guard], own_run: str) -> None:
    """Many more requests than the test of the real server sends, in this process."""
    import schemathesis

    from tests.api_description import exercise

    guard = app(tokens=Tokens(write=digest(WRITE)), folder=own_run)
    schema = schemathesis.openapi.from_asgi("/openapi.json", guard, headers={"host": "127.0.0.1"})
    statuses = exercise(schema, {"authorization": f"Bearer {WRITE}", "host": "127.0.0.1"}, max_examples=150)
    assert statuses[200] > 200
    assert set(statuses) <= {200, 304, 400, 404, 409, 413, 415, 422, 503}
