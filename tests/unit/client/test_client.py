"""The clients against a server made of one function: what is sent, sent again, refused and put together."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from hashnet import AsyncClient, Client
from hashnet.client import wire
from hashnet.client.wire import Queries
from hashnet.errors import CodeError, DataError, RequestRejected, ServerFailed, ServerUnavailable
from hashnet.results import SearchResult

URL = "http://127.0.0.1:8000"
CODES = np.random.default_rng(0).integers(0, 256, (10, 8), dtype=np.uint8)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashnet.client.retries.FIRST_PAUSE_S", 0.001)
    monkeypatch.delenv("HASHNET_TOKEN", raising=False)


def answer_codes(request: httpx.Request, version: int = 3) -> httpx.Response:
    """Each code's own first byte as the id of its only hit, so that order and splitting can be checked."""
    table = wire.read_table(request.content)
    queries = wire.read_queries(table)
    first = queries.values[:, :1].astype(np.int64)
    k = int(request.url.params["k"])
    ids = np.full((len(first), k), -1, dtype=np.int64)
    ids[:, :1] = first
    distances = np.where(ids < 0, -1, 0).astype(np.int32)
    return arrow(wire.write_hits(SearchResult(ids, distances), version))


def arrow(content: bytes) -> httpx.Response:
    return httpx.Response(200, content=content, headers={"content-type": wire.ARROW})


def client(handler: Callable[[httpx.Request], httpx.Response], **options: object) -> Client:
    return Client(URL, transport=httpx.MockTransport(handler), **options)


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    error = {"error": {"code": code, "message": f"{code} it is", "request_id": "x"}}
    return httpx.Response(
        status, json=error, headers={name.replace("_", "-"): v for name, v in headers.items()}
    )


def test_a_batch_is_cut_and_joined_in_order() -> None:
    sizes, lock = [], threading.Lock()

    def handler(request: httpx.Request) -> httpx.Response:
        with lock:
            sizes.append(len(wire.read_table(request.content)))
        return answer_codes(request)

    with client(handler, batch=3, parallel=4) as one:
        hits = one.search(CODES, k=2)
    assert sorted(sizes) == [1, 3, 3, 3]
    assert hits.ids[:, 0].tolist() == CODES[:, 0].tolist()
    assert hits.ids.shape == (10, 2)
    assert hits.ids[:, 1].tolist() == [-1] * 10
    assert (hits.ids.dtype, hits.distances.dtype, hits.version) == (np.int64, np.int32, 3)


def test_wide_rows_are_cut_by_their_bytes() -> None:
    features = Queries("features", np.zeros((10, 1 << 20), dtype=np.float32))
    assert [len(part) for part in features.parts(rows=1000)] == [2, 2, 2, 2, 2]  # 8 MB each
    wider_than_a_part = Queries("features", np.zeros((2, 3 << 20), dtype=np.float32))
    assert [len(part) for part in wider_than_a_part.parts(rows=1000)] == [1, 1]


def test_parts_are_under_way_at_once() -> None:
    together = threading.Barrier(4, timeout=5)  # breaks unless four requests are there at the same time

    def handler(request: httpx.Request) -> httpx.Response:
        together.wait()
        return answer_codes(request)

    with client(handler, batch=3, parallel=4) as one:
        assert len(one.search(CODES, k=1)) == 10


def test_nothing_asked_nothing_sent() -> None:
    with client(lambda request: pytest.fail("a request was sent")) as one:
        hits = one.search(CODES[:0], k=5)
        assert hits.ids.shape == (0, 5)
        assert one.search_radius(CODES[:0], radius=2) == []
        assert one.search([], k=5).ids.shape == (0, 5)
        assert one.search(np.zeros((0, 7), dtype=np.float32), k=5).ids.shape == (0, 5)
    with client(lambda request: httpx.Response(200, json={"n_bits": 64})) as one:
        assert one.encode([]).shape == (0, 8)


@pytest.mark.parametrize("status", [429, 503])
def test_later_is_tried_again(status: int) -> None:
    tries = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        return answer_codes(request) if len(tries) > 3 else refusal(status, "overloaded", retry_after="0")

    with client(handler) as one:
        assert len(one.search(CODES, k=1)) == 10
    assert len(tries) == 4


def test_retry_after_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("hashnet.client.client.time.sleep", pauses.append)
    tries = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        return answer_codes(request) if len(tries) > 1 else refusal(503, "timeout", retry_after="2")

    with client(handler) as one:
        one.search(CODES, k=1)
    assert pauses == [2.0]


