"""Changes to the index through the API."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fastapi.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.server import (
    Access,
    AddItems,
    ApiError,
    IndexWriter,
    RemoveItems,
    Written,
)
from hashnet.server.middleware import RequestMiddleware
from tests.support.serving_app import (
    BASE,
    CODE,
    WRITE,
    error_of,
)
from tests.support.small_run import some_codes


def test_a_change_is_repeated_while_another_process_writes(
    own_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the disk and the commit somebody adds an item, as often as ``times`` says."""
    writer = IndexWriter(f"{own_run}/index", None)
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
    assert writer.write(AddItems(codes[:1], np.array([8000]))) == Written(3, size + 2)
    times = 1
    assert writer.write(RemoveItems(np.array([8000]))) == Written(5, size + 2)
    times = 1  # the id that the other one takes meanwhile
    with pytest.raises(ApiError) as taken:
        writer.write(AddItems(codes[:1], np.array([9002])))
    assert (taken.value.code, taken.value.status) == ("id_taken", 409)
    monkeypatch.setattr("hashnet.server.live_index.ATTEMPTS", 2)
    times = 3
    with pytest.raises(ApiError) as given_up:
        writer.write(AddItems(codes[:1], np.array([8001])))
    assert (given_up.value.code, given_up.value.status) == ("unavailable", 503)
    assert not BinaryIndex.load(f"{own_run}/index").contains([8001]).any()


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
