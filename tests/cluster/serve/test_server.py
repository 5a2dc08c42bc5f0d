"""A real server on Ray Serve, on loopback: results, raw HTTP, failover, live updates, the request log."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.serve import Server
from hashnet import BinaryIndex, Client, Encoder
from hashnet.cli.entry import main
from hashnet.errors import ClusterError, ConfigError, LineageMismatch, RequestRejected
from hashnet.server import ServeConfig
from tests.support.local_cluster import free_ports
from tests.support.small_run import make_model, some_codes
from tests.support.wait import wait_until

WRITE = "w" * 24


@pytest.fixture(scope="module")
def config(run: str) -> ServeConfig:
    return ServeConfig(run=run, port=free_ports(1)[0], replicas=2, follow_s=0.2)


@pytest.fixture(scope="module")
def server(ray_served: Any, config: ServeConfig) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HASHNET_TOKEN", raising=False)
        patch.setenv("HASHNET_WRITE_TOKEN", WRITE)
        with Server(config) as started:
            yield started


@pytest.fixture(scope="module")
def ray_served(own_ray: Any) -> Any:
    """A Ray of this module's own."""
    from cluster.runtime import connection

    connection.connect(num_cpus=2, object_store_memory=300_000_000)
    return own_ray


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.config.url, token=WRITE, retry_s=60) as one:
        yield one


@pytest.fixture
def index(run: str) -> BinaryIndex:
    """The newest version: tests of this file write."""
    return BinaryIndex.load(f"{run}/index")


def test_nothing_listens_beyond_loopback(server: Server, listeners: Any) -> None:
    found = listeners([os.getpid()])
    assert server.config.port in {port for port, _ in found}
    assert {address for _, address in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_served_results_equal_local_ones(client: Client, index: BinaryIndex, run: str) -> None:
    codes = some_codes(3000)
    assert client.search(codes, k=10) == index.search(codes, k=10)
    assert client.search(codes[:40], k=500) == index.search(codes[:40], k=500)
    assert client.search_radius(codes[:300], radius=16) == index.search_radius(codes[:300], radius=16)
    assert client.search(codes[0], k=3, labels=["3", 5]) == index.search(
        codes[0], k=3, where={"labels": [3, 5]}
    )
    ids = index.ids()[:100]
    assert client.search(ids=ids, k=3, exclude_self=True) == index.search(
        index.codes(ids), k=3, exclude_self=ids
    )
    pictures = [client.thumbnail(int(id_)) for id_ in ids[:6]]
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4)
    expected = encoder.encode(pictures)
    assert (client.encode(pictures) == expected).all()
    assert client.search(pictures, k=5) == index.search(expected, k=5)
    assert client.info()["lineage"]["model_sha256"] == encoder.model_sha256