def test_a_lost_connection_is_tried_again_and_a_lost_process_too() -> None:
    tries = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        if len(tries) == 1:
            raise httpx.ReadError("reset", request=request)
        if len(tries) == 2:
            return httpx.Response(500, text="Internal Server Error")  # the proxy's words, not ours
        return answer_codes(request)

    with client(handler) as one:
        assert len(one.search(CODES, k=1)) == 10
    assert len(tries) == 3


def test_the_time_for_retries_ends() -> None:
    with (
        client(lambda request: refusal(503, "unavailable"), retry_s=0.05) as one,
        pytest.raises(ServerUnavailable),
    ):
        one.search(CODES, k=1)

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with (
        client(refuse, retry_s=0.05) as one,
        pytest.raises(ServerUnavailable, match=r"cannot reach http://127\.0"),
    ):
        one.info()


def test_what_the_server_refuses_is_not_repeated() -> None:
    tries = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        return refusal(422, "wrong_width")

    with client(handler) as one, pytest.raises(RequestRejected) as caught:
        one.search(CODES, k=1)
    assert (caught.value.code, caught.value.status, str(caught.value)) == (
        "wrong_width",
        422,
        "wrong_width it is",
    )
    assert len(tries) == 1


def test_a_picture_that_is_refused_is_named(tmp_path: Path) -> None:
    """By its path, whichever request it was sent in; one that came as bytes has its number."""
    paths = [tmp_path / f"{i}.jpg" for i in range(5)]
    for path in paths:
        path.write_bytes(b"text" if path.name == "4.jpg" else b"picture")

    def handler(request: httpx.Request) -> httpx.Response:
        values = wire.read_queries(wire.read_table(request.content)).values
        if b"text" not in values:
            none = np.zeros((len(values), 1))
            return arrow(wire.write_hits(SearchResult(none.astype(np.int64), none.astype(np.int32)), 3))
        name = "the file" if len(values) == 1 else f"image {values.index(b'text')}"
        error = {"code": "not_an_image", "message": f"{name} is not a picture", "request_id": "x"}
        return httpx.Response(422, json={"error": error})

    for queries, batch, name in (
        (paths, 10, str(paths[4])),
        (paths, 3, str(paths[4])),
        (str(paths[4]), 3, str(paths[4])),
        ([b"picture", b"text"], 3, "image 1"),
    ):
        with client(handler, batch=batch) as one, pytest.raises(RequestRejected) as caught:
            one.search(queries, k=1)
        assert str(caught.value) == f"{name} is not a picture"
        assert (caught.value.code, caught.value.status) == ("not_an_image", 422)


@pytest.mark.parametrize("response", [httpx.Response(302), httpx.Response(200, html="<h1>log in</h1>")])
def test_an_address_of_something_else_is_recognised(response: httpx.Response) -> None:
    with client(lambda request: response) as one:
        for send in (one.info, lambda: one.search(CODES, k=1)):
            with pytest.raises(ServerFailed, match="is this the address of a server"):
                send()


def test_a_failure_of_the_server_itself_is_not_repeated() -> None:
    tries = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        return refusal(500, "internal")

    with client(handler) as one, pytest.raises(ServerFailed):
        one.search(CODES, k=1)
    assert len(tries) == 1


def test_writes_are_repeated_only_when_nothing_can_have_happened() -> None:
    tries: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(request.url.path)
        if len(tries) == 1:
            raise httpx.ConnectError("refused", request=request)
        if len(tries) == 2:
            return refusal(429, "overloaded")
        raise httpx.ReadTimeout("slow", request=request)

    with client(handler) as one, pytest.raises(ServerUnavailable, match="in time"):
        one.add(CODES, ids=np.arange(10))
    assert tries == ["/v1/items"] * 3
    tries.clear()

    def lost(request: httpx.Request) -> httpx.Response:
        tries.append(request.url.path)
        return httpx.Response(500, text="Internal Server Error")

    with client(lost) as one, pytest.raises(ServerFailed):
        one.remove([1, 2])
    assert tries == ["/v1/items/remove"]
    tries.clear()

    def unknown(request: httpx.Request) -> httpx.Response:
        tries.append(request.url.path)
        return refusal(504, "timeout")

    with client(unknown) as one, pytest.raises(ServerFailed, match="timeout it is"):
        one.add(CODES, ids=np.arange(10))
    assert tries == ["/v1/items"]


def test_after_a_write_the_same_client_reads_no_older_version() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/items":
            table = wire.read_table(request.content)
            assert set(table.column_names) == {"code", "id", "labels"}
            assert table["labels"].to_pylist() == [[0, 2]] * 10
            return httpx.Response(200, json={"version": 9, "size": 10})
        seen.append(request.url.params.get("min_version"))
        return answer_codes(request)

    with client(handler) as one:
        one.search(CODES, k=1)
        labels = np.zeros((10, 3), dtype=np.uint8)
        labels[:, [0, 2]] = 1
        assert one.add(CODES, ids=np.arange(10), labels=labels) == 9
        one.search(CODES, k=1)
    assert seen == [None, "9"]


