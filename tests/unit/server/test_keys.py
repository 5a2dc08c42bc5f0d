"""Items by their keys, and columns of hits, through server and client: as the index has them in process."""

from __future__ import annotations

import asyncio
import decimal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest

from hashnet import AsyncClient, BinaryIndex
from hashnet.client import Queries
from hashnet.errors import DataError, RequestRejected
from hashnet.server import (
    Access,
    AddItems,
    ApiError,
    IndexWriter,
    LiveIndex,
    RemoveItems,
    SearchOptions,
    SearchRequest,
    SearchResponse,
    ServeConfig,
    ServedRun,
    Written,
)
from tests.support.serving_app import BASE, WRITE, make_app
from tests.support.small_run import some_codes

N = 40
KEYS = [f"pictures/größe {i}&x=1.jpg" for i in range(N)]  # as file names and addresses are
YEARS = [1980 + i if i % 5 else None for i in range(N)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    columns = pa.table({"year": YEARS, "price": [decimal.Decimal(i) / 4 for i in range(N)]})
    index = BinaryIndex.from_arrays(some_codes(N), np.arange(N) * 3, columns=columns, keys=KEYS)
    index.save(str(tmp_path / "run/index"))
    return str(tmp_path / "run")


def with_client(folder: str, use: Callable[[AsyncClient], Awaitable[None]], batch: int = 7) -> None:
    """Runs ``use`` with a client of the application over the run in ``folder``."""
    app = make_app(ServedRun.open(ServeConfig(run=folder)), None, access=Access.of(write=WRITE))

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with AsyncClient(BASE, transport=transport, token=WRITE, batch=batch) as client:
            await use(client)

    asyncio.run(main())


def test_search_and_look_up_by_key(folder: str) -> None:
    local = BinaryIndex.load(f"{folder}/index")
    ids = local.ids_of(KEYS[5:30])
    assert ids.tolist() == list(range(15, 90, 3))

    async def use(client: AsyncClient) -> None:
        assert await client.search(keys=KEYS[5:30], k=4) == local.search(local.codes(ids), k=4)
        others = await client.search(keys=KEYS[5:30], k=4, exclude_self=True)
        assert others == local.search(local.codes(ids), k=4, exclude_self=ids)
        assert await client.search_radius(keys=KEYS[7], radius=12) == local.search_radius(
            local.codes([21]), 12
        )
        item = await client.item(key=KEYS[7])
        assert item == await client.item(21)
        assert item["columns"] == {"year": 1987, "price": "1.75", "key": KEYS[7]}
        for unknown in (client.search(keys=[KEYS[0], "none"]), client.item(key="none")):
            with pytest.raises(RequestRejected, match="holds no key 'none'") as caught:
                await unknown
            assert (caught.value.code, caught.value.status) == ("unknown_key", 404)
        for both in (client.item(21, key=KEYS[7]), client.search(ids=[21], keys=KEYS[7])):
            with pytest.raises(DataError, match="one of"):
                await both

    with_client(folder, use)


def test_columns_of_hits(folder: str) -> None:
    local, queries = BinaryIndex.load(f"{folder}/index"), some_codes(20, seed=1)

    async def use(client: AsyncClient) -> None:
        for k, where in ((3, None), (25, "year >= 2010")):  # fewer than 25 pass: unused slots hold nulls
            names = ["key", "year", "price"]
            found = await client.search(queries, k=k, where=where, columns=names)
            expected = local.search(queries, k=k, where=where, columns=names)
            assert found == expected
            assert found.columns is not None
            assert found.columns.to_pylist() == expected.columns.to_pylist()
        near = await client.search_radius(local.codes(local.ids()), radius=16, columns=["year"])
        own = local.search_radius(local.codes(local.ids()), 16, columns=["year"])
        assert [hits.columns.to_pylist() for hits in near] == [hits.columns.to_pylist() for hits in own]
        assert [hits.columns.to_pylist() for hits in near] == [
            [{"year": YEARS[id_ // 3]} for id_ in hits.ids.tolist()] for hits in near
        ]
        assert sum(map(len, near)) >= N  # each item finds itself
        with pytest.raises(RequestRejected, match=r"no column 'yaer'.*year"):
            await client.search(queries, columns=["yaer"])
        body = {"codes": [queries[0].tobytes().hex()], "k": 2, "columns": ["key", "price"]}
        (result,) = (
            await client._http.post("/v1/search", json=body, headers={"accept": "application/json"})
        ).json()["results"]
        assert result["columns"] == [
            {"key": KEYS[id_ // 3], "price": f"{id_ // 3 / 4:.2f}"} for id_ in result["ids"]
        ]

    with_client(folder, use)


def test_an_unknown_column_spoils_no_other_request(folder: str) -> None:
    live, codes = LiveIndex(f"{folder}/index"), some_codes(3)

    def request(*columns: str) -> SearchRequest:
        options = SearchOptions(k=2, columns=columns or None)
        return SearchRequest(Queries("codes", codes), options, max_hits=100)

    good, bad, other = live.search([request(), request("yaer"), request("year")])
    assert isinstance(bad, ApiError)
    assert "no column 'yaer'" in bad.message
    assert isinstance(good, SearchResponse)
    assert isinstance(other, SearchResponse)
    assert good.hits == other.hits


def test_an_index_without_keys_says_so(tmp_path: Path) -> None:
    BinaryIndex.from_arrays(some_codes(3)).save(str(tmp_path / "run/index"))

    async def use(client: AsyncClient) -> None:
        with pytest.raises(RequestRejected, match=r"have no keys; .* --key .* BinaryIndex\.from_arrays"):
            await client.search(keys="a")
        with pytest.raises(RequestRejected, match="not images: it has no model to encode them with"):
            await client.search(b"picture")
        with pytest.raises(RequestRejected, match="without columns and keys"):
            await client.search(some_codes(1), columns=["key"])
        with pytest.raises(RequestRejected, match="holds no key 'a'"):
            await client.remove(keys="a")
        await client.add(some_codes(1, seed=3), keys=["first"])  # it has keys from now on
        assert (await client.item(key="first"))["id"] == 3

    with_client(str(tmp_path / "run"), use)


def test_write_by_key(folder: str) -> None:
    new = some_codes(3, seed=9)

    async def use(client: AsyncClient) -> None:
        keys = [KEYS[2], "new", KEYS[4]]
        with pytest.raises(RequestRejected, match="in the index already") as caught:
            await client.add(new, keys=keys)
        assert caught.value.status == 409
        await client.add(new, keys=keys, columns={"year": [1, 2, 3]}, upsert=True)
        items = [await client.item(key=key) for key in keys]
        assert [item["id"] for item in items] == [6, 3 * N - 2, 12]  # a known key keeps its id
        assert [item["code"] for item in items] == [code.tobytes().hex() for code in new]
        assert [item["columns"]["year"] for item in items] == [1, 2, 3]
        with pytest.raises(RequestRejected, match="'nowhere'"):
            await client.remove(keys=["new", "nowhere"])  # nothing is removed
        assert (await client.item(key="new"))["id"] == 3 * N - 2
        await client.remove(keys=["new", KEYS[2]])
        with pytest.raises(RequestRejected, match="holds no item 6"):
            await client.item(6)
        with pytest.raises(DataError, match="ids= or keys="):
            await client.add(new)
        with pytest.raises(RequestRejected, match="'a' is given 2 times"):
            await client.add(new, keys=["a", "b", "a"], upsert=True)

    with_client(folder, use)
    after = BinaryIndex.load(f"{folder}/index")
    assert len(after) == N - 1
    assert after.ids_of([KEYS[4]]).tolist() == [12]


def test_a_key_belongs_to_one_item_of_all_slices(tmp_path: Path) -> None:
    codes, uris = some_codes(12), [str(tmp_path / f"slice-{number}") for number in range(2)]
    for number, uri in enumerate(uris):
        keys = [f"key-{i}" for i in range(number, 10, 2)]
        BinaryIndex.from_arrays(codes[number:10:2], np.arange(number, 10, 2), keys=keys).save(uri)
    writer = IndexWriter(*uris)

    def held() -> dict[str, int]:
        slices = [BinaryIndex.load(uri) for uri in uris]
        rows = [
            (part.columns(part.ids(), ["key"])["key"].to_pylist(), part.ids().tolist()) for part in slices
        ]
        return {key: id_ for keys, ids in rows for key, id_ in zip(keys, ids, strict=True)}

    def change(ids: list[int] | None, keys: list[str], upsert: bool = False) -> Written | ApiError:
        table, n = pa.table({"key": keys}), len(keys)
        given = None if ids is None else np.array(ids)
        (found,) = writer.commit([AddItems(codes[:n], given, upsert=upsert, columns=table)])
        assert isinstance(found, Written | ApiError)
        return found

    before = held()
    for ids, keys, upsert in (
        ([100], ["key-3"], False),  # of slice 1, to be added to slice 0
        ([100], ["key-3"], True),
        ([100, 101], ["z", "z"], False),
        (None, ["z", "z"], True),
    ):
        refused = change(ids, keys, upsert)
        assert isinstance(refused, ApiError), (ids, keys)
        assert held() == before
    assert isinstance(change([3], ["key-3"], upsert=True), Written)
    assert isinstance(change(None, ["key-2", "new", "key-7", "newer"], upsert=True), Written)
    assert held() == before | {"new": 10, "newer": 11}
    assert writer.commit([RemoveItems(keys=["key-2", "newer"])])[0].size == 10  # type: ignore[union-attr]
    assert held() == {key: id_ for key, id_ in (before | {"new": 10}).items() if key != "key-2"}
