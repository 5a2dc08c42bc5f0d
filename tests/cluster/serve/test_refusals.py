"""What the HTTP application refuses, and the bounds it keeps, in this process, without Ray."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from fastapi.testclient import TestClient
from pydantic import ValidationError

from hashnet import BinaryIndex
from hashnet.client import wire
from hashnet.client.queries import Queries
from hashnet.codes import pack_signs
from hashnet.errors import StorageError
from hashnet.io.arrow import binary_column
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
from hashnet.server import schemas as s
from hashnet.server.calls import blame
from hashnet.server.encoder_holder import EncoderHolder
from hashnet.server.middleware import Guard, digest
from hashnet.server.settings import Limits, Tokens
from tests.support.serving_app import BASE, CODE, WRITE, LocalBackend, error_of, make_app
from tests.support.small_run import make_run, some_codes

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


def test_a_row_that_overflows_in_the_model_spoils_its_own_request_alone(tmp_path: Path) -> None:
    model = build_model("features", n_bits=16, n_features=64)
    model.set_standardisation(torch.zeros(64), torch.full((64,), 1e-3))
    save_bundle(str(tmp_path), model)
    holder = EncoderHolder(str(tmp_path), "cpu-eager", None, 1_000_000, 2)
    row = np.linspace(0, 1, 64, dtype=np.float32)
    huge = np.where(np.arange(64) % 2, 3e38, -3e38).astype(np.float32)  # finite, and infinite over its std
    asked = [Queries("features", np.stack(rows)) for rows in ([row], [row, huge], [row * 2])]
    first, refused, last = holder.encode(asked, [time.time() + 60] * 3)
    assert isinstance(refused, tuple)
    assert (refused[0], "row 1" in refused[1], refused[2]) == ("not_finite", True, 422)
    assert np.array_equal(first, holder.encoder.encode(row))
    assert np.array_equal(last, holder.encoder.encode(row * 2))


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
    monkeypatch.setattr("hashnet.server.encoder_holder.check_pixels", lambda *_: decoded.append(1))
    late, in_time = encoder.encode([pictures, pictures], [0.0, time.time() + 60])
    assert isinstance(late, tuple)
    assert (late[0], late[2]) == ("timeout", 503)
    assert isinstance(in_time, np.ndarray)
    assert in_time.shape == (50, 8)
    assert len(decoded) == 50  # the late ones were not even decoded


def test_the_encoder_works_in_chunks_and_looks_at_the_clock_between(
    encoder: EncoderHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = SimpleNamespace(now=100.0), []
    logits = encoder.encoder.logits

    def slowly(rows: np.ndarray) -> np.ndarray:
        sizes.append(len(rows))
        clock.now += 10
        return logits(rows)

    monkeypatch.setattr(encoder, "chunk", 8)
    monkeypatch.setattr(encoder.encoder, "logits", slowly)
    monkeypatch.setattr("hashnet.server.encoder_holder.time", SimpleNamespace(time=lambda: clock.now))
    pictures = [png(8 + i, 8) for i in range(20)]
    batches = [
        Queries("images", pictures),  # late after its first chunk of three
        Queries("images", [*pictures[:3], b"junk", *pictures]),
        Queries("images", pictures[:10]),
    ]
    late, wrong, codes = encoder.encode(batches, [105.0, 1000.0, 1000.0])
    assert isinstance(late, tuple)
    assert late[0] == "timeout"
    assert isinstance(wrong, tuple)
    assert (wrong[0], "image 3 " in wrong[1]) == ("not_an_image", True)
    assert (codes == pack_signs(logits(pictures[:10]))).all()
    # 54 rows; 8 of the first batch, none of it later; rows 16-23 end with 4 of the second, row 3 of it bad;
    # then 4 of the last batch and 6
    assert sizes == [8, 4, 6]


def test_wrong_entries_of_a_large_list_are_told_by_the_first() -> None:
    """A body of 32 MB holds millions of them; each would be an object of its own."""
    wrong = ["?", -1, [None], {}] * 1000
    bodies = [
        (s.SearchBody, ("codes", "images", "features", "ids", "labels")),
        (s.EncodeBody, ("images", "features")),
        (s.AddBody, ("item_ids", "codes", "images", "features", "labels")),
        (s.RemoveBody, ("ids",)),
    ]
    for model, names in bodies:
        lists = {name for name, field in model.model_fields.items() if "list" in str(field.annotation)}
        assert lists == set(names)
        for name in names:
            for entries in (wrong[1:], [wrong[1:]] if name in ("features", "labels") else wrong[2:]):
                with pytest.raises(ValidationError) as caught:
                    model.model_validate_json(json.dumps({name: entries}))
                mistakes = [one for one in caught.value.errors() if one["type"] != "missing"]
                assert len(mistakes) <= (2 if name == "labels" else 1)  # a label is a number or a name
    with pytest.raises(ValidationError) as caught:
        s.SearchBody.model_validate_json(json.dumps({"x" * 10_000 + str(i): 1 for i in range(100)}))
    assert caught.value.error_count() == 1
    assert len(str(s.explain(caught.value))) < 200


def test_a_failure_of_ours_is_in_the_log_and_not_in_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    code, message, status = blame(StorageError("cannot read s3://bucket/secret"))
    assert (code, status) == ("internal", 500)
    assert "secret" not in message
    assert caplog.messages == ["a request failed"]  # a search, an encoding or a write
    assert "s3://bucket/secret" in caplog.text


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


def test_each_item_to_be_added_has_an_id_and_a_list_of_labels(app: Callable[..., Guard]) -> None:
    item = {"codes": [CODE], "item_ids": [9000], "labels": [[1]]}
    with TestClient(app(tokens=Tokens(write=digest(WRITE))), base_url=BASE) as http:
        for wrong, sentence in (
            ({"item_ids": [9000, 9001]}, "1 items came with 2 ids"),
            ({"labels": [[1], [2]]}, "1 items came with 2 lists of labels"),
        ):
            answer = http.post("/v1/items", json=item | wrong, headers={"authorization": f"Bearer {WRITE}"})
            assert error_of(answer) == (422, "invalid_request")
            assert answer.json()["error"]["message"] == sentence


def test_arrow_columns_besides_the_known_ones_are_refused(app: Callable[..., Guard], own_run: str) -> None:
    guard = app(tokens=Tokens(write=digest(WRITE)), folder=own_run)
    headers = {"content-type": wire.ARROW, "authorization": f"Bearer {WRITE}"}
    codes = binary_column(some_codes(1))
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
        body = wire.write_table(pa.table({"code": codes, "id": [1], "labels": [[0] * 1001]}))
        assert error_of(http.post("/v1/items", content=body, headers=headers)) == (413, "too_many")
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
    answer = http.post("/v1/search", content=body, headers={"content-type": "application/json"})
    assert error_of(answer) == (413, "too_many")
