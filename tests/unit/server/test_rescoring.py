"""Rescoring through the API: the hits of a local search and of slow loops, vectors of added items, errors."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hashnet import AsyncClient, BinaryIndex, Client, CodeStore, Encoder
from hashnet.cli.entry import main
from hashnet.client import Queries, wire
from hashnet.errors import DataError, RequestRejected
from hashnet.server import Access, BatchEncoder, ServeConfig, ServedRun
from hashnet.store import write_features, write_store
from tests.support.serving_app import BASE, WRITE, make_app
from tests.support.slow_search import FILTERS, KINDS, SlowItems, whole
from tests.support.small_run import make_model, make_run, some_codes, with_features
from tests.unit.server.test_standalone import Served

K, WIDTH = 7, 10
OPTIONS: list[dict[str, Any]] = [
    {},
    {"oversample": 1},
    {"oversample": 2.5, "metric": "inner_product"},
    {"oversample": 60},  # more than there are items
]


@pytest.fixture(scope="module", params=["image", "features"])
def rescored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_features(tmp_path_factory.mktemp("rescored") / "run", request.param)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_features(tmp_path_factory.mktemp("rescored") / "run", "image")


def session(run: str, use: Callable[[AsyncClient, Any], Any], **options: Any) -> Any:
    """What ``use`` returns, given a client of the application over a run and its HTTP side."""
    served = ServedRun.open(ServeConfig(run=run, **options))
    encoder = None if served.model is None else BatchEncoder(served.model, "cpu", 1_000_000, 2)
    asgi_app = make_app(served, encoder, access=Access.of(write=WRITE))

    async def run_it() -> Any:
        transport = httpx.ASGITransport(asgi_app)
        async with AsyncClient(BASE, token=WRITE, transport=transport, batch=50) as client:
            return await use(client, client._http)

    return asyncio.run(run_it())


def queries_of(run: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """(60 queries as a client gives them, their logits, their vectors)."""
    from hashnet.data import Manifest
    from hashnet.data.columns import feature_matrix
    from hashnet.data.fetch import fetch_images

    rows = Manifest.open(f"{run}/manifest.parquet").read("query").slice(0, 60)
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4)
    given = fetch_images(rows) if encoder.modality == "image" else feature_matrix(rows)
    return given, encoder.logits(given), encoder.features(given)


@pytest.mark.parametrize("options", OPTIONS, ids=json.dumps)
def test_hits_are_those_of_the_local_index(rescored: str, options: dict[str, Any]) -> None:
    given, logits, vectors = queries_of(rescored)
    index, codes = BinaryIndex.load(f"{rescored}/index"), np.packbits(logits >= 0, axis=1)
    ids = index.ids()[:60]
    how: dict[str, Any] = {"rescore": "features", **options}

    async def use(client: AsyncClient, http: Any) -> None:
        expected = index.search(codes, K, features=vectors, **how)
        plain = index.search(codes, K)
        assert options.get("oversample") == 1 or (expected.ids != plain.ids).any()
        assert await client.search(given, K, **how) == expected
        assert await client.search(codes, K, features=vectors, **how) == expected
        assert await client.search(given, K, ranking="asymmetric", **how) == index.search(
            logits=logits, k=K, features=vectors, **how
        )
        of_items = {"features": index.features(ids)}
        assert await client.search(ids=ids, k=K, **how) == index.search(
            index.codes(ids), K, **of_items, **how
        )
        assert await client.search(ids=ids, k=K, exclude_self=True, labels=[3], **how) == index.search(
            index.codes(ids), K, exclude_self=ids, where={"labels": [3]}, **of_items, **how
        )
        body = {"codes": [codes[0].tobytes().hex()], "vectors": [vectors[0].tolist()], "k": K, **how}
        (found,) = (await http.post("/v1/search", json=body, headers={"accept": "*/*"})).json()["results"]
        assert found["ids"] == expected.ids[0].tolist()
        assert np.array_equal(np.float32(found["scores"]), expected.scores[0])  # type: ignore[index]
        kind, value = ("images", base64.b64encode(given[0]).decode()) if isinstance(given, list) else (
            "features", given[0].tolist())  # fmt: skip
        body = {kind: [value], "k": K, **how}
        (again,) = (await http.post("/v1/search", json=body, headers={"accept": "*/*"})).json()["results"]
        assert again == found

    session(rescored, use)


@pytest.fixture(scope="module", params=KINDS)
def random_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, SlowItems]:
    """A run of random codes, vectors and years, some of them added or removed later; and its items."""
    run, rng = str(tmp_path_factory.mktemp("random") / "run"), np.random.default_rng(3)
    make_model(f"{run}/model", WIDTH)
    lineage = Encoder.load(f"{run}/model").lineage
    ids, codes = rng.permutation(900)[:220], some_codes(220)
    vectors, years = whole(220, WIDTH, 4), rng.integers(2015, 2025, 220)
    old, new = slice(0, 150), slice(150, 220)
    store = write_store(f"{run}/codes", codes[old], ids=ids[old], lineage=lineage)
    index = BinaryIndex.from_arrays(
        codes[old], ids[old], request.param, columns={"year": years[old]}, lineage=store.lineage,
        **KINDS[request.param],
    )  # fmt: skip
    ordered = vectors[old][np.argsort(ids[old])]
    index.attach_features(write_features(f"{run}/features", ordered, store, lineage=lineage))
    index.save(f"{run}/index")
    index.add(codes[new], ids[new], features=vectors[new], columns={"year": years[new]})
    slow = SlowItems(ids, codes, vectors, years)
    index.remove(ids[40:60])
    slow.remove(ids[40:60])
    return run, slow


@pytest.mark.parametrize("ranking", ["hamming", "asymmetric"])
@pytest.mark.parametrize("rescore", [None, "cosine", "inner_product"])
@pytest.mark.parametrize("name", FILTERS)
def test_every_combination_over_http_against_loops(
    random_run: tuple[str, SlowItems], ranking: str, rescore: str | None, name: str
) -> None:
    run, slow = random_run
    asymmetric, (where, passing) = ranking == "asymmetric", FILTERS[name]
    if BinaryIndex.load(f"{run}/index").kind == "hnsw" and not asymmetric and name in ("all", "many"):
        pytest.skip("its candidates are approximate")
    queries = whole(3, WIDTH, 12)
    logits = Encoder.load(f"{run}/model").logits(queries)
    codes = np.packbits(logits >= 0, axis=1)

    async def use(client: AsyncClient, http: Any) -> None:
        for k, oversample in itertools.product((1, 7), (1, 2.5)):
            how: dict[str, Any] = {"where": where} if where else {}
            if rescore:
                how |= {"rescore": "features", "metric": rescore, "oversample": oversample}
            in_arrow = await client.search(queries, k, ranking=ranking, **how)
            body = {"features": queries.tolist(), "k": k, "ranking": ranking, **how}
            response = await http.post("/v1/search", json=body, headers={"accept": "*/*"})
            assert response.status_code == 200, response.text
            in_json = response.json()["results"]
            if not asymmetric:
                own = {"features": queries} if rescore else {}
                assert await client.search(codes, k, **how, **own) == in_arrow
            for row in range(3):
                expected = slow.search(
                    logits[row], queries[row], k, asymmetric=asymmetric, passes=passing(slow),
                    rescore=rescore, oversample=oversample,
                )  # fmt: skip
                assert in_arrow.ids[row][in_arrow.ids[row] >= 0].tolist() == expected
                assert in_json[row]["ids"] == expected
                distances = [slow.distance(codes[row], i) for i in expected]
                assert in_arrow.distances[row][: len(expected)].tolist() == distances
                if rescore:
                    scores = [slow.similarity(queries[row], i, rescore) for i in expected]
                    assert np.allclose(in_json[row]["scores"], scores, atol=1e-6)

    session(run, use)


def test_requests_that_arrive_together_get_their_own_hits(pictures: str) -> None:
    index, codes = BinaryIndex.load(f"{pictures}/index"), some_codes(30)
    vectors = np.random.default_rng(0).normal(size=(30, index.n_features)).astype(np.float32)  # type: ignore[arg-type]

    async def use(client: AsyncClient, http: Any) -> None:
        searches = [
            client.search(codes[i], K, rescore="features", oversample=1 + i % 3, features=vectors[i])
            for i in range(30)
        ]
        bad = client.search(codes[0], K, rescore="features", features=vectors[0, :-1])
        *found, refused = await asyncio.gather(*searches, bad, return_exceptions=True)
        assert isinstance(refused, RequestRejected)
        assert refused.code == "wrong_width"
        for i, hits in enumerate(found):
            one = slice(i, i + 1)
            assert hits == index.search(
                codes[one], K, rescore="features", oversample=1 + i % 3, features=vectors[one]
            )

    session(pictures, use)


def test_items_are_added_with_their_vectors(tmp_path: Path) -> None:
    run = with_features(tmp_path / "run", "image")
    given, logits, vectors = queries_of(run)
    codes = np.packbits(logits >= 0, axis=1)

    async def use(client: AsyncClient, http: Any) -> None:
        await client.add(given[:3], ids=[9000, 9001, 9002])
        await client.add(codes[3:5], ids=[9003, 9004], features=vectors[3:5])
        body = {"item_ids": [9005], "images": [base64.b64encode(given[5]).decode()]}
        assert (await http.post("/v1/items", json=body)).status_code == 200
        with pytest.raises(RequestRejected, match="every item of this index has a vector"):
            await client.add(codes[6:7], ids=[9006])
        hits = await client.search(given[:6], 1, rescore="features", oversample=100)
        assert hits.ids[:, 0].tolist() == [9000, 9001, 9002, 9003, 9004, 9005]

    session(run, use)
    stored = BinaryIndex.load(f"{run}/index").features(np.arange(9000, 9006))
    assert np.array_equal(stored, vectors[:6].astype(np.float16).astype(np.float32))


def test_what_is_refused(pictures: str, run: str, tmp_path: Path) -> None:
    given, logits, vectors = queries_of(pictures)
    code, vector = np.packbits(logits[:1] >= 0, axis=1), vectors[:1]

    async def refused(client: AsyncClient, queries: Any, **options: Any) -> str:
        with pytest.raises(RequestRejected) as caught:
            await client.search(queries, rescore="features", **options)
        return caught.value.code

    async def with_vectors(client: AsyncClient, http: Any) -> None:
        assert (await client.info())["n_vector"] == vectors.shape[1]
        assert await refused(client, code) == "vectors_needed"
        assert await refused(client, given[0], oversample=0.5) == "oversample_out_of_range"
        assert await refused(client, given[0], oversample=float("nan")) == "not_finite"
        assert await refused(client, given[0], oversample=1e9) == "too_many_hits"
        assert await refused(client, given[0], metric="angle") == "invalid_request"
        assert await refused(client, code, features=vector[:, 1:]) == "wrong_width"
        with pytest.raises(DataError, match="vectors of codes"):
            await client.search(given[0], rescore="features", features=vector)
        for options in ({"oversample": 2}, {"metric": "cosine"}, {"features": vector}):
            with pytest.raises(RequestRejected, match="only with rescore=features"):
                await client.search(code, **options)
        in_json = {"codes": [code.tobytes().hex()], "vectors": [vector[0].tolist()]}
        for bad, expected in (
            ({"rescore": "features", "oversample": 0}, "oversample_out_of_range"),
            ({"rescore": "features", "radius": 2}, "invalid_request"),
            ({"rescore": "vectors"}, "invalid_request"),
            ({"rescore": "features", "vectors": [[1.0], [1.0, 2.0]]}, "wrong_width"),
            ({"rescore": "features", "vectors": vectors[:2].tolist()}, "invalid_request"),
        ):
            response = await http.post("/v1/search", json=in_json | bad)
            assert response.json()["error"]["code"] == expected
        table = wire.read_table(wire.write_queries(Queries("codes", code, vector)))
        odd = wire.write_table(table.set_column(1, "vector", [["text"]]))
        response = await http.post(
            "/v1/search?rescore=features", content=odd, headers={"content-type": wire.ARROW}
        )
        assert response.json()["error"]["code"] == "bad_arrow"

    async def without(client: AsyncClient, http: Any) -> None:
        assert (await client.info())["n_vector"] is None
        for queries, options in ((given[0], {}), (code, {"features": vector})):
            assert await refused(client, queries, **options) == "no_vectors"
        with pytest.raises(RequestRejected, match="built without features"):
            await client.add(code, ids=[9000], features=vector)

    async def from_elsewhere(client: AsyncClient, http: Any) -> None:
        assert await refused(client, given[0]) == "lineage_mismatch"
        hits = await client.search(code, 1, rescore="features", features=np.ones((1, 3)))
        assert hits.ids.shape == (1, 1)
        with pytest.raises(RequestRejected, match="every item of this index has a vector"):
            await client.add(given[:1], ids=[9000])
        await client.add(given[:1], ids=[9000], features=np.ones((1, 3)))

    session(pictures, with_vectors)
    session(run, without)
    other = make_run(tmp_path / "other")
    store = CodeStore.open(f"{other}/codes")
    BinaryIndex.from_arrays(
        store.codes(), store.ids(), features=np.ones((400, 3)), lineage=store.lineage
    ).save(f"{other}/index")
    session(other, from_elsewhere)


def test_the_command_line(pictures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, logits, vectors = queries_of(pictures)
    (tmp_path / "q.png").write_bytes(given[0])
    index = BinaryIndex.load(f"{pictures}/index")
    words = ["query", str(tmp_path / "q.png"), "--run", pictures, "-k", "5", "--rescore", "--oversample", "9"]
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    codes = np.packbits(logits[:1] >= 0, axis=1)
    hits = index.search(codes, 5, rescore="features", oversample=9, features=vectors[:1])
    assert [hit["id"] for hit in found["hits"]] == hits.ids[0].tolist()
    assert [hit["score"] for hit in found["hits"]] == [round(float(x), 6) for x in hits.scores[0]]  # type: ignore[index]
    assert main(["query", "--id", "1", "--run", pictures, "--rescore"]) == 0
    assert "10 hits" in capsys.readouterr().out
    for wrong, sentence in (
        ([*words[:-1], "0.5"], "--oversample must be at least 1, got 0.5"),
        ([*words[:4], "--radius", "2", "--rescore"], "--rescore is for the -k nearest"),
        ([*words[:4], "--oversample", "2"], "--oversample is for --rescore"),
    ):
        assert main(wrong) == 2
        assert sentence in capsys.readouterr().err


def test_a_running_server_rescores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vectors cross the socket of the encoder process; the command line reaches them, too."""
    run = with_features(tmp_path / "run", "image")
    given, logits, vectors = queries_of(run)
    codes, how = np.packbits(logits >= 0, axis=1), {"rescore": "features", "oversample": 8}
    expected = BinaryIndex.load(f"{run}/index").search(codes, 5, features=vectors, **how)
    (tmp_path / "q.png").write_bytes(given[0])
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)
    served = Served(run)
    try:
        with Client(served.url, token=WRITE, retry_s=60) as client:
            assert client.search(given, 5, **how) == expected
            words = ["query", str(tmp_path / "q.png"), "--url", served.url, "-k", "5", "--json"]
            assert main([*words, "--rescore", "--oversample", "8"]) == 0
            (found,) = json.loads(capsys.readouterr().out)["results"]
            assert [hit["id"] for hit in found["hits"]] == expected.ids[0].tolist()
            client.add(given[:2], ids=[9000, 9001])
            hits = client.search(given[:2], 1, rescore="features", oversample=50)
            assert hits.ids.tolist() == [[9000], [9001]]
    finally:
        served.end()


def test_long_codes_are_served(tmp_path: Path) -> None:
    codes = some_codes(50, n_bits=4096)
    BinaryIndex.from_arrays(codes).save(str(tmp_path / "index"))
    index = BinaryIndex.load(str(tmp_path / "index"))

    async def use(client: AsyncClient, http: Any) -> None:
        assert await client.search(codes[:5], 3) == index.search(codes[:5], 3)
        body = {"codes": [codes[7].tobytes().hex()], "k": 1}
        found = await http.post("/v1/search", json=body, headers={"accept": "*/*"})
        assert found.json()["results"][0]["ids"] == [7]

    session(str(tmp_path), use)
