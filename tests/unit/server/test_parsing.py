"""Requests that are refused, and the limits they must keep."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.client import Queries, wire
from hashnet.io import binary_column
from hashnet.server import Access
from hashnet.server import schemas as s
from hashnet.server.http_server import RequestMiddleware
from tests.support.serving_app import BASE, CODE, WRITE, blank_png, error_of, limits_with
from tests.support.small_run import some_codes

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
    response = http.post("/v1/search", json=body)
    assert error_of(response) == (status, code)
    assert ("retry-after" in response.headers) == (status == 503)


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
    form = post("/v1/search", files={"file": b"picture"})
    assert error_of(form) == (415, "wrong_content_type")
    assert "--data-binary @FILE" in form.text
    assert error_of(post("/v1/search", content=b"junk", headers=arrow)) == (400, "bad_arrow")
    assert error_of(post("/v1/search?k=0", content=b"junk", headers=arrow)) == (422, "k_out_of_range")
    assert error_of(post("/v1/search?k=3", json={"codes": [CODE], "k": 3})) == (422, "invalid_request")
    nothing = wire.write_queries(Queries("ids", np.zeros(0, dtype=np.int64)))
    assert error_of(post("/v1/search", content=nothing, headers=arrow)) == (422, "no_queries")
    narrow = wire.write_queries(Queries("codes", some_codes(2, n_bits=48)))
    assert error_of(post("/v1/search", content=narrow, headers=arrow)) == (422, "wrong_width")
    codes = wire.write_queries(Queries("codes", some_codes(2)))
    assert error_of(post("/v1/encode", content=codes, headers=arrow)) == (422, "invalid_request")
    near = post("/v1/search", json={"codes": [CODE], "radius": 20}).json()["error"]["message"]
    assert near == "radius must be from 0 to 16 (the server's max_radius), got 20"
    assert error_of(http.get("/v1/items/abc")) == (422, "invalid_request")
    assert error_of(http.get("/v1/items/99999")) == (404, "unknown_id")
    assert error_of(http.get("/v1/items/../../etc/passwd")) == (404, "not_found")
    assert error_of(http.get("/no/such/path")) == (404, "not_found")
    assert error_of(http.delete("/v1/info")) == (405, "method_not_allowed")


def test_bounds(app: Callable[..., RequestMiddleware], index: BinaryIndex) -> None:
    limits = limits_with(
        max_body_mb=0.02, max_pixels=1_000_000, max_k=5, max_radius=64, max_batch=3, max_hits=10
    )
    arrow, image = {"content-type": wire.ARROW}, {"content-type": "image/png"}
    with TestClient(app(limits=limits), base_url=BASE) as http:
        assert error_of(http.post("/v1/search", content=b"x" * 20_001, headers=image)) == (413, "too_large")
        pieces = (b"x" * 1000 for _ in range(30))  # without a Content-Length
        assert error_of(http.post("/v1/search", content=pieces, headers=image)) == (413, "too_large")
        bomb = blank_png(2000, 2000)  # 4 megapixels in a few kilobytes
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


def test_items_of_a_radius_search_are_bounded(
    app: Callable[..., RequestMiddleware], index: BinaryIndex
) -> None:
    body = {"ids": index.ids()[:6].tolist(), "radius": 64}  # 6 x 400 hits
    with TestClient(app(limits=limits_with(max_radius=64)), base_url=BASE) as http:
        assert http.post("/v1/search", json=body).status_code == 200
        refused = http.post("/v1/search", json=body | {"items": True})
        assert error_of(refused) == (413, "too_many_hits")
        assert "more than 2,000 items lie within 64 bits" in refused.text


def test_each_item_to_be_added_has_an_id_and_a_list_of_labels(app: Callable[..., RequestMiddleware]) -> None:
    item = {"codes": [CODE], "item_ids": [9000], "labels": [[1]]}
    with TestClient(app(access=Access.of(write=WRITE)), base_url=BASE) as http:
        for wrong, sentence in (
            ({"item_ids": [9000, 9001]}, "1 items came with 2 ids"),
            ({"labels": [[1], [2]]}, "1 items came with 2 lists of labels"),
        ):
            response = http.post("/v1/items", json=item | wrong, headers={"authorization": f"Bearer {WRITE}"})
            assert error_of(response) == (422, "invalid_request")
            assert response.json()["error"]["message"] == sentence


def test_arrow_columns_besides_the_known_ones_are_refused(
    app: Callable[..., RequestMiddleware], own_run: str
) -> None:
    asgi_app = app(access=Access.of(write=WRITE), folder=own_run)
    headers = {"content-type": wire.ARROW, "authorization": f"Bearer {WRITE}"}
    codes = binary_column(some_codes(1))
    with TestClient(asgi_app, base_url=BASE) as http:
        for columns in (
            {"code": codes, "id": [1], "labels": ["a"]},
            {"code": codes, "id": [1], "labels": [[-1]]},
            {"id": [1]},
        ):
            body = wire.write_table(pa.table(columns))
            assert error_of(http.post("/v1/items", content=body, headers=headers)) == (400, "bad_arrow")
        for columns in ({"code": codes}, {"code": codes, "key": pa.array([None], pa.string())}):
            body = wire.write_table(pa.table(columns))  # neither an id nor a key
            assert error_of(http.post("/v1/items", content=body, headers=headers)) == (422, "invalid_request")
        body = wire.write_table(pa.table({"code": codes, "id": [1], "labels": [[0] * 1001]}))
        assert error_of(http.post("/v1/items", content=body, headers=headers)) == (413, "too_many")
        body = wire.write_table(pa.table({"code": codes, "id": [1], "extra": [1]}))  # it has no columns
        assert error_of(http.post("/v1/items", content=body, headers=headers)) == (422, "unsupported")
        twice = wire.write_table(pa.table([[1], [2]], names=["id", "id"]))
        assert error_of(http.post("/v1/items/remove", content=twice, headers=headers)) == (400, "bad_arrow")


@pytest.mark.parametrize(
    "body",
    [
        b'{"features": [' + b"[0]," * 10_000 + b"[0]]}",
        b'{"ids": [' + b"{}," * 10_000 + b"0]}",
        b'{"ids": [' + b"0," * 1_000_001 + b"0]}",
    ],
    ids=["lists", "objects", "values"],
)
def test_json_of_far_too_many_values_is_not_even_parsed(
    http: TestClient, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(s, "parse", lambda *_: pytest.fail("it was parsed"))
    response = http.post("/v1/search", content=body, headers={"content-type": "application/json"})
    assert error_of(response) == (413, "too_many")