def test_the_command_line_asks_the_server(
    server: Server, index: BinaryIndex, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    id_ = int(index.ids()[7])
    picture = tmp_path / "digit.png"
    picture.write_bytes(client.thumbnail(id_))
    assert main(["query", str(picture), "--url", server.config.url, "-k", "4", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)["results"][0]["hits"]
    expected = index.search(index.codes([id_]), k=4)
    assert [hit["id"] for hit in hits] == expected.ids[0].tolist()
    assert [hit["distance"] for hit in hits] == expected.distances[0].tolist()
    assert all(hit["uri"] == f"digits/{hit['id']:04d}.png" for hit in hits)


def test_many_small_requests_get_their_own_hits(server: Server, index: BinaryIndex) -> None:
    """They are searched together inside; each client must get its own hits."""
    codes = some_codes(200, seed=5)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.config.url, timeout=30) as http:

            async def one(i: int) -> None:
                k = 1 + i % 3
                body = {"codes": [codes[i].tobytes().hex()], "k": k}
                response = (await http.post("/v1/search", json=body)).json()["results"][0]
                assert response["ids"] == index.search(codes[i], k=k).ids[0].tolist()

            await asyncio.gather(*(one(i) for i in range(len(codes))))

    asyncio.run(main())


def test_raw_http(server: Server, index: BinaryIndex) -> None:
    with httpx.Client(base_url=server.config.url, timeout=30) as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.get("/readyz").json() == {"status": "ready"}
        page = http.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert http.get("/static/app.js").status_code == 200
        refused = http.post("/v1/search", json={"codes": ["00"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "wrong_width")
        assert http.post("/v1/items/remove", json={"ids": [1]}).status_code == 401
        huge = http.post("/v1/search", content=b"x" * 33_000_000, headers={"content-type": "image/png"})
        assert (huge.status_code, huge.json()["error"]["code"]) == (413, "too_large")
        counted = http.get("/metrics").text
        assert 'route="/v1/search"' in counted
        assert f"hashnet_index_size {len(index)}.0" in counted


class Searcher(threading.Thread):
    """Searches without a pause until stopped; keeps every version and every error."""

    def __init__(self, url: str, queries: Any, truth: dict[int, Any]) -> None:
        super().__init__()
        self.url, self.queries, self.truth = url, queries, truth
        self.ended = threading.Event()
        self.n, self.wrong = 0, 0
        self.versions: list[int | None] = []
        self.errors: list[str] = []

    def run(self) -> None:
        with Client(self.url, retry_s=60, batch=50) as client:
            while not self.ended.is_set():
                try:
                    hits = client.search(self.queries, k=5)
                except Exception as error:
                    self.errors.append(repr(error))
                    continue
                self.n += 1
                self.versions.append(hits.version)
                right = self.truth.get(hits.version)  # type: ignore[arg-type]
                self.wrong += right is None or hits != right


def under_load(url: str, queries: Any, act: Any, truth: dict[int, Any]) -> list[Searcher]:
    """Three threads search while ``act(threads)`` runs, before and a while after."""
    searchers = [Searcher(url, queries, truth) for _ in range(3)]
    for one in searchers:
        one.start()
    try:
        wait_until(lambda: all(one.n or one.errors for one in searchers))
        act(searchers)
        before = [one.n for one in searchers]
        wait_until(lambda: all(one.n > n or one.errors for one, n in zip(searchers, before, strict=True)))
    finally:
        for one in searchers:
            one.ended.set()
        for one in searchers:
            one.join()
    return searchers


@pytest.mark.parametrize("kind", ["HttpReplica", pytest.param("EncoderReplica", marks=pytest.mark.slow)])
def test_a_killed_replica_loses_no_request(
    ray_served: Any, server: Server, client: Client, index: BinaryIndex, kind: str
) -> None:
    queries: Any = some_codes(150, seed=2)
    codes = queries
    if kind == "EncoderReplica":  # searched by pictures; the only replica of its kind
        ids = index.ids()[:3]
        queries, codes = [client.thumbnail(int(id_)) for id_ in ids], index.codes(ids)

    def kill(searchers: list[Searcher]) -> None:
        ray = ray_served
        named = ray.util.list_named_actors(all_namespaces=True)
        victim = next(actor for actor in named if f"#{kind}#" in actor["name"])
        ray.kill(ray.get_actor(victim["name"], namespace=victim["namespace"]), no_restart=True)
        with Client(server.config.url, retry_s=60) as client:
            client.search(queries, k=5)

    truth = {index.version: index.search(codes, k=5)}
    searchers = under_load(server.config.url, queries, kill, truth)
    assert [one.errors for one in searchers] == [[], [], []]
    assert sum(one.wrong for one in searchers) == 0
    assert min(one.n for one in searchers) > 0


def test_a_new_version_is_swapped_in_under_load(server: Server, run: str, index: BinaryIndex) -> None:
    """Added and compacted from outside, as a job would: no request fails, none mixes two versions."""
    codes = some_codes(150, seed=3)
    new_ids = np.arange(20) + 50_000
    truth = {index.version: index.search(codes, k=5)}
    grown = BinaryIndex.from_arrays(
        np.concatenate([index.codes(index.ids()), codes[:20]]), np.concatenate([index.ids(), new_ids])
    )
    truth[index.version + 1] = truth[index.version + 2] = grown.search(codes, k=5)

    def change(searchers: list[Searcher]) -> None:
        writer = BinaryIndex.load(f"{run}/index")
        for write in (lambda: writer.add(codes[:20], new_ids), writer.compact):
            write()
            wait_until(lambda: all(writer.version in one.versions or one.errors for one in searchers))

    searchers = under_load(server.config.url, codes, change, truth)
    assert [one.errors for one in searchers] == [[], [], []]
    assert sum(one.wrong for one in searchers) == 0
    assert {version for one in searchers for version in one.versions} == set(truth)


def test_writes_through_the_api(server: Server, client: Client, run: str) -> None:
    before = client.info()
    codes = some_codes(5, seed=4)
    version = client.add(codes, ids=np.arange(5) + 60_000, labels=[[1], [2], [], [3, 4], [5]])
    assert version == before["version"] + 1
    for _ in range(6):  # whichever replica responds
        hits = client.search(codes, k=1)
        assert hits.ids[:, 0].tolist() == list(range(60_000, 60_005))
        assert hits.version is not None
        assert hits.version >= version
    for _ in range(6):
        assert client.item(60_003)["labels"] == [3, 4]
        assert client.info()["size"] == before["size"] + 5
    on_disk = BinaryIndex.load(f"{run}/index")
    assert on_disk.version == version
    with pytest.raises(RequestRejected, match="already") as caught:
        client.add(codes, ids=np.arange(5) + 60_000)
    assert (caught.value.status, caught.value.code) == (409, "id_taken")
    assert client.remove(np.arange(4) + 60_000) == version + 1
    found = client.search(codes, k=5).ids
    assert not np.isin(found, np.arange(4) + 60_000).any()
    assert found[4, 0] == 60_004
    on_disk.refresh()
    assert on_disk.compact()
    wait_until(lambda: client.info()["version"] == on_disk.version)
    assert client.search(codes, k=5) == on_disk.search(codes, k=5)


def test_the_request_log_is_there_and_has_no_contents(server: Server, client: Client) -> None:
    client.search(some_codes(1021), k=3)
    from ray._private.worker import _global_node

    folder = Path(_global_node.get_logs_dir_path())

    def requests() -> list[dict[str, Any]]:
        files = folder.glob("hashnet-*.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [line for line in lines if line["event"] == "request"]

    def found() -> list[dict[str, Any]]:
        return [line for line in requests() if line.get("queries") == 1021]

    wait_until(found)  # it is written after the response
    assert set(found()[-1]) >= {
        "request_id",
        "method",
        "route",
        "status",
        "ms",
        "bytes_in",
        "bytes_out",
        "version",
    }
    assert WRITE not in json.dumps(requests())


def test_one_server_per_cluster(server: Server) -> None:
    with pytest.raises(ClusterError, match="runs on this cluster already"), Server(server.config):
        pass


def test_with_the_other_engine(ray_served: Any, server: Server, config: ServeConfig, run: str) -> None:
    """Last, because it stops the server of this module: the same hits from FAISS itself."""
    engines = {"kernel", "faiss"}
    with Client(config.url, retry_s=60) as client:
        used = client.info()["engine"]
    (other,) = engines - {used}
    local = BinaryIndex.load(f"{run}/index", engine=other)
    codes = some_codes(500, seed=8)
    server.stop()
    with (
        Server(ServeConfig(run=run, port=config.port, search_engine=other, model="off", max_inflight=4)),
        Client(config.url, retry_s=60) as client,
    ):
        info = client.info()
        assert (info["engine"], info["accepts"]) == (other, ["codes", "ids", "keys"])
        assert client.search(codes, k=10) == local.search(codes, k=10)
        assert client.search_radius(codes, radius=12) == local.search_radius(codes, radius=12)
        responses = asyncio.run(all_at_once(config.url, codes[:120]))
        assert {response.status_code for response in responses} in ({200, 429}, {200, 503}, {200, 429, 503})
        for response in responses:
            if response.status_code != 200:  # refused at once, with a code for programs
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] in ("overloaded", "unavailable")
        with Client(config.url, retry_s=60, batch=2, parallel=16) as busy:  # it comes back by itself
            assert busy.search(codes[:40], k=10) == local.search(codes[:40], k=10)


async def all_at_once(url: str, codes: np.ndarray) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(codes))
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http:
        bodies = [{"codes": [code.tobytes().hex()]} for code in codes]
        return await asyncio.gather(*(http.post("/v1/search", json=body) for body in bodies))


def test_it_refuses_to_start(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_model(str(tmp_path / "model"), seed=1)
    with pytest.raises(LineageMismatch) as caught:
        Server(ServeConfig(run=run, model=str(tmp_path / "model")))
    for sha256 in (other, BinaryIndex.load(f"{run}/index").lineage["model_sha256"]):
        assert sha256 in str(caught.value)
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HASHNET_TOKEN"):
        Server(ServeConfig(run=run, host="0.0.0.0"))
