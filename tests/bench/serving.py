"""Servers under load, load generator and server on the same cores: ours against a bare uvicorn app and peers.

    python tests/bench/serving.py [--only json,arrow,adds,kills,pictures,peers] [--seconds 10] [--slices 2]

Prints one JSON row per case. One code per JSON request: wrk at 1, 16 and 64 connections against a
fifteen-line uvicorn app around the same index, `hashnet serve` and Ray Serve, in turns, so that what else
runs on the machine falls on all of them; then the peers of peers.py that are installed, each with its
own client. Arrow batches of 1,024 against the bare index. Adds per second from 1 and 16 clients. Batches
while a process is killed and while the index is swapped. Single pictures against the encoder alone. Every
answer but wrk's is compared with the index's own; of each server, 500 JSON answers are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet import AsyncClient, BinaryIndex, Client
from hashnet.errors import HashnetError
from hashnet.results import SearchResult
from hashnet.store import write_store
from tests.bench.peers import measure, peers
from tests.support.local_cluster import free_ports

BATCH = 1024
WRITE_TOKEN = "w" * 24
CONNECTIONS = (1, 16, 64)
REPO = Path(__file__).resolve().parents[2]

BARE_APP = """
import sys
import numpy as np, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from hashnet import BinaryIndex
index = BinaryIndex.load(sys.argv[1])
app = FastAPI()
class Body(BaseModel):
    codes: list[str]
    k: int = 10
@app.post("/v1/search")
async def search(body: Body):
    codes = np.frombuffer(bytes.fromhex("".join(body.codes)), np.uint8).reshape(len(body.codes), -1)
    hits = index.search(codes, k=body.k)
    rows = zip(hits.ids.tolist(), hits.distances.tolist())
    return {"results": [{"ids": ids, "distances": distances} for ids, distances in rows]}
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""

WRK_SCRIPT = """
local bodies, at = {}, 0
for line in io.lines("%s") do bodies[#bodies + 1] = line end
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
request = function()
  at = at %% #bodies + 1
  return wrk.format(nil, nil, nil, bodies[at])
end
"""