def test_a_write_beyond_one_request_says_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four parts is refused: the error names the first two, and later reads see them."""
    monkeypatch.setattr("hashnet.client.client.WRITE_ROWS", 3)
    versions: list[int] = []
    asked: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/search":
            asked.append(request.url.params.get("min_version"))
            return answer_codes(request)
        versions.append(5 + len(versions))
        return (
            refusal(409, "id_taken")
            if len(versions) == 3
            else httpx.Response(200, json={"version": versions[-1]})
        )

    for verb, write in (
        ("added", lambda one: one.add(CODES, ids=np.arange(10))),
        ("removed", lambda one: one.remove(np.arange(10))),
    ):
        versions.clear()
        with client(handler) as one:
            with pytest.raises(RequestRejected, match=rf"the first 6 of 10 were {verb} before") as caught:
                write(one)
            assert (caught.value.status, caught.value.code) == (409, "id_taken")
            one.search(CODES[:3], k=1)
        assert asked.pop() == "6"

    async def later() -> None:
        versions.clear()
        async with AsyncClient(URL, transport=httpx.MockTransport(handler)) as one:
            with pytest.raises(RequestRejected, match="the first 6 of 10"):
                await one.add(CODES, ids=np.arange(10))
            await one.search(CODES[:3], k=1)

    asyncio.run(later())
    assert asked.pop() == "6"


def test_a_write_is_one_request_whatever_the_batch_size() -> None:
    bodies: list[tuple[str, bytes]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append((request.url.path, request.content))
        if request.url.path == "/v1/encode":
            queries = wire.read_queries(wire.read_table(request.content))
            return httpx.Response(
                200,
                content=wire.write_queries(Queries("codes", queries.values[:, :8].astype(np.uint8))),
                headers={"content-type": wire.ARROW},
            )
        return httpx.Response(200, json={"version": 5})

    features = np.arange(640, dtype=np.float32).reshape(80, 8)
    with client(handler, batch=3) as one:
        one.add(features, ids=np.arange(80), labels=[["cat"], ["dog", "cat"]] * 40, upsert=True)
    assert [path for path, _ in bodies].count("/v1/items") == 1
    table = wire.read_table(bodies[-1][1])
    assert table["id"].to_pylist() == list(range(80))
    assert table["labels"].to_pylist()[:2] == [["cat"], ["dog", "cat"]]
    assert table.schema.metadata == {b"upsert": b"true"}
    assert (wire.read_queries(table, also=("id", "labels")).values == features.astype(np.uint8)).all()


def test_parts_of_one_answer_are_never_of_two_versions() -> None:
    """The first part is answered by version 1, the others by 2: the first must be asked again."""
    asked, lock = [], threading.Lock()

    def handler(request: httpx.Request) -> httpx.Response:
        first = int(wire.read_queries(wire.read_table(request.content)).values[0, 0])
        wanted = int(request.url.params.get("min_version", 0))
        with lock:
            asked.append((first, wanted))
        return answer_codes(request, version=1 if first == CODES[0, 0] and wanted < 2 else 2)

    with client(handler, batch=3) as one:
        hits = one.search(CODES, k=1)
    assert hits.version == 2
    assert hits.ids[:, 0].tolist() == CODES[:, 0].tolist()
    assert (int(CODES[0, 0]), 2) in asked


def test_an_index_that_never_rests_gives_an_answer_without_a_version() -> None:
    versions = iter(range(1, 1000))
    with client(lambda request: answer_codes(request, version=next(versions)), batch=5) as one:
        assert one.search(CODES, k=1).version is None


def test_radius_features_ids_and_labels_travel() -> None:
    seen: dict[str, object] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        queries = wire.read_queries(wire.read_table(request.content))
        seen.update(kind=queries.kind, values=queries.values, params=request.url.params)
        hits = [SearchResult(np.arange(i), np.zeros(i, dtype=np.int32)) for i in range(len(queries))]
        return arrow(wire.write_hits(hits, 1))

    with client(handler) as one:
        hits = one.search_radius(np.ones((3, 4), dtype=np.float64), radius=5, labels=[2, "cat"])
        assert [len(hit) for hit in hits] == [0, 1, 2]
        assert hits[2].version == 1
        assert seen["kind"] == "features"
        assert seen["values"].dtype == np.float32  # type: ignore[attr-defined]
        assert seen["params"].get_list("labels") == ["cat"]  # type: ignore[attr-defined]
        assert seen["params"].get_list("label_ids") == ["2"]  # type: ignore[attr-defined]
        for labels in (np.int64(2), np.array([2]), 2):
            one.search_radius(CODES, radius=5, labels=labels)  # type: ignore[arg-type]
            assert seen["params"].get_list("labels") == []  # type: ignore[attr-defined]
            assert seen["params"].get_list("label_ids") == ["2"]  # type: ignore[attr-defined]
        one.search_radius(ids=[7, 9], radius=0, exclude_self=True)
        assert (seen["kind"], seen["values"].tolist()) == ("ids", [7, 9])  # type: ignore[attr-defined]
        assert seen["params"]["exclude_self"] == "true"  # type: ignore[index]


def test_pictures_travel_as_the_bytes_they_are(tmp_path: object) -> None:
    from PIL import Image

    path = tmp_path / "cat.png"  # type: ignore[operator]
    Image.new("RGB", (4, 4), (200, 10, 10)).save(path)
    sent: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.extend(wire.read_queries(wire.read_table(request.content)).values)
        return arrow(wire.write_queries(Queries("codes", np.zeros((1, 8), dtype=np.uint8))))

    with client(handler) as one:
        for picture in (str(path), path, path.read_bytes(), [path], Image.open(path)):
            assert one.encode(picture).shape == (1, 8)
    assert sent[:4] == [path.read_bytes()] * 4
    assert sent[4].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("queries", "error", "words"),
    [
        (None, DataError, "give one of queries"),
        ("no-such-file.jpg", DataError, "cannot read the picture"),
        (np.zeros((2, 3), dtype=np.int64), CodeError, "ids="),
        (np.zeros((2, 4, 4, 3), dtype=np.uint8), DataError, "pixels"),
        (np.array([[1.0, np.nan]]), DataError, "NaN"),
        (np.zeros((2, 3, 4)), DataError, r"\(n, d\)"),
        ([[], []], DataError, r"\(n, d\), got \(2, 0\)"),
        ([[1.0], [1.0, 2.0]], CodeError, "rows differ in length"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(queries: object, error: type, words: str) -> None:
    with client(lambda request: pytest.fail("a request was sent")) as one, pytest.raises(error, match=words):
        one.search(queries, k=1)


def test_a_filter_that_names_no_label_is_refused() -> None:
    with client(lambda request: pytest.fail("a request was sent")) as one:
        for labels in ([], (), np.zeros(0, dtype=np.int64)):
            with pytest.raises(DataError, match="labels= names none"):
                one.search(CODES, k=1, labels=labels)
        for odd in ([1.9], np.array([2.7]), [True], [b"3"], [None]):
            with pytest.raises(DataError, match="labels= takes class ids and names, got"):
                one.search(CODES, k=1, labels=odd)  # type: ignore[arg-type]


def test_bad_settings_are_refused() -> None:
    for address in ("127.0.0.1:8000", "ftp://x"):
        with pytest.raises(DataError, match="http://127"):
            Client(address)
    with pytest.raises(DataError, match="batch must be positive, got 0"):
        Client(URL, batch=0)


def test_the_token_is_sent_and_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    with client(handler) as one:
        one.info()
    monkeypatch.setenv("HASHNET_TOKEN", "from-the-environment")
    with client(handler) as one:
        one.info()
    with client(handler, token="given") as one:
        one.info()
    assert seen == [None, "Bearer from-the-environment", "Bearer given"]


def test_timeouts_are_on_by_default() -> None:
    with Client(URL) as one:
        timeout = one._http.timeout
    assert None not in (timeout.connect, timeout.read, timeout.write, timeout.pool)


def test_the_async_client_does_the_same() -> None:
    tries = []

    async def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        return answer_codes(request) if len(tries) > 2 else refusal(503, "unavailable", retry_after="0")

    async def main() -> None:
        async with AsyncClient(URL, transport=httpx.MockTransport(handler), batch=3) as one:
            hits = await one.search(CODES, k=2)
            assert hits.ids[:, 0].tolist() == CODES[:, 0].tolist()

        async def refuse(request: httpx.Request) -> httpx.Response:
            return refusal(404, "unknown_id")

        async with AsyncClient(URL, transport=httpx.MockTransport(refuse), batch=3) as one:
            with pytest.raises(RequestRejected, match="unknown_id"):
                await one.search(ids=np.arange(10), k=2)

    asyncio.run(main())


def test_the_client_is_light(python: str, repo: object) -> None:
    script = (
        "import sys, hashnet; hashnet.Client('http://127.0.0.1:1').close(); hashnet.AsyncClient\n"
        "heavy = {'torch', 'faiss', 'numba', 'ray', 'sklearn', 'PIL', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([python, "-c", script], check=True, cwd=str(repo))
