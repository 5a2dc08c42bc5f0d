"""Pictures and features of several requests, encoded together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.client import Queries, wire
from hashnet.codes import pack_signs
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
from hashnet.server import (
    ApiError,
    BatchEncoder,
    ServeConfig,
    ServedRun,
)
from tests.support.serving_app import (
    BASE,
    blank_png,
    error_of,
    make_app,
)
from tests.support.small_run import make_run


def test_features_and_nan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", modality="features")
    batch_encoder = BatchEncoder(f"{run}/model", "cpu-eager", None, 1_000_000, 2)
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
    model.set_standardisation(torch.zeros(64), torch.full((64,), 1e-3))
    save_bundle(str(tmp_path), model)
    batch_encoder = BatchEncoder(str(tmp_path), "cpu-eager", None, 1_000_000, 2)
    row = np.linspace(0, 1, 64, dtype=np.float32)
    huge = np.where(np.arange(64) % 2, 3e38, -3e38).astype(np.float32)  # finite, and infinite over its std
    batches = [Queries("features", np.stack(rows)) for rows in ([row], [row, huge], [row * 2])]
    first, refused, last = batch_encoder.encode(batches, [time.time() + 60] * 3)
    assert isinstance(refused, ApiError)
    assert (refused.code, "row 1" in str(refused), refused.status) == ("not_finite", True, 422)
    assert np.array_equal(first, batch_encoder.encoder.encode(row))
    assert np.array_equal(last, batch_encoder.encoder.encode(row * 2))


def test_the_encoder_ends_work_that_nobody_waits_for(encoder: BatchEncoder, monkeypatch: Any) -> None:
    pictures = Queries("images", [blank_png(8, 8)] * 50)
    decoded: list[int] = []
    monkeypatch.setattr("hashnet.server.batch_encoder.check_pixels", lambda *_: decoded.append(1))
    late, in_time = encoder.encode([pictures, pictures], [0.0, time.time() + 60])
    assert isinstance(late, ApiError)
    assert (late.code, late.status) == ("timeout", 503)
    assert isinstance(in_time, np.ndarray)
    assert in_time.shape == (50, 8)
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
    monkeypatch.setattr("hashnet.server.batch_encoder.time", SimpleNamespace(time=lambda: clock.now))
    pictures = [blank_png(8 + i, 8) for i in range(20)]
    batches = [
        Queries("images", pictures),  # late after its first chunk of three
        Queries("images", [*pictures[:3], b"junk", *pictures]),
        Queries("images", pictures[:10]),
    ]
    late, wrong, codes = encoder.encode(batches, [105.0, 1000.0, 1000.0])
    assert isinstance(late, ApiError)
    assert late.code == "timeout"
    assert isinstance(wrong, ApiError)
    assert (wrong.code, "image 3 " in str(wrong)) == ("not_an_image", True)
    assert (codes == pack_signs(logits(pictures[:10]))).all()
    # 54 rows; 8 of the first batch, none of it later; rows 16-23 end with 4 of the second, row 3 of it bad;
    # then 4 of the last batch and 6
    assert sizes == [8, 4, 6]