def clustered_codes(
    n: int, n_bits: int = 64, n_centres: int = 1000, flip: float = 0.08, seed: int = 0
) -> np.ndarray:
    """uint8 (n, n_bits // 8): centres with a few bits flipped, as codes of classes are."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 256, (n_centres, n_bits // 8), dtype=np.uint8)
    codes = np.empty((n, n_bits // 8), dtype=np.uint8)
    for start in range(0, n, 100_000):
        rows = min(100_000, n - start)
        noise = np.packbits(rng.random((rows, n_bits), dtype=np.float32) < flip, axis=1)
        codes[start : start + rows] = centres[rng.integers(0, n_centres, rows)] ^ noise
    return codes


def row(case: str, **values: Any) -> None:
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
    load = round(os.getloadavg()[0], 1)  # of the machine: what else ran tells in the figures
    print(json.dumps({"bench": "serving", "case": case} | shown | {"load_average": load}), flush=True)


def bare_index(index: BinaryIndex, queries: np.ndarray, k: int, seconds: float) -> float:
    """Queries/s of the index alone, batches of 1,024, all cores of this process."""
    index.search(queries[:BATCH], k=k)
    started, n = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        index.search(queries[n % 8 * BATCH : (n % 8 + 1) * BATCH], k=k)
        n += 1
    return n * BATCH / (time.perf_counter() - started)


class ServerProcess:
    """A server started from a command line; ended with the ``with`` block."""

    def __init__(self, name: str, words: list[str], port: int) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        env = {key: value for key, value in os.environ.items() if not key.startswith("HASHNET_")}
        env |= {"HASHNET_WRITE_TOKEN": WRITE_TOKEN, "PYTHONPATH": str(REPO)}
        started = time.perf_counter()
        # A session for each, as the workers of `hashnet serve` have: on a busy machine the scheduler
        # would favour a server that shares the load generator's, by up to a factor of two.
        self.process = subprocess.Popen(
            words, cwd=REPO, env=env, stdout=subprocess.DEVNULL, stderr=None, start_new_session=True
        )
        body = {"codes": ["00" * 8]}
        while True:
            try:
                if httpx.post(f"{self.url}/v1/search", json=body, timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                assert self.process.poll() is None, f"{name} ended"
                time.sleep(0.02)
        row("ready", server=name, seconds=time.perf_counter() - started)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start_servers(run: str, wanted: argparse.Namespace) -> list[Callable[[], ServerProcess]]:
    """The servers to compare; calling one starts it."""
    python, ports = sys.executable, free_ports(3)
    own = [python, "-m", "hashnet.cli", "serve", run, "--port", str(ports[1]), "follow_s=0.5"]
    ray = [python, "jobs/serve.py", f"run={run}", "follow_s=0.5"]
    slices = f", {wanted.slices} slices" if wanted.slices else ""
    commands = {
        "bare app": [python, "-c", BARE_APP, f"{run}/index", str(ports[0])],
        "hashnet serve": own,
        f"ray serve{slices}": [*ray, f"port={ports[2]}", f"slices={wanted.slices or 'none'}"],
    }
    chosen = [
        (name, words, port)
        for (name, words), port in zip(commands.items(), ports, strict=True)
        if not (wanted.no_ray and name.startswith("ray"))
    ]
    return [lambda one=one: ServerProcess(*one) for one in chosen]  # type: ignore[misc]


# ---------------------------------------------------------------- one code per JSON request


def wrk(url: str, connections: int, seconds: float, script: str) -> dict[str, float]:
    """Requests/s and latencies in ms."""
    words = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds:g}s",
        "--latency",
        "-s",
        script,
        f"{url}/v1/search",
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in said, said
    assert "Socket errors" not in said, said
    unit = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    times = {p: float(v) * unit[u] for p, v, u in re.findall(r"^\s+(50|99)%\s+([\d.]+)(us|ms|s)", said, re.M)}
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])  # type: ignore[index]
    return {"requests_per_s": rate, "p50_ms": times["50"], "p99_ms": times["99"]}


def single_codes(
    servers: list[ServerProcess], queries: np.ndarray, wanted: argparse.Namespace, folder: str
) -> None:
    """Every server at every number of connections, in turns; medians over the rounds."""
    bodies = [json.dumps({"codes": [code.tobytes().hex()], "k": wanted.k}) for code in queries]
    Path(folder, "bodies").write_text("\n".join(bodies))
    script = Path(folder, "wrk.lua")
    script.write_text(WRK_SCRIPT % Path(folder, "bodies"))
    for connections in CONNECTIONS:
        found: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
        for _ in range(wanted.rounds):
            for server in servers:
                found[server.name].append(wrk(server.url, connections, wanted.seconds, str(script)))
        rates = {name: [one["requests_per_s"] for one in rounds] for name, rounds in found.items()}
        for name, rounds in found.items():
            ratios = [own / bare for own, bare in zip(rates[name], rates["bare app"], strict=True)]
            medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            ratio = {} if name == "bare app" else {"ratio_of_bare_app": statistics.median(ratios)}
            row("json, one code", server=name, connections=connections, k=wanted.k, **medians, **ratio)


def check_answers(server: ServerProcess, queries: np.ndarray, truth: SearchResult, k: int) -> None:
    """500 single-code answers of a server against the index's own."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        wrong = 0
        for code, ids in zip(queries[:500], truth.ids, strict=False):
            body = {"codes": [code.tobytes().hex()], "k": k}
            wrong += http.post("/v1/search", json=body).json()["results"][0]["ids"] != ids.tolist()
    row("json, checked", server=server.name, answers=500, wrong_answers=wrong)


# ---------------------------------------------------------------- Arrow batches and updates


class Load:
    """Sends from several connections for a while and counts what came back."""

    def __init__(self, connections: int, seconds: float) -> None:
        self.connections, self.seconds = connections, seconds
        self.times: list[float] = []
        self.errors: list[str] = []
        self.wrong = 0
        self.versions: set[Any] = set()

    async def run(
        self, once: Callable[[int], Awaitable[bool]], meanwhile: Awaitable[None] | None = None
    ) -> float:
        """Seconds it took; ``once(i)`` sends one request and says whether its answer was right."""
        started = time.perf_counter()
        until = started + self.seconds

        async def connection(number: int) -> None:
            i = number
            while time.perf_counter() < until:
                begun = time.perf_counter()
                try:
                    self.wrong += not await once(i)
                except (HashnetError, httpx.HTTPError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}"[:200])
                self.times.append(time.perf_counter() - begun)
                i += self.connections

        jobs: list[Awaitable[None]] = [connection(i) for i in range(self.connections)]
        await asyncio.gather(*jobs, *([meanwhile] if meanwhile is not None else []))
        return time.perf_counter() - started

    def row(self, case: str, server: str, took: float, bare_rate: float | None = None, **more: Any) -> None:
        """Prints the row; with ``bare_rate``, the share of the bare index's queries/s too."""
        rate = len(self.times) / took
        ratio = {} if bare_rate is None else {"ratio_of_bare_index": rate * BATCH / bare_rate}
        row(
            case,
            server=server,
            **ratio,
            connections=self.connections,
            queries_per_s=rate * BATCH,
            p50_ms=float(np.percentile(self.times, 50)) * 1000,
            p99_ms=float(np.percentile(self.times, 99)) * 1000,
            requests=len(self.times),
            errors=len(self.errors),
            first_error=self.errors[0] if self.errors else None,
            wrong_answers=self.wrong,
            **more,
        )


