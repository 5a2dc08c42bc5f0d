"""A served index under load, client and server on the same cores, against the bare index in one process.

    python tests/bench/serving.py [--codes 1281167] [--seconds 60] [--connections 16] [--k 10]

Prints one JSON row per case: the bare index; single-code JSON requests; Arrow batches of 1,024 (with their
share of the bare index's queries/s); Arrow batches while an index replica is killed, while an HTTP replica
is killed, and while the index is swapped. Every answer is compared with the bare index's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.serve import Server
from hashnet import AsyncClient, BinaryIndex
from hashnet.errors import HashnetError
from hashnet.results import SearchResult
from hashnet.server import ServeConfig
from tests.support.local_cluster import free_ports

BATCH = 1024


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


def bare(index: BinaryIndex, queries: np.ndarray, k: int, seconds: float) -> float:
    """Queries/s of the index alone, batches of 1,024, all cores of this process."""
    index.search(queries[:BATCH], k=k)
    started, n = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        index.search(queries[n % 8 * BATCH : (n % 8 + 1) * BATCH], k=k)
        n += 1
    return n * BATCH / (time.perf_counter() - started)


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

    def row(
        self, case: str, took: float, per_request: int, bare_rate: float | None = None, **more: Any
    ) -> None:
        """Prints the row; with ``bare_rate``, the share of the bare index's queries/s too."""
        rate = len(self.times) / took
        ratio = {} if bare_rate is None else {"ratio_of_bare_index": rate * per_request / bare_rate}
        row(
            case,
            **ratio,
            connections=self.connections,
            seconds=took,
            requests_per_s=rate,
            queries_per_s=rate * per_request,
            p50_ms=float(np.percentile(self.times, 50)) * 1000,
            p99_ms=float(np.percentile(self.times, 99)) * 1000,
            requests=len(self.times),
            errors=len(self.errors),
            first_error=self.errors[0] if self.errors else None,
            wrong_answers=self.wrong,
            **more,
        )


async def single_json(url: str, queries: np.ndarray, truth: SearchResult, k: int, load: Load) -> None:
    limits = httpx.Limits(max_connections=load.connections)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:

        async def once(i: int) -> bool:
            at = i % len(queries)
            answer = await http.post("/v1/search", json={"codes": [queries[at].tobytes().hex()], "k": k})
            answer.raise_for_status()
            return answer.json()["results"][0]["ids"] == truth.ids[at].tolist()

        load.row("json, one code", await load.run(once), 1, k=k)


async def arrow_batches(
    url: str,
    queries: np.ndarray,
    truth: dict[int, SearchResult],
    k: int,
    load: Load,
    case: str,
    meanwhile: Awaitable[None] | None = None,
    bare_rate: float | None = None,
) -> None:
    """``truth`` is the right answer a version; an answer of no version or of another one is wrong."""
    async with AsyncClient(url, parallel=load.connections, timeout_s=60, retry_s=60) as client:

        async def once(i: int) -> bool:
            at = i % (len(queries) // BATCH) * BATCH
            hits = await client.search(queries[at : at + BATCH], k=k)
            load.versions.add(hits.version)
            right = truth.get(hits.version)  # type: ignore[arg-type]
            return right is not None and np.array_equal(hits.ids, right.ids[at : at + BATCH])

        took = await load.run(once, meanwhile)
        load.row(case, took, BATCH, bare_rate, k=k, versions=sorted(map(str, load.versions)))


async def kill_replica(kind: str, after_s: float) -> None:
    """Ends one replica process at once, as a crash would."""
    import ray

    await asyncio.sleep(after_s)
    alive = [
        actor for actor in ray.util.list_named_actors(all_namespaces=True) if f"#{kind}#" in actor["name"]
    ]
    ray.kill(ray.get_actor(alive[0]["name"], namespace=alive[0]["namespace"]), no_restart=True)


async def swap(folder: str, codes: np.ndarray, ids: np.ndarray, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await asyncio.to_thread(lambda: BinaryIndex.load(folder).add(codes, ids))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codes", type=int, default=1_281_167)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--index-replicas", type=int, default=1)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hashnet-bench-") as run:
        codes = clustered_codes(wanted.codes)
        index = BinaryIndex.from_arrays(codes)
        index.save(f"{run}/index")
        queries = clustered_codes(8 * BATCH, seed=1)
        queries[:] = codes[np.random.default_rng(2).integers(0, len(codes), len(queries))]
        queries ^= np.packbits(np.random.default_rng(3).random((len(queries), 64)) < 0.05, axis=1)
        first = index.search(queries, k=wanted.k)
        bare_rate = bare(index, queries, wanted.k, min(wanted.seconds, 20))
        row("bare index", codes=len(codes), n_bits=64, k=wanted.k, queries_per_s=bare_rate, **_engine(index))
        config = ServeConfig(
            run=run, port=free_ports(1)[0], index_replicas=wanted.index_replicas, follow_s=0.5
        )
        with Server(config):
            serve_cases(config.url, run, index, queries, first, bare_rate, wanted)
        row(
            "bare index, afterwards",
            k=wanted.k,
            queries_per_s=bare(index, queries, wanted.k, min(wanted.seconds, 20)),
        )


def _engine(index: BinaryIndex) -> dict[str, Any]:
    about = index.describe()
    return {"engine": about["engine"], "threads": about["threads"]}


def serve_cases(
    url: str,
    run: str,
    index: BinaryIndex,
    queries: np.ndarray,
    first: SearchResult,
    bare_rate: float,
    wanted: argparse.Namespace,
) -> None:
    k, truth = wanted.k, {index.version: first}
    short = max(wanted.seconds / 3, 15)

    def load(seconds: float) -> Load:
        return Load(wanted.connections, seconds)

    asyncio.run(single_json(url, queries, first, k, load(wanted.seconds)))
    asyncio.run(
        arrow_batches(url, queries, truth, k, load(wanted.seconds), "arrow, 1024 codes", bare_rate=bare_rate)
    )
    for kind in ("IndexReplica", "HttpReplica"):
        asyncio.run(
            arrow_batches(
                url, queries, truth, k, load(short), f"arrow, {kind} killed", kill_replica(kind, short / 3)
            )
        )
    grown = BinaryIndex.load(f"{run}/index")
    new_codes, new_ids = queries[::7].copy(), np.arange(len(queries[::7])) + 10_000_000
    after = BinaryIndex.from_arrays(
        np.concatenate([grown.codes(grown.ids()), new_codes]), np.concatenate([grown.ids(), new_ids])
    )
    truth[index.version + 1] = after.search(queries, k=k)
    change = swap(f"{run}/index", new_codes, new_ids, short / 3)
    asyncio.run(arrow_batches(url, queries, truth, k, load(short), "arrow, index swapped", change))


if __name__ == "__main__":
    main()
