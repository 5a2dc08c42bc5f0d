"""``hashnet serve`` as a user starts it: workers and an encoder, killed, orphaned, and spoken to rudely."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from hashnet import BinaryIndex, Client, Encoder, Run
from hashnet.errors import ServerUnavailable
from hashnet.server import Access, LiveIndex, ServeConfig, ServedRun
from hashnet.server.http_server import HttpProtocol
from hashnet.server.standalone import Supervisor, welcome
from tests.support.local_cluster import free_ports
from tests.support.serving_app import WRITE
from tests.support.small_run import some_codes
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(200)


class Served:
    """A running ``hashnet serve``."""

    def __init__(self, run: str, *words: str) -> None:
        self.run, self.port = run, free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("HASHNET_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hashnet.cli", "serve", run, "--port", str(self.port), *words],
            env=env | {"HASHNET_WRITE_TOKEN": WRITE},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        while "Ctrl-C stops it" not in self.said:
            line = self.process.stderr.readline()  # type: ignore[union-attr]
            assert line, self.said
            self.said += line

    def children(self, role: str) -> list[psutil.Process]:
        """The processes that play a role."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just died
                found += [child] if child.cmdline()[-1:] == [role] else []
        return found

    def version_on_disk(self) -> int:
        return Run(self.run).index.version()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def served(run: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    import shutil

    copy = tmp_path_factory.mktemp("standalone") / "run"
    shutil.copytree(run, copy)
    one = Served(str(copy), "--workers", "2", "follow_s=0.2")
    try:
        wait_until(lambda: httpx.get(f"{one.url}/readyz").status_code == 200)
        yield one
        assert one.end() == 0
    finally:
        one.process.kill()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, token=WRITE, retry_s=60) as one:
        yield one


def test_results_are_those_of_the_local_index(client: Client, index: BinaryIndex, run: str) -> None:
    codes = some_codes(1500)
    assert client.search(codes, k=10) == index.search(codes, k=10)
    assert client.search(codes[:1], k=10) == index.search(codes[:1], k=10)
    assert client.search_radius(codes[:300], radius=16) == index.search_radius(codes[:300], radius=16)
    ids = index.ids()[:5]
    pictures = [client.thumbnail(int(id_)) for id_ in ids]
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4)
    assert (client.encode(pictures) == encoder.encode(pictures)).all()
    assert client.search(pictures, k=3) == index.search(index.codes(ids), k=3)


def test_a_client_reads_its_own_writes_from_every_worker(client: Client, served: Served) -> None:
    before = client.info()["size"]
    for i in range(10):
        client.add(some_codes(1, seed=i), ids=[7000 + i], labels=[["3", "5"]])
        with Client(served.url, token=WRITE) as other:  # another connection: perhaps the other worker
            other._written = client._written
            assert other.item(7000 + i)["labels"] == [3, 5]
            assert other.info()["size"] == before + i + 1
    client.remove(np.arange(7000, 7010))
    assert client.info()["size"] == before


def test_the_command_line_adds_and_removes(served: Served, client: Client, tmp_path: Path) -> None:
    picture = tmp_path / "new.png"
    picture.write_bytes(client.thumbnail(int(BinaryIndex.load(f"{served.run}/index").ids()[0])))

    def items(*words: str) -> str:
        command = [sys.executable, "-m", "hashnet.cli", "items", *words, "--url", served.url]
        env = os.environ | {"HASHNET_WRITE_TOKEN": WRITE}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    said = items("add", str(picture), "--id", "7900", "--label", "3", "--key", "new")
    assert said.startswith("added 1 items: index version ")
    client._written = int(said.split()[-1])
    item = client.item(7900)
    assert (item["uri"], item["labels"], item["columns"]["key"]) == (str(picture), [3], "new")
    near = client.search_radius(client.encode(str(picture)), radius=0, where="key = 'new'")
    assert near[0].ids.tolist() == [7900]
    assert items("remove", "--id", "7900").startswith("removed 1 items")