def arrow_batches(
    server: ServerProcess,
    queries: np.ndarray,
    truth: dict[int, SearchResult],
    k: int,
    load: Load,
    case: str,
    meanwhile: Awaitable[None] | None = None,
    bare_rate: float | None = None,
) -> None:
    """``truth`` is the right answer by version; an answer of no version or of another one is wrong."""

    async def main() -> None:
        async with AsyncClient(server.url, parallel=load.connections, timeout_s=60, retry_s=60) as client:

            async def once(i: int) -> bool:
                at = i % (len(queries) // BATCH) * BATCH
                hits = await client.search(queries[at : at + BATCH], k=k)
                load.versions.add(hits.version)
                right = truth.get(hits.version)  # type: ignore[arg-type]
                return right is not None and np.array_equal(hits.ids, right.ids[at : at + BATCH])

            took = await load.run(once, meanwhile)
            load.row(case, server.name, took, bare_rate, k=k, versions=sorted(map(str, load.versions)))

    asyncio.run(main())


# ---------------------------------------------------------------- pictures

ENCODER_ALONE = """
import sys, time
from hashnet import Encoder
encoder = Encoder.load(sys.argv[1], engine="cpu-eager", batch_rows=4)
picture = open(sys.argv[2], "rb").read()
for line in sys.stdin:
    times = []
    for _ in range(int(line)):
        started = time.perf_counter()
        encoder.encode([picture])
        times.append(time.perf_counter() - started)
    print(sorted(times)[len(times) // 2], flush=True)
"""
NEW_MODEL = """
import sys, torch
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
torch.manual_seed(0)
print(save_bundle(sys.argv[1], build_model(sys.argv[2], n_bits=64)))
"""


def pictures(folder: str, rounds: int, backbone: str = "alexnet", n: int = 15) -> None:
    """Single pictures through `hashnet serve` against the encoder alone in a process of its own, in turns."""
    run, picture = f"{folder}/pictures", Path(folder, "picture.jpg")
    words = [sys.executable, "-c", NEW_MODEL, f"{run}/model", backbone]
    sha256 = subprocess.run(words, cwd=REPO, check=True, capture_output=True, text=True).stdout.split()[-1]
    BinaryIndex.from_arrays(clustered_codes(100_000), lineage={"model_sha256": sha256}).save(f"{run}/index")
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((500, 375)).save(picture)
    words = [sys.executable, "-c", ENCODER_ALONE, f"{run}/model", str(picture)]
    alone = subprocess.Popen(words, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert alone.stdin is not None
    assert alone.stdout is not None
    port = free_ports(1)[0]
    words = [sys.executable, "-m", "hashnet.cli", "serve", run, "--port", str(port)]
    own, served = [], []
    with ServerProcess("hashnet serve", words, port) as server, httpx.Client(timeout=60) as http:
        for _ in range(rounds + 1):  # the first one warms up
            alone.stdin.write(f"{n}\n")
            alone.stdin.flush()
            own.append(float(alone.stdout.readline()))
            times = []
            for _ in range(n):
                started = time.perf_counter()
                headers = {"content-type": "image/jpeg"}
                url = f"{server.url}/v1/search?k=10"
                http.post(url, content=picture.read_bytes(), headers=headers).raise_for_status()
                times.append(time.perf_counter() - started)
            served.append(statistics.median(times))
    alone.stdin.close()
    alone.wait()
    more = [request / encoder - 1 for encoder, request in zip(own[1:], served[1:], strict=True)]
    row(
        "picture",
        server="hashnet serve",
        backbone=backbone,
        encoder_alone_ms=statistics.median(own[1:]) * 1000,
        p50_ms=statistics.median(served[1:]) * 1000,
        more_than_encoder=statistics.median(more),
        rounds=[round(one, 3) for one in more],
    )


# ---------------------------------------------------------------- kills and updates


async def kill_worker(server: ServerProcess, after_s: float) -> None:
    """Kills one process that responds to requests, as a crash would."""
    await asyncio.sleep(after_s)
    for child in psutil.Process(server.process.pid).children(recursive=True):
        words = child.cmdline()
        if words[-1:] == ["worker"] or any("HttpReplica" in word for word in words):
            child.kill()
            return
    raise AssertionError(f"{server.name} has no process to kill")


async def swap(folder: str, codes: np.ndarray, ids: np.ndarray, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await asyncio.to_thread(lambda: BinaryIndex.load(folder).add(codes, ids))


def adds(server: ServerProcess, seconds: float, clients: int) -> None:
    """Acknowledged adds of one item each, from so many clients at once; all of them are taken out again."""
    n, until = [0] * clients, time.perf_counter() + seconds
    first = 1 << 40

    def add(number: int) -> None:
        codes = clustered_codes(1, seed=number)
        with Client(server.url, token=WRITE_TOKEN) as client:
            while time.perf_counter() < until:
                client.add(codes, ids=[first + number * 1_000_000 + n[number]])
                n[number] += 1

    threads = [threading.Thread(target=add, args=(number,)) for number in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = sum(n) / (time.perf_counter() - started)
    row("adds", server=server.name, clients=clients, adds_per_s=rate, adds=sum(n))
    with Client(server.url, token=WRITE_TOKEN) as client:
        client.remove(np.concatenate([first + i * 1_000_000 + np.arange(done) for i, done in enumerate(n)]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codes", type=int, default=1_281_167)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--slices", type=int, default=0, help="on Ray, serve in so many slices")
    parser.add_argument("--only", default="json,arrow,adds,kills,pictures,peers")
    wanted = parser.parse_args()
    wanted.only = wanted.only.split(",")
    if "json" in wanted.only and shutil.which("wrk") is None:
        sys.exit("serving.py needs wrk: apt-get install wrk")
    with tempfile.TemporaryDirectory(prefix="hashnet-bench-") as folder:
        codes = clustered_codes(wanted.codes)
        index = BinaryIndex.from_arrays(codes)
        queries = codes[np.random.default_rng(2).integers(0, len(codes), 8 * BATCH)]
        queries ^= np.packbits(np.random.default_rng(3).random((len(queries), 64)) < 0.05, axis=1)
        truth = index.search(queries, k=wanted.k)
        if {"json", "arrow", "adds", "kills"} & set(wanted.only):
            servers_under_load(f"{folder}/run", index, queries, truth, wanted)
        if "pictures" in wanted.only:
            pictures(folder, wanted.rounds)
        if "peers" in wanted.only:
            for peer in peers(codes, lambda name, fault: row("peer, one code", server=name, skipped=fault)):
                for found in measure(peer, codes, queries, truth, wanted.seconds, CONNECTIONS):
                    row("peer, one code", server=peer.name, k=wanted.k, **found)


def servers_under_load(
    run: str, index: BinaryIndex, queries: np.ndarray, truth: SearchResult, wanted: argparse.Namespace
) -> None:
    """The bare app and our servers, all up at the same time."""
    index.save(f"{run}/index")
    if wanted.slices:
        write_store(f"{run}/codes", index.codes(index.ids()))
    with ExitStack() as stack:
        servers = [stack.enter_context(start()) for start in start_servers(run, wanted)]
        if "json" in wanted.only:
            single_codes(servers, queries, wanted, run)
            for server in servers:
                check_answers(server, queries, truth, wanted.k)
        for server in servers[1:]:
            cases(server, run, index, queries, wanted)


def cases(
    server: ServerProcess, run: str, bare: BinaryIndex, queries: np.ndarray, wanted: argparse.Namespace
) -> None:
    """What one of our servers is measured by besides single codes."""
    k, short = wanted.k, max(wanted.seconds, 10)
    if "adds" in wanted.only:
        for clients in (1, 16):
            adds(server, wanted.seconds, clients)
    sliced = server.name.endswith("slices")
    index = bare if sliced else BinaryIndex.load(f"{run}/index")  # slices are made of the code store
    truth = {wanted.slices if sliced else index.version: index.search(queries, k=k)}
    if "arrow" in wanted.only:
        for _ in range(wanted.rounds):
            rate = bare_index(bare, queries, k, wanted.seconds)
            load = Load(4, wanted.seconds)
            arrow_batches(server, queries, truth, k, load, "arrow, 1024 codes", bare_rate=rate)
    if "kills" not in wanted.only:
        return
    kill = kill_worker(server, short / 3)
    arrow_batches(server, queries, truth, k, Load(4, short), "arrow, process killed", kill)
    if sliced:
        return  # each of them has versions of its own
    new_codes = queries[::7].copy()
    new_ids = np.arange(len(new_codes)) + (1 << 50) + index.version * 10_000_000
    after = BinaryIndex.load(f"{run}/index")
    after = BinaryIndex.from_arrays(
        np.concatenate([after.codes(after.ids()), new_codes]), np.concatenate([after.ids(), new_ids])
    )
    truth[index.version + 1] = after.search(queries, k=k)
    change = swap(f"{run}/index", new_codes, new_ids, short / 3)
    arrow_batches(server, queries, truth, k, Load(4, short), "arrow, index swapped", change)


if __name__ == "__main__":
    main()
