"""Searches of several requests, and following new versions of the index."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from hashnet import BinaryIndex
from hashnet.client import Queries
from hashnet.server import (
    ApiError,
    IndexService,
    LiveIndex,
    SearchOptions,
    SearchRequest,
    SearchResponse,
    Telemetry,
)
from hashnet.server.http_server import RequestMiddleware
from hashnet.store import CodeStore
from tests.support.serving_app import BASE, CODE, error_of
from tests.support.small_run import some_codes


def test_a_version_of_another_model_is_not_taken_over(own_run: str) -> None:
    first = BinaryIndex.load(f"{own_run}/index")
    live = LiveIndex(f"{own_run}/index", model_sha256=first.lineage["model_sha256"])
    BinaryIndex.from_arrays(some_codes(5), lineage={"model_sha256": "f" * 64}).save(f"{own_run}/index")
    assert not live.follow()
    assert live.version == first.version
    BinaryIndex.from_arrays(some_codes(5), lineage=first.lineage).save(f"{own_run}/index")
    assert live.follow()
    assert len(live.index) == 5


def test_the_first_search_sees_what_was_written_while_nobody_searched(own_run: str) -> None:
    service = IndexService(LiveIndex(f"{own_run}/index"), follow_s=3600, telemetry=Telemetry())
    codes = some_codes(1, seed=9)
    BinaryIndex.load(f"{own_run}/index").add(codes, [9000])

    async def main() -> None:
        requests = [SearchRequest(Queries("codes", codes), SearchOptions(k=1), max_hits=10) for _ in range(3)]
        found = await asyncio.gather(*map(service.search, requests))
        assert [one.hits.ids.tolist() for one in found] == [[[9000]]] * 3  # type: ignore[union-attr]

    asyncio.run(main())


def test_an_index_built_anew_is_followed(tmp_path: Path) -> None:

    folder = str(tmp_path / "index")
    first = BinaryIndex.from_arrays(some_codes(5))
    first.save(folder)
    first.add(some_codes(1), ids=[7])
    live = LiveIndex(folder)
    assert live.version == 2
    shutil.rmtree(folder)
    assert not live.follow()  # gone: the old one is still served
    BinaryIndex.from_arrays(some_codes(9)).save(folder)
    assert live.follow()
    assert (live.version, len(live.index)) == (1, 9)
    assert not live.follow()
    shutil.rmtree(folder)
    BinaryIndex.from_arrays(some_codes(4)).save(folder)  # once more version 1
    assert live.follow()
    assert (live.version, len(live.index)) == (1, 4)
    for n_bits, followed in ((128, False), (64, True)):  # one that does not fit, and what was meant
        shutil.rmtree(folder)
        BinaryIndex.from_arrays(some_codes(3, n_bits=n_bits)).save(folder)
        assert live.follow() == followed
    assert len(live.index) == 3


def test_a_version_with_labels_is_filtered_by_them(
    app: Callable[..., RequestMiddleware], own_run: str
) -> None:
    """Built without labels, searched, then built with them and followed; and the other way round."""

    store = CodeStore.open(f"{own_run}/codes")
    plain, labelled = (BinaryIndex.build(store, labels=keep) for keep in (False, True))
    plain.save(f"{own_run}/index")
    body = {"codes": [CODE], "labels": [3], "k": 5}
    with TestClient(app(folder=own_run), base_url=BASE) as http:
        assert error_of(http.post("/v1/search", json=body)) == (422, "no_labels")
        labelled.save(f"{own_run}/index")
        found = http.post("/v1/search", json=body | {"min_version": labelled.version}).json()
        assert len(found["results"][0]["ids"]) == 5
        assert error_of(http.post("/v1/search", json=body | {"labels": [10]})) == (422, "unknown_label")
        BinaryIndex.build(store, labels=False).save(f"{own_run}/index")
        again = http.post("/v1/search", json=body | {"min_version": labelled.version + 1})
        assert error_of(again) == (422, "no_labels")


def search_request(kind: str, values: np.ndarray, max_hits: int = 1_000_000, **options: Any) -> SearchRequest:
    """A search by codes or ids; ``options`` are those of SearchOptions and of SearchRequest."""
    further = {name: options.pop(name) for name in ("deadline", "with_items") if name in options}
    return SearchRequest(Queries(kind, values), SearchOptions(**options), max_hits, **further)


def test_a_batch_is_searched_in_one_version_and_errors_stay_apart(run: str, index: BinaryIndex) -> None:
    live = LiveIndex(f"{run}/index")
    codes = some_codes(6)
    requests = [
        search_request("codes", codes[:2], k=3),
        search_request("ids", np.array([99_999]), k=3),
        search_request("codes", codes[2:], k=3),
        search_request("codes", codes, radius=10),
        search_request("codes", codes, k=3, deadline=0.0),
    ]
    first, unknown, third, near, late = live.search(requests)
    assert isinstance(unknown, ApiError)
    assert isinstance(late, ApiError)
    assert (unknown.code, late.code) == ("unknown_id", "timeout")
    expected = [
        index.search(codes[:2], k=3),
        index.search(codes[2:], k=3),
        index.search_radius(codes, radius=10),
    ]
    for response, hits in zip((first, third, near), expected, strict=True):
        assert isinstance(response, SearchResponse)
        assert (response.version, response.hits) == (index.version, hits)


def test_each_radius_search_of_a_batch_keeps_its_own_limit(run: str, index: BinaryIndex) -> None:
    live = LiveIndex(f"{run}/index")
    codes = some_codes(40)
    requests = [  # every query has all 400 items within 64 bits
        search_request("codes", codes[:1], 399, radius=64),
        search_request("codes", codes, 40 * 400, radius=64),
        search_request("codes", codes[:5], 5 * 400 - 1, radius=64, with_items=True),
        search_request("codes", codes[:5], 5 * 400, radius=64, with_items=True),
    ]
    small, all_of_it, one_too_many, just_enough = live.search(requests)
    assert isinstance(all_of_it, SearchResponse)
    assert isinstance(just_enough, SearchResponse)
    assert all_of_it.hits == index.search_radius(codes, radius=64)
    assert just_enough.hits == index.search_radius(codes[:5], radius=64)
    assert just_enough.hit_codes is not None
    assert len(just_enough.hit_codes) == 5 * 400
    for error, limit in ((small, "399"), (one_too_many, "1,999")):
        assert isinstance(error, ApiError)
        assert (error.code, error.status) == ("too_many_hits", 413)
        assert f"more than {limit} items" in str(error)
    ids = index.ids()[:3]
    alone = live.search(  # 399 others each
        [search_request("ids", ids[i : i + 1], 399 - i, radius=64, exclude_self=True) for i in range(3)]
    )
    assert [isinstance(result, ApiError) for result in alone] == [False, True, True]
    assert isinstance(alone[0], SearchResponse)
    assert alone[0].hits == index.search_radius(index.codes(ids[:1]), radius=64, exclude_self=ids[:1])


def test_an_emptied_index_has_no_hits(tmp_path: Path) -> None:
    index = BinaryIndex.from_arrays(some_codes(3))
    index.save(str(tmp_path / "index"))
    index.remove([0, 1, 2])
    live = LiveIndex(str(tmp_path / "index"))
    nearest, within = live.search(
        [search_request("codes", some_codes(2), k=4), search_request("codes", some_codes(2), radius=4)]
    )
    assert (nearest.hits.ids == -1).all()  # type: ignore[union-attr]
    assert [len(hits) for hits in within.hits] == [0, 0]  # type: ignore[union-attr]