def test_a_killed_process_is_replaced_and_nobody_notices(served: Served, client: Client) -> None:
    codes, errors, stop = some_codes(20), [], threading.Event()
    client._written = served.version_on_disk()  # no worker may answer from before
    expected = client.search(codes, k=5)

    def search() -> None:
        with Client(served.url, retry_s=60) as one:
            one._written = client._written
            while not stop.is_set():
                try:
                    assert one.search(codes, k=5) == expected
                except Exception as error:
                    errors.append(repr(error))

    threads = [threading.Thread(target=search, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for role, n in (("worker", 2), ("encoder", 1)):
        old = {child.pid for child in served.children(role)}
        assert len(old) == n
        os.kill(min(old), signal.SIGKILL)

        def replaced(role: str = role, n: int = n, old: set[int] = old) -> bool:
            now = {child.pid for child in served.children(role)}
            return len(now) == n and min(old) not in now

        wait_until(replaced)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    picture = client.thumbnail(int(client.search(codes[:1], k=1).ids[0, 0]))
    assert client.search(picture, k=1).distances[0, 0] == 0  # the new encoder


def test_a_worker_that_cannot_come_back_is_tried_again(own_run: str) -> None:
    served, codes = Served(own_run, "--workers", "2", "model=off"), some_codes(3)
    index, away = Path(own_run) / "index", Path(own_run) / "away"
    try:
        with Client(served.url, retry_s=30) as client:
            expected = client.search(codes, k=3)
            index.rename(away)
            old = [child.pid for child in served.children("worker")]
            os.kill(old[0], signal.SIGKILL)
            log = Path(served.said.split("are logged in ")[1].split()[0])

            def refused() -> bool:
                return any("holds no index" in path.read_text() for path in log.glob("*.jsonl"))

            wait_until(refused)
            assert client.search(codes, k=3) == expected  # by the other
            away.rename(index)

            def back() -> bool:
                now = {child.pid for child in served.children("worker")}
                return len(now) == 2 and old[0] not in now

            wait_until(back)
            assert client.search(codes, k=3) == expected
        assert served.end() == 0
    finally:
        served.process.kill()


def test_a_child_that_is_killed_as_it_starts_does_not_end_the_server(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end of the pipe is closed before its task is written."""

    class Killed(subprocess.Popen):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(["true"], stdin=subprocess.PIPE, bufsize=options["bufsize"])
            self.wait()

    supervisor = Supervisor(ServeConfig(run=run, port=free_ports(1)[0]))
    supervisor.children = supervisor.children[:1]
    (child,) = supervisor.children
    child.was_up = True  # the one before it
    monkeypatch.setattr(subprocess, "Popen", Killed)
    try:
        for deaths in range(3):
            supervisor._start(child)
            assert child.process is not None
            assert child.process.poll() == 0
            assert child.deaths == deaths
    finally:
        supervisor.stop()


def talk(port: int, request: bytes, close: bool = False) -> bytes:
    """What the server says to these bytes; with ``close``, this side is closed after them."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        if close:
            connection.shutdown(socket.SHUT_WR)
        said = b""
        while chunk := connection.recv(65536):
            said += chunk
        return said


def test_a_half_closed_complete_request_is_answered(served: Served) -> None:
    body = json.dumps({"codes": ["00" * 8], "k": 2}).encode()
    head = "POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    said = talk(served.port, request, close=True)
    assert said.startswith(b"HTTP/1.1 200")
    assert b'"results"' in said
    assert not talk(served.port, request[:-5], close=True).startswith(b"HTTP/1.1 200")  # cut off


def test_an_absolute_uri_with_a_foreign_host_is_refused(served: Served) -> None:
    def get(host: str, header: str) -> bytes:
        request = f"GET http://{host}/v1/info HTTP/1.1\r\nhost: {header}\r\nconnection: close\r\n\r\n"
        return talk(served.port, request.encode())

    own = get(f"127.0.0.1:{served.port}", "evil.example")  # the URI counts, not the header
    foreign = get("evil.example", "127.0.0.1")
    assert own.startswith(b"HTTP/1.1 200")
    assert foreign.startswith(b"HTTP/1.1 421")


@pytest.mark.slow
def test_half_sent_headers_time_out(served: Served) -> None:
    for sent in (b"", b"GET /v1/info HTTP/1.1\r\nhost: 127.0"):
        assert talk(served.port, sent).startswith(b"HTTP/1.1 408")


def test_too_much_ends_the_connection(served: Served) -> None:
    """A body or headers beyond their limits: a response, and no more is read."""
    head = b"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    assert talk(served.port, head + b"content-length: 99999999999\r\n\r\n{").startswith(b"HTTP/1.1 413")
    endless = head + b"x: " + b"a" * 100_000
    assert talk(served.port, endless).startswith(b"HTTP/1.1 431")
    assert talk(served.port, endless + b"\r\n\r\n").startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_300_slow_bodies_hold_nobody_up(served: Served, client: Client) -> None:
    begun = b"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            slow.sendall(begun + b"content-length: 1000\r\n\r\n{")
        for _ in range(5):
            body = {"codes": ["00" * 8]}
            assert httpx.post(f"{served.url}/v1/search", json=body, timeout=60).status_code == 200


def test_late_headers_end_the_connection() -> None:
    protocol = HttpProtocol.__new__(HttpProtocol)
    said: list[Any] = []
    protocol.transport = type("T", (), {"write": said.append, "close": lambda self: said.append("closed")})()  # type: ignore[assignment]
    protocol._give_up()
    assert said[0].startswith(b"HTTP/1.1 408")
    assert said[1] == "closed"


def test_requests_are_counted_over_all_workers(served: Served, client: Client) -> None:
    for _ in range(12):
        with Client(served.url) as one:
            one.search(some_codes(1), k=1)
    counted = [httpx.get(f"{served.url}/metrics").text for _ in range(4)]
    found = [re.search(r'hashnet_queries_total\{route="/v1/search"\} (\d+)', text) for text in counted]
    totals = [int(match[1]) for match in found if match]
    assert len(totals) == 4
    assert max(totals) == min(totals) >= 12


def test_the_log_is_where_the_server_says(served: Served) -> None:
    folder = Path(re.search(r"logged in (\S+)", served.said)[1])  # type: ignore[index]
    headers = {"x-request-id": "looked-for"}
    httpx.get(f"{served.url}/v1/info", headers=headers)

    def logged() -> bool:
        files = folder.glob("hashnet-*.jsonl")
        return any("looked-for" in file.read_text() for file in files)

    wait_until(logged)
    assert WRITE not in "".join(file.read_text() for file in folder.glob("hashnet-*.jsonl"))


def test_an_orphaned_server_ends(run: str) -> None:
    one = Served(run, "model=off")
    children = one.children("worker")
    one.process.kill()
    one.process.wait()
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children)
    with pytest.raises(ServerUnavailable), Client(one.url, retry_s=0) as client:
        client.info()


def test_mistakes_are_one_sentence(run: str) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    cases = [
        ([f"{run}s"], f"{run}s does not exist; did you mean {run}?"),
        ([f"{run}/codes"], f"give the run, {run}, not its codes/"),
        ([run, "--port", str(port)], f"port {port} is in use on 127.0.0.1"),
        ([run, "--port", str(port)], f"choose another: --port {port + 1}"),
        ([run, "host=0.0.0.0"], "HASHNET_TOKEN"),
        ([run, "index_replicas=2"], "replicas"),
    ]
    for words, said in cases:
        result = subprocess.run(
            [sys.executable, "-m", "hashnet.cli", "serve", *words],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (result.returncode, said in result.stderr) == (2, True), result.stderr
        assert "Traceback" not in result.stderr
    taken.close()


def test_the_tokens_stay_with_the_supervisor(served: Served) -> None:
    for role in ("worker", "encoder"):
        for child in served.children(role):
            assert "HASHNET_WRITE_TOKEN" not in child.environ()
    assert Access.of(write=WRITE).write not in ("", WRITE)


def test_keys_are_named_where_there_are_any(tmp_path: Path) -> None:
    codes = some_codes(3)
    for name, keys in (("keyed", ["it's 0", "1", "2"]), ("plain", None)):
        BinaryIndex.from_arrays(codes, keys=keys).save(str(tmp_path / name / "index"))
        config = ServeConfig(run=str(tmp_path / name))
        served = ServedRun.open(config)
        said = welcome(config, served, Access.of(), "log", LiveIndex(served.index))
        words = [shlex.split(line) for line in said.splitlines() if line.startswith("  hashnet query")]
        assert ["hashnet", "query", "--id", "0", "--url", config.url] in words
        expected = [["hashnet", "query", "--key", "it's 0", "--url", config.url]] if keys else []
        assert [line for line in words if "--key" in line] == expected
        assert ("search by codes, ids and keys" in said) == bool(keys)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("hashnet.server.standalone", ["pydantic", "prometheus_client", "faiss", "numba", "torch"]),
        ("hashnet.server.app", ["fastapi", "starlette", "faiss", "numba", "torch"]),
    ],
)
def test_a_process_imports_only_what_it_needs(module: str, heavy: list[str]) -> None:
    """The time that a server takes to start is mostly that of imports."""
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
