"""A server over slices of an index: the same hits, writes by owner, a slice that is killed."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cluster.serve import Server
from cluster.serve.slices import SlicedIndex, _merged, _without, build_slice, slice_folders
from hashnet import BinaryIndex, Client, CodeStore
from hashnet.client import Queries
from hashnet.errors import RequestRejected
from hashnet.results import SearchResult
from hashnet.server import (
    ApiError,
    IndexService,
    LiveIndex,
    SearchOptions,
    SearchRequest,
    SearchResponse,
    ServeConfig,
    Telemetry,
)
from hashnet.store import write_features, write_store
from tests.support.local_cluster import free_ports
from tests.support.slow_search import FILTERS, SlowItems, whole
from tests.support.small_run import some_codes

WRITE = "w" * 24
pytestmark = pytest.mark.timeout(900)  # five processes start


def test_slices_of_a_store_are_disjoint_and_complete(own_run: str) -> None:
    store, whole = CodeStore.open(f"{own_run}/codes"), BinaryIndex.load(f"{own_run}/index")
    folders = slice_folders(f"{own_run}/index", 3)
    for number, folder in enumerate(folders):
        build_slice(store, folder, number, 3)
    slices = [BinaryIndex.load(folder) for folder in folders]
    assert sorted(np.concatenate([part.ids() for part in slices]).tolist()) == whole.ids().tolist()
    for number, part in enumerate(slices):
        assert (part.ids() % 3 == number).all()
        assert (part.codes(part.ids()) == whole.codes(part.ids())).all()
        assert part.labels(part.ids()) == whole.labels(part.ids())
    slices[0].remove(slices[0].ids()[:1])
    build_slice(store, folders[0], 0, 3)  # what was changed since stays
    assert BinaryIndex.load(folders[0]).version == slices[0].version == 2


def test_a_store_that_has_grown_joins_what_was_written_to_a_slice(tmp_path: Path) -> None:
    codes, folder = some_codes(40), str(tmp_path / "slice")
    build_slice(write_store(str(tmp_path / "codes"), codes[:30]), folder, 1, 2)
    before = BinaryIndex.load(folder)
    before.add(codes[:1], [101])
    before.remove([3])
    grown = write_store(str(tmp_path / "grown"), codes)
    build_slice(grown, folder, 1, 2)
    after = BinaryIndex.load(folder)
    assert after.ids().tolist() == [i for i in range(1, 40, 2) if i != 3] + [101]
    assert after.version > before.version
    build_slice(grown, folder, 1, 2)
    assert BinaryIndex.load(folder).version == after.version


def test_merging_is_the_search_of_everything() -> None:
    codes, queries = some_codes(500, n_bits=16), some_codes(20, n_bits=16, seed=1)
    whole = BinaryIndex.from_arrays(codes)
    slices = [BinaryIndex.from_arrays(codes[i::3], ids=np.arange(i, 500, 3)) for i in range(3)]
    logits = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)

    def merge(search: Any, k: int | None) -> Any:
        return _merged([SearchResponse(1, search(part), codes) for part in slices], k)

    assert merge(lambda part: part.search(queries, k=7), 7) == whole.search(queries, k=7)
    assert merge(lambda part: part.search_radius(queries, 3), None) == whole.search_radius(queries, 3)
    assert merge(lambda part: part.search(logits=logits, k=7), 7) == whole.search(logits=logits, k=7)
    own = np.arange(20)
    hits = merge(lambda part: part.search(codes[:20], k=8), 8)
    assert _without(hits, own, 7) == whole.search(codes[:20], k=7, exclude_self=own)
    near = merge(lambda part: part.search_radius(codes[:20], 3), None)
    assert _without(near, own, None) == whole.search_radius(codes[:20], 3, exclude_self=own)
    few = _without(SearchResult(np.array([[5, 3, -1, -1]]), np.array([[0, 1, -1, -1]])), np.array([5]), 3)
    assert isinstance(few, SearchResult)
    assert few.ids.tolist() == [[3, -1, -1]]


class LocalSlice:
    """A slice in this process, called as a Serve handle is."""

    def __init__(self, folder: str, engine: str) -> None:
        service = IndexService(LiveIndex(folder, engine), 1.0, Telemetry())

        class call:  # noqa: N801 - as a Serve handle has it
            @staticmethod
            async def remote(method: str, fresh: bool, *arguments: Any) -> Any:
                return await getattr(service, method)(*arguments)

        self.call = call


@pytest.mark.parametrize("engine", ["kernel", "faiss"])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_any_number_of_slices_is_one_index(own_run: str, n: int, engine: str) -> None:
    store, whole = CodeStore.open(f"{own_run}/codes"), BinaryIndex.load(f"{own_run}/index", engine=engine)
    folders = slice_folders(f"{own_run}/index", n)
    for number, folder in enumerate(folders):
        build_slice(store, folder, number, n)
    sliced, ids = SlicedIndex([LocalSlice(folder, engine) for folder in folders], 60.0), whole.ids()[:20]
    codes = Queries("codes", some_codes(50))

    async def search(queries: Queries, **options: Any) -> Any:
        request = SearchRequest(queries, SearchOptions(**options), max_hits=10**6)
        return (await sliced.search(request)).hits

    async def main() -> None:
        assert await search(codes, k=9) == whole.search(codes.values, k=9)
        assert await search(codes, k=500) == whole.search(codes.values, k=500)
        assert await search(codes, radius=16) == whole.search_radius(codes.values, 16)
        filtered = whole.search(codes.values, k=9, where={"labels": [3, 5]})
        assert await search(codes, k=9, labels=(3, 5)) == filtered
        own = await search(Queries("ids", ids), k=4, exclude_self=True)
        assert own == whole.search(whole.codes(ids), k=4, exclude_self=ids)
        assert (await sliced.info()).size == len(whole)
        found = await sliced.lookup(np.array([*ids, 99_999]), with_labels=True)
        assert found.held.tolist() == [True] * 20 + [False]
        assert found.labels == whole.labels(ids)

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_keys_and_columns_come_from_the_slice_that_owns_the_item(tmp_path: Path, n: int) -> None:
    codes, ids = some_codes(60), np.random.default_rng(2).permutation(500)[:60]
    columns = {"key": [f"key {i}" for i in ids], "year": [None if i % 3 else int(i) for i in ids]}
    store = write_store(str(tmp_path / "codes"), codes, ids, columns=pa.table(columns))
    folders = slice_folders(str(tmp_path / "index"), n)
    for number, folder in enumerate(folders):
        build_slice(store, folder, number, n)
    sliced, whole = (
        SlicedIndex([LocalSlice(folder, "kernel") for folder in folders], 60.0),
        BinaryIndex.build(store),
    )

    async def main() -> None:
        assert (await sliced.find_keys(columns["key"][::-1])).tolist() == ids[::-1].tolist()
        assert (await sliced.find_keys(["key 3", "none", columns["key"][0]]))[1:].tolist() == [-1, ids[0]]
        options = SearchOptions(k=7, columns=("year", "key"))
        found = await sliced.search(SearchRequest(Queries("codes", codes[:9]), options, max_hits=10**6))
        expected = whole.search(codes[:9], k=7, columns=["year", "key"])
        assert found.hits == expected
        assert found.columns is not None
        assert found.columns.to_pylist() == expected.columns.to_pylist()

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("oversample", [None, 1, 2.5])
def test_slices_are_rescored_as_one_index(own_run: str, n: int, oversample: float | None) -> None:
    store, rng = CodeStore.open(f"{own_run}/codes"), np.random.default_rng(0)
    features = write_features(f"{own_run}/features", rng.normal(size=(len(store), 12)), store)
    whole, folders = BinaryIndex.build(store), slice_folders(f"{own_run}/index", n)
    whole.attach_features(features)
    for number, folder in enumerate(folders):
        build_slice(store, folder, number, n, features)
    sliced, ids = SlicedIndex([LocalSlice(folder, "kernel") for folder in folders], 60.0), whole.ids()[:20]
    logits, vectors = rng.normal(size=(20, 64)).astype(np.float32), rng.normal(size=(20, 12))
    given = Queries("codes", np.packbits(logits >= 0, axis=1), vectors.astype(np.float32))
    how: dict[str, Any] = {"rescore": "features", "oversample": oversample}

    async def search(queries: Queries, logits: Any = None, **options: Any) -> Any:
        options = {"k": 5, "rescore": True, "oversample": oversample, **options}
        request = SearchRequest(queries, SearchOptions(**options), max_hits=10**6, logits=logits)
        return (await sliced.search(request)).hits

    async def main() -> None:
        assert await search(given) == whole.search(given.values, 5, features=vectors, **how)
        by_score = await search(given, logits, asymmetric=True, metric="inner_product", labels=(3, 5))
        where = {"labels": [3, 5]}
        assert by_score == whole.search(
            logits=logits, k=5, features=vectors, metric="inner_product", where=where, **how
        )
        own = await search(Queries("ids", ids), exclude_self=True)
        codes = whole.codes(ids)
        assert own == whole.search(codes, 5, exclude_self=ids, features=whole.features(ids), **how)
        few = await search(given, k=300, labels=(3,))  # fewer than k have it
        assert few == whole.search(
            given.values,
            300,
            features=vectors,
            where={"labels": [3]},
            rescore="features",
            oversample=oversample,
        )
        with pytest.raises(ApiError, match="vectors of 12 values, got 3"):
            await search(Queries("codes", given.values, np.ones((20, 3), np.float32)))
        with pytest.raises(ApiError, match="not of a model"):
            await sliced.check_vectors("a" * 64)
        with pytest.raises(ApiError, match="score every item"):
            await search(given, logits, asymmetric=True, rescore=False, oversample=2)

    asyncio.run(main())


@pytest.fixture(scope="module", params=[1, 3])
def random_slices(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SlicedIndex, SlowItems]:
    """Slices of random codes, vectors and years, some added or removed later; and their items."""
    folder, n, rng = str(tmp_path_factory.mktemp("slices")), request.param, np.random.default_rng(5)
    ids, codes, vectors = rng.permutation(900)[:220], some_codes(220), whole(220, 10, 6)
    years = rng.integers(2015, 2025, 220)
    old = slice(0, 150)
    store = write_store(f"{folder}/codes", codes[old], ids[old], columns=pa.table({"year": years[old]}))
    features = write_features(f"{folder}/features", vectors[old][np.argsort(ids[old])], store)
    folders = slice_folders(f"{folder}/index", n)
    for number, path in enumerate(folders):
        build_slice(store, path, number, n, features)
        index, own = BinaryIndex.load(path), ids % n == number
        new, gone = own & (np.arange(220) >= 150), own & (np.arange(220) // 20 == 2)
        index.add(codes[new], ids[new], features=vectors[new], columns={"year": years[new]})
        index.remove(ids[gone])
    slow = SlowItems(ids, codes, vectors, years)
    slow.remove(ids[40:60])
    return SlicedIndex([LocalSlice(path, "kernel") for path in folders], 60.0), slow


@pytest.mark.parametrize("ranking", ["hamming", "asymmetric"])
@pytest.mark.parametrize("rescore", [None, "cosine", "inner_product"])
@pytest.mark.parametrize("name", FILTERS)
def test_every_combination_over_slices_against_loops(
    random_slices: tuple[SlicedIndex, SlowItems], ranking: str, rescore: str | None, name: str
) -> None:
    sliced, slow = random_slices
    asymmetric, (where, passing) = ranking == "asymmetric", FILTERS[name]
    logits, vectors = whole(3, 64, 7) + np.float32(1 / 16), whole(3, 10, 8)
    queries = Queries("codes", np.packbits(logits >= 0, axis=1), vectors if rescore else None)
    for k, oversample in itertools.product((1, 7), (1, 2.5)):
        options = SearchOptions(
            k=k, where=where, asymmetric=asymmetric, rescore=rescore is not None,
            oversample=oversample if rescore else None, metric=rescore or "cosine",
        )  # fmt: skip
        request = SearchRequest(queries, options, 10**6, logits if asymmetric else None)
        hits: Any = asyncio.run(sliced.search(request)).hits
        for row in range(3):
            expected = slow.search(
                logits[row], vectors[row], k, asymmetric=asymmetric, passes=passing(slow), rescore=rescore,
                oversample=oversample,
            )  # fmt: skip
            assert hits.ids[row][hits.ids[row] >= 0].tolist() == expected


@pytest.fixture(scope="module")
def second_ray(own_ray: Any) -> Any:
    """A Ray in a process that has used Serve on another one: to Serve they look alike, jobs 01 of both."""
    from ray import serve

    from cluster.runtime import connection

    connection.connect(num_cpus=1, object_store_memory=100_000_000)
    serve.start(proxy_location="Disabled")
    assert serve.status().applications == {}
    own_ray.shutdown()
    connection.connect(num_cpus=3, object_store_memory=300_000_000)
    return own_ray


@pytest.fixture(scope="module")
def server(second_ray: Any, run: str) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HASHNET_TOKEN", raising=False)
        patch.setenv("HASHNET_WRITE_TOKEN", WRITE)
        config = ServeConfig(run=run, port=free_ports(1)[0], slices=3, model="off", follow_s=0.2)
        vectors = np.random.default_rng(1).normal(size=(400, 12))
        write_features(f"{run}/features", vectors, CodeStore.open(f"{run}/codes"))
        with Server(config) as started:
            yield started


def with_vectors(run: str) -> BinaryIndex:
    """The whole index with the vectors that the slices have."""
    index = BinaryIndex.build(f"{run}/codes")
    index.attach_features(f"{run}/features")
    return index


def test_a_client_sees_no_difference(server: Server, run: str) -> None:
    index, codes = BinaryIndex.load(f"{run}/index"), some_codes(700)
    with Client(server.config.url, token=WRITE, retry_s=60) as client:
        assert client.info()["size"] == len(index)
        assert client.search(codes, k=10) == index.search(codes, k=10)
        assert client.search(codes[:20], k=500) == index.search(codes[:20], k=500)
        assert client.search_radius(codes[:50], radius=16) == index.search_radius(codes[:50], radius=16)
        assert client.search(codes[:5], k=3, labels=[3, 5]) == index.search(
            codes[:5], k=3, where={"labels": [3, 5]}
        )
        ids = index.ids()[:30]
        expected = index.search(index.codes(ids), k=4, exclude_self=ids)
        assert client.search(ids=ids, k=4, exclude_self=True) == expected
        queries, vectors = codes[:60], np.random.default_rng(0).normal(size=(60, 12)).astype(np.float32)
        assert client.search(queries, k=4, rescore="features", features=vectors) == with_vectors(run).search(
            queries, k=4, rescore="features", features=vectors
        )
        assert client.item(int(ids[3]))["labels"] == (index.labels(ids[3:4]) or [[]])[0]
        with pytest.raises(RequestRejected, match="no id 99999"):
            client.search(ids=[99_999])
        new = np.arange(9000, 9007)
        client.add(codes[:7], ids=new, labels=[[1]] * 7, features=np.ones((7, 12)))
        assert (client.search(codes[:7], k=1).ids[:, 0] == new).all()
        assert client.item(9005)["labels"] == [1]
        with pytest.raises(RequestRejected, match="already"):
            client.add(codes[:3], ids=[9100, 9101, 9006], features=np.ones((3, 12)))
        assert client.info()["size"] == len(index) + 7  # nothing of it was added
        client.remove(new)
        assert client.search(codes[:7], k=5) == index.search(codes[:7], k=5)
    kill_and_search(server, index, codes)


def kill_and_search(server: Server, index: BinaryIndex, codes: np.ndarray) -> None:
    """While a slice is gone requests wait or are refused; none is answered from the others alone."""
    import ray

    expected, stop = index.search(codes[:40], k=5), threading.Event()
    wrong: list[str] = []

    def search() -> None:
        with Client(server.config.url, retry_s=100) as client:
            while not stop.is_set():
                try:
                    assert client.search(codes[:40], k=5) == expected
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=search, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    named = ray.util.list_named_actors(all_namespaces=True)
    victim = next(actor for actor in named if "#Slice1#" in actor["name"])
    ray.kill(ray.get_actor(victim["name"], namespace=victim["namespace"]), no_restart=True)
    with Client(server.config.url, retry_s=100) as client:
        for _ in range(3):
            assert client.search(codes[:40], k=5) == expected
    stop.set()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_a_slice_that_does_not_come_back_is_named() -> None:
    class Gone:
        class call:  # noqa: N801 - as a Serve handle has it
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                from ray.exceptions import RayActorError

                raise RayActorError

    class Here(Gone):
        class call:  # noqa: N801
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                return None

    from hashnet.server import ApiError

    index = SlicedIndex([Here(), Gone()], timeout_s=1.0)
    with pytest.raises(ApiError, match="slice 1 of 2") as caught:
        asyncio.run(index.info())
    assert caught.value.status == 503
