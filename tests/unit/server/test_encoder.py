"""Pictures and features of several requests, encoded together."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.client import Queries, wire
from hashnet.codes import pack_signs
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
from hashnet.server import (
    ApiError,
    BatchEncoder,
    EncodeRequest,
    EncoderProcess,
    ServeConfig,
    ServedRun,
    serve_encoder,
)
from tests.support.serving_app import BASE, blank_png, error_of, make_app
from tests.support.small_run import make_run


def test_features_and_nan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", modality="features")
    batch_encoder = BatchEncoder(f"{run}/model", "cpu", 1_000_000, 2)
    index = BinaryIndex.load(f"{run}/index")
    with TestClient(make_app(ServedRun.open(ServeConfig(run=run)), batch_encoder), base_url=BASE) as http:
        info = http.get("/v1/info").json()
        assert (info["modality"], info["n_features"], info["pictures"]) == ("features", 64, False)
        row = np.linspace(0, 1, 64, dtype=np.float32)
        found = http.post("/v1/search", json={"features": [row.tolist()], "k": 3}).json()["results"][0]
        assert found["ids"] == index.search(batch_encoder.encoder.encode(row), k=3).ids[0].tolist()
        json_type = {"content-type": "application/json"}
        for value in ("NaN", "Infinity", "1e999"):
            text = json.dumps({"features": [row.tolist()]}).replace("1.0", value)
            assert error_of(http.post("/v1/search", content=text, headers=json_type)) == (422, "not_finite")
        body = wire.write_queries(Queries("features", np.full((2, 64), np.nan, dtype=np.float32)))
        response = http.post("/v1/search", content=body, headers={"content-type": wire.ARROW})
        assert error_of(response) == (422, "not_finite")
        assert error_of(http.post("/v1/search", json={"features": [[1.0]]})) == (422, "wrong_width")
        assert error_of(http.get(f"/v1/items/{int(index.ids()[0])}/thumbnail")) == (404, "no_picture")


def test_a_row_that_overflows_in_the_model_spoils_its_own_request_alone(tmp_path: Path) -> None:
    model = build_model("features", n_bits=16, n_features=64)
    model.set_scaling(torch.zeros(64), torch.full((64,), 1e-3))
    save_bundle(str(tmp_path), model)
    batch_encoder = BatchEncoder(str(tmp_path), "cpu", 1_000_000, 2)
    row = np.linspace(0, 1, 64, dtype=np.float32)
    huge = np.where(np.arange(64) % 2, 3e38, -3e38).astype(np.float32)  # finite, and infinite over its std
    batches = [Queries("features", np.stack(rows)) for rows in ([row], [row, huge], [row * 2])]
    first, refused, last = batch_encoder.encode([EncodeRequest(one, time.time() + 60) for one in batches])
    assert isinstance(refused, ApiError)
    assert (refused.code, "row 1" in str(refused), refused.status) == ("not_finite", True, 422)
    assert np.array_equal(pack_signs(first), batch_encoder.encoder.encode(row))
    assert np.array_equal(pack_signs(last), batch_encoder.encoder.encode(row * 2))


def test_the_encoder_ends_work_that_nobody_waits_for(encoder: BatchEncoder, monkeypatch: Any) -> None:
    pictures = Queries("images", [blank_png(8, 8)] * 50)
    decoded: list[int] = []
    monkeypatch.setattr("hashnet.server.encoder.check_pixels", lambda *_: decoded.append(1))
    late, in_time = encoder.encode([EncodeRequest(pictures, 0.0), EncodeRequest(pictures, time.time() + 60)])
    assert isinstance(late, ApiError)
    assert (late.code, late.status) == ("timeout", 503)
    assert isinstance(in_time, np.ndarray)
    assert in_time.shape == (50, 64)
    assert len(decoded) == 50  # the late ones were not even decoded


def test_the_encoder_works_in_chunks_and_looks_at_the_clock_between(
    encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = SimpleNamespace(now=100.0), []
    logits = encoder.encoder.logits

    def slowly(rows: np.ndarray) -> np.ndarray:
        sizes.append(len(rows))
        clock.now += 10
        return logits(rows)

    monkeypatch.setattr(encoder, "chunk", 8)
    monkeypatch.setattr(encoder.encoder, "logits", slowly)
    monkeypatch.setattr("hashnet.server.encoder.time", SimpleNamespace(time=lambda: clock.now))
    pictures = [blank_png(8 + i, 8) for i in range(20)]
    batches = [
        Queries("images", pictures),  # late after its first chunk of three
        Queries("images", [*pictures[:3], b"junk", *pictures]),
        Queries("images", pictures[:10]),
    ]
    late, wrong, found = encoder.encode(
        [EncodeRequest(*pair) for pair in zip(batches, (105.0, 1000.0, 1000.0), strict=True)]
    )
    assert isinstance(late, ApiError)
    assert late.code == "timeout"
    assert isinstance(wrong, ApiError)
    assert (wrong.code, "image 3 " in str(wrong)) == ("not_an_image", True)
    assert (found == logits(pictures[:10])).all()
    # 54 rows; 8 of the first batch, none of it later; rows 16-23 end with 4 of the second, row 3 of it bad;
    # then 4 of the last batch and 6
    assert sizes == [8, 4, 6]


def test_a_process_behind_a_socket_responds_as_the_encoder_does(
    encoder: BatchEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = Queries("images", [blank_png(8, 8), blank_png(9, 8)])
    (expected,) = encoder.encode([EncodeRequest(pictures, time.time() + 60)])
    path = str(tmp_path / "socket")
    process = EncoderProcess(path)

    async def main() -> None:
        with pytest.raises(ApiError, match="being loaded") as not_yet:
            await process.ready()
        assert not_yet.value.status == 503
        waiting = asyncio.create_task(process.encode(EncodeRequest(pictures, time.time() + 60)))
        await asyncio.sleep(0.1)
        server = asyncio.create_task(serve_encoder(encoder, path))
        assert np.array_equal(await waiting, expected)  # it waited for the process
        await process.ready()
        with pytest.raises(ApiError) as refused:
            await process.encode(EncodeRequest(Queries("images", [b"junk"]), time.time() + 60))
        assert (refused.value.code, refused.value.status) == ("not_an_image", 422)
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        with pytest.raises(ApiError, match="being loaded"):
            await process.encode(EncodeRequest(pictures, time.time() + 0.1))

    asyncio.run(main())
