"""Search and build rates of the index against other engines and the bare loop, as ratios from one run.

    python tests/bench/index.py [--rows 1281167] [--only exact,asymmetric,filtered,rescored,…] [--one-core]

Prints one JSON row per case. Codes are drawn in 1,000 clusters, as a trained model's are. Each case
takes turns with its peers and keeps the best of its runs, so that a busy machine troubles all alike;
exact answers are compared to the last id before anything is timed. Peers: FAISS's indexes; usearch's
exact Hamming search; numkong's distances; numpy; LanceDB, pgvector and qdrant-edge where installed; and
the bare loop, xor + popcount over the same codes on the same cores, which keeps nothing. Memory is what a
process grows by that opens one engine and searches 1,024 queries.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
import psutil
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet import BinaryIndex
from hashnet.codes import as_words, pack_signs, unpack_codes
from hashnet.index.segment import KEPT_SELECTIONS, read_code_blocks
from hashnet.kernels import exact, hamming
from hashnet.kernels.jit import compiled, default_threads, run_all
from hashnet.store import CodeStore, write_store
from tests.bench.peers import QdrantVectors, open_peer

CLUSTERS, NOISE = 1000, 0.1
SPEND_S = 2.0  # on one case with its peers
JUDGED = 200  # queries that a recall is of, whatever the batch that is timed

clock = time.perf_counter
T = TypeVar("T")


def draw(rows: int, n_bits: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes (rows, n_bytes), labels, 1,024 queries) around the same centres."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 256, (CLUSTERS, n_bits // 8), dtype=np.uint8)
    labels = rng.integers(0, CLUSTERS, rows + 1024)
    drawn = centres[labels]
    for start in range(0, len(drawn), 65_536):  # the noise of one block at a time
        block = drawn[start : start + 65_536]
        block ^= np.packbits(rng.random((len(block), n_bits)) < NOISE, axis=1)
    return drawn[:rows], labels[:rows], drawn[rows:]


def best(calls: dict[str, Callable[[], Any]], spend_s: float = SPEND_S) -> dict[str, float]:
    """Seconds of the fastest run of each call; they take turns for ``spend_s`` or three rounds."""
    times = {name: float("inf") for name in calls}
    started, rounds = clock(), 0
    while rounds < 3 or (clock() - started < spend_s and rounds < 200):
        for name, call in calls.items():
            begun = clock()
            call()
            times[name] = min(times[name], clock() - begun)
        rounds += 1
    return times


def row(case: str, **values: Any) -> None:
    rounded = {n: round(v, 4) if isinstance(v, float) else v for n, v in values.items()}
    print(json.dumps({"bench": "index", "case": case} | rounded), flush=True)


def faiss_index(index: T, rows: np.ndarray) -> T:
    """``index`` with these rows."""
    index.add(rows)  # type: ignore[attr-defined]
    return index


@compiled
def _bare(codes, row_bytes, n, queries, out):  # type: ignore[no-untyped-def]
    total = 0
    words, block = hamming.transposed_words(row_bytes, len(queries)), hamming.block_rows(row_bytes)
    for start in range(0, n, block):
        count = min(block, n - start)
        if words.size:
            hamming.fill_words(codes, start * row_bytes, len(codes), row_bytes, count, words)
        for j in range(len(queries)):
            hamming.block_distances(codes, start * row_bytes, row_bytes, count, words, queries[j], out)
            total += out[0]
    return total


def bare(codes: np.ndarray, queries: np.ndarray) -> None:
    """All distances, none kept, on all cores."""
    threads, words = default_threads(), np.array(as_words(queries))
    dtype = np.uint8 if codes.shape[1] < 32 else np.uint16

    def scan(part: np.ndarray, few: np.ndarray) -> None:
        _bare(part.reshape(-1), codes.shape[1], len(part), few, np.empty(hamming.BLOCK, dtype))

    if len(queries) >= threads:
        run_all([partial(scan, codes, words[i::threads].copy()) for i in range(threads)])
    else:
        cuts = np.linspace(0, len(codes), threads + 1).astype(int)
        run_all([partial(scan, codes[cuts[i] : cuts[i + 1]], words) for i in range(threads)])


def bench_exact(all_rows: int) -> None:
    import numkong
    from usearch.index import MetricKind, ScalarKind
    from usearch.index import search as usearch_search

    for n_bits in (64, 32, 128, 48, 16, 256, 512, 1024, 3072):
        rows = all_rows if n_bits <= 256 else all_rows // 8
        codes, _, queries = draw(rows, n_bits)
        index = BinaryIndex.from_arrays(codes)
        flat = faiss_index(faiss.IndexBinaryFlat(n_bits), codes)
        full, long = n_bits in (64, 32, 128), n_bits >= 512
        packed = numkong.hammings_pack(codes) if long else None
        for k in (10, 100, 1000, 5000) if full else (10, 100):
            for batch in (1, 32, 1024) if full or (long and k == 10) else (1, 32):
                asked = queries[:batch]
                far, near = flat.search(asked, k)
                hits = index.search(asked, k)
                assert (hits.ids == near).all()
                assert (hits.distances == far).all()
                calls = {
                    "ours": partial(index.search, asked, k),
                    "faiss": partial(flat.search, asked, k),
                    "bare": partial(bare, codes, asked),
                }
                if n_bits == 64 and k <= 100 and batch <= 32:
                    calls["usearch"] = partial(
                        usearch_search,
                        codes,
                        asked,
                        k,
                        MetricKind.Hamming,
                        exact=True,
                        dtype=ScalarKind.B1,
                        threads=default_threads(),
                    )
                if long and k == 10:
                    distances = numkong.empty((batch, rows), dtype="uint32")
                    calls["numkong"] = partial(numkong_distances, asked, packed, distances)
                if long and batch == 1:
                    calls["reading"] = partial(read_once, codes)
                seconds = best(calls)
                row(
                    f"exact {n_bits} bits, k = {k}, batch {batch}",
                    rows=rows,
                    batch=batch,
                    queries_per_s=batch / seconds["ours"],
                    faiss_queries_per_s=batch / seconds["faiss"],
                    ratio=seconds["faiss"] / seconds["ours"],
                    of_bare_loop=seconds["bare"] / seconds["ours"],
                    **{
                        f"over_{peer}": seconds[peer] / seconds["ours"]
                        for peer in ("usearch", "numkong")
                        if peer in seconds
                    },
                    **({"of_reading": seconds["reading"] / seconds["ours"]} if "reading" in seconds else {}),
                    latency_ms=seconds["ours"] * 1e3,
                    ids_equal=True,
                )


def read_once(codes: np.ndarray) -> None:
    """Every byte of the codes once, on all cores: what one query cannot be faster than."""
    run_all(
        [
            partial(np.bitwise_or.reduce, part)
            for part in np.array_split(as_words(codes).reshape(-1), default_threads())
        ]
    )


def numkong_distances(queries: np.ndarray, packed: Any, distances: Any) -> None:
    """All distances uint32 (q, n) to packed codes, the queries divided among the cores; none are kept."""
    import numkong

    cuts = np.linspace(0, len(queries), min(default_threads(), len(queries)) + 1).astype(int).tolist()
    some = [
        partial(numkong.hammings_packed, queries, packed, out=distances, start_row=a, end_row=b)
        for a, b in pairwise(cuts)
    ]
    run_all(some)


def bench_filtered(rows: int) -> None:
    """A condition on a column that lets through ever fewer rows; FAISS has a bitmap of the same rows.

    An index keeps the rows of conditions it has seen: a new one meets a bitmap made anew, a repeated one a
    bitmap that is kept. LanceDB and pgvector, one query at a time on an indexed column, meet a new one.
    """
    codes, _, queries = draw(rows, 64)
    percentile = np.random.default_rng(2).permutation(rows) / rows
    index = BinaryIndex.from_arrays(codes, columns={"place": percentile})
    ivf = BinaryIndex.from_arrays(codes, kind="ivf", columns={"place": percentile})
    flat = faiss.IndexBinaryFlat(64)
    flat.add(codes)

    def by_selector(share: float, asked: np.ndarray, bitmap: np.ndarray | None = None) -> Any:
        bitmap = np.packbits(percentile < share, bitorder="little") if bitmap is None else bitmap
        selector = faiss.IDSelectorBitmap(bitmap)
        return flat.search(asked, 10, params=faiss.SearchParameters(sel=selector))

    spaces = itertools.cycle(range(1, 1 + 2 * KEPT_SELECTIONS))  # never 0: that text is the repeated one

    def by_new_condition(where: str, asked: np.ndarray) -> Any:
        return index.search(asked, 10, where=where + " " * next(spaces))  # the same rows, not seen lately

    with ExitStack() as stack:
        others = {}
        for name in ("LanceDB flat", "pgvector"):
            try:
                others[name] = stack.enter_context(open_peer(name, codes, percentile)).connect()
            except ImportError as error:
                row(f"filtered, {name}", skipped=f"not installed: {error}")
        for share, batch in itertools.product((0.0001, 0.001, 0.01, 0.1, 0.5, 1.0), (1, 32)):
            where, asked = f"place < {share}", queries[:batch]
            hits, (far, near) = index.search(asked, 10, where=where), by_selector(share, asked)
            assert (hits.ids == near).all()
            some = queries[:JUDGED]
            judged = [one.search(some, 10, where=where).distances.astype(np.uint32) for one in (ivf, index)]
            calls = {
                "ours": partial(by_new_condition, where, asked),
                "faiss": partial(by_selector, share, asked),
                "repeated": partial(index.search, asked, 10, where=where),
                "faiss, kept": partial(
                    by_selector, share, asked, np.packbits(percentile < share, bitorder="little")
                ),
                "ivf": partial(ivf.search, asked, 10, where=where),
            }
            if batch == 1:
                for name, search in others.items():
                    calls[name] = partial(search, asked[0], 10, share)
                    ids = calls[name]()
                    assert (percentile[ids] < share).all()
                    distances = np.sort(np.bitwise_count(codes[ids] ^ asked[0]).sum(axis=1))
                    assert (distances == far[0][far[0] >= 0][: len(ids)]).all(), name
            seconds = best(calls)
            over = {
                f"over_{name.split()[0].lower()}": seconds[name] / seconds["ours"]
                for name in others
                if name in seconds
            }
            row(
                f"filtered to {share:.2%}, 64 bits, k = 10, batch {batch}",
                rows=rows,
                batch=batch,
                queries_per_s=batch / seconds["ours"],
                ratio=seconds["faiss"] / seconds["ours"],
                **over,
                repeated_queries_per_s=batch / seconds["repeated"],
                repeated_ratio=seconds["faiss, kept"] / seconds["repeated"],
                ivf_queries_per_s=batch / seconds["ivf"],
                ivf_recall=float((judged[0] <= judged[1][:, -1:]).mean()),
                latency_ms=seconds["ours"] * 1e3,
                ids_equal=True,
            )


def bench_asymmetric(rows: int) -> None:
    """Logits against codes. Exact peers: numpy (matrix product, argpartition) and FAISS's IndexFlatIP take ±1
    as floats, its IndexPQ looks up sums of 8 bits. IndexPQFastScan rounds sums of 4 bits to bytes.
    """
    for n_bits in (64, 128):
        codes, _, queries = draw(rows, n_bits)
        strength = np.abs(np.random.default_rng(1).normal(1, 0.5, (1024, n_bits))).astype(np.float32)
        logits = unpack_codes(queries) * strength
        signs = unpack_codes(codes).astype(np.float32)
        index = BinaryIndex.from_arrays(codes)
        flat = faiss_index(faiss.IndexFlatIP(n_bits), signs)
        pq = product_quantiser(faiss.IndexPQ, signs, 8)
        rounded = product_quantiser(faiss.IndexPQFastScan, signs, 4)
        for k, batch in ((10, 1), (10, 32), (10, 1024), (100, 32), (1000, 32)):
            asked = logits[:batch]
            hits = index.search(logits=asked, k=k)
            assert np.allclose(hits.scores, flat.search(asked, k)[0], rtol=1e-5)
            assert np.allclose(hits.scores, pq.search(asked, k)[0], rtol=1e-5)
            found = rounded.search(logits[:JUDGED], k)[1]  # (q, k)
            true = np.einsum("qkb,qb->qk", signs[found], logits[:JUDGED])
            worst = index.search(logits=logits[:JUDGED], k=k).scores[:, -1:]  # type: ignore[index]
            seconds = best(
                {
                    "ours": partial(index.search, logits=asked, k=k),
                    "hamming": partial(index.search, queries[:batch], k),
                    "re-ranked": partial(index.search, logits=asked, k=k, oversample=10),
                    "faiss": partial(flat.search, asked, k),
                    "pq": partial(pq.search, asked, k),
                    "fast scan": partial(rounded.search, asked, k),
                    "numpy": partial(matrix_product, signs, asked, k),
                },
            )
            row(
                f"asymmetric {n_bits} bits, k = {k}, batch {batch}",
                rows=rows,
                queries_per_s=batch / seconds["ours"],
                comparisons_per_s=batch * rows / seconds["ours"],
                ratio=min(seconds["faiss"], seconds["pq"], seconds["numpy"]) / seconds["ours"],
                over_faiss=seconds["faiss"] / seconds["ours"],
                over_pq=seconds["pq"] / seconds["ours"],
                over_fast_scan=seconds["fast scan"] / seconds["ours"],
                fast_scan_recall=float((true >= worst - 1e-4).mean()),
                over_numpy=seconds["numpy"] / seconds["ours"],
                of_our_hamming=seconds["hamming"] / seconds["ours"],
                of_re_ranking=seconds["re-ranked"] / seconds["ours"],
                latency_ms=seconds["ours"] * 1e3,
            )


def product_quantiser(kind: Any, signs: np.ndarray, bits: int) -> Any:
    """FAISS's index of ±1 vectors whose centroids are all patterns of ``bits`` signs: nothing is lost."""
    index = kind(signs.shape[1], signs.shape[1] // bits, bits, faiss.METRIC_INNER_PRODUCT)
    patterns = (np.arange(1 << bits)[:, None] >> np.arange(bits) & 1) * 2.0 - 1  # (2 ** bits, bits)
    tables = np.tile(patterns.astype(np.float32), (signs.shape[1] // bits, 1))
    faiss.copy_array_to_vector(tables.ravel(), index.pq.centroids)
    index.is_trained = True
    return faiss_index(index, signs)


def matrix_product(signs: np.ndarray, logits: np.ndarray, k: int) -> np.ndarray:
    """The k best rows of each query, best first, from all scores of 32 queries at a time."""
    found = []
    for some in np.split(logits, range(32, len(logits), 32)):
        scores = some @ signs.T
        near = np.argpartition(scores, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(scores, near, 1), axis=1)
        found.append(np.take_along_axis(near, order, 1))
    return np.concatenate(found)


def bench_approximate(rows: int) -> None:
    codes, _, queries = draw(rows, 64)
    flat = BinaryIndex.from_arrays(codes)
    theirs = faiss_index(faiss.IndexBinaryFlat(64), codes)
    truth = flat.search(queries, 100).distances[:, -1:]
    started = time.perf_counter()
    ivf = BinaryIndex.from_arrays(codes, kind="ivf")
    build_s = time.perf_counter() - started
    for recall in (None, 0.95, 0.99):
        if recall is not None:
            ivf.tune(recall=recall, k=100)
        raw = ivf._state.segments[0].rows.probing(
            ivf.describe()["options"]["nprobe"]
        )  # FAISS's own index of the same lists and nprobe
        seconds = best(
            {
                "ours": partial(ivf.search, queries, 100),
                "raw": partial(raw.search, queries, 100),
                "flat": partial(flat.search, queries, 100),
                "faiss": partial(theirs.search, queries, 100),
            }
        )
        options = ivf.describe()["options"]
        row(
            f"ivf {options['nlist']} lists, nprobe {options['nprobe']}, k = 100, batch 1024",
            rows=rows,
            recall=float((ivf.search(queries, 100).distances <= truth).mean()),
            tuned_for=recall,
            queries_per_s=1024 / seconds["ours"],
            ratio=seconds["faiss"] / seconds["ours"],
            over_our_flat=seconds["flat"] / seconds["ours"],
            of_faiss_ivf=seconds["raw"] / seconds["ours"],
            build_s=build_s,
        )
    hashed = BinaryIndex.from_arrays(codes, kind="multihash", nhash=4, bits=16)
    for radius in (0, 2, 3):
        found = hashed.search_radius(queries, radius)
        exact_hits = flat.search_radius(queries, radius)
        seconds = best(
            {
                "ours": partial(hashed.search_radius, queries, radius),
                "flat": partial(flat.search_radius, queries, radius),
                "faiss": partial(theirs.range_search, queries, radius + 1),
            }
        )
        row(
            f"multihash 4 x 16, radius {radius}, batch 1024",
            rows=rows,
            recall=float(np.mean([len(a) == len(b) for a, b in zip(found, exact_hits, strict=True)])),
            equal_to_flat=found == exact_hits,
            queries_per_s=1024 / seconds["ours"],
            ratio=seconds["faiss"] / seconds["ours"],
            over_our_flat=seconds["flat"] / seconds["ours"],
            flat_over_faiss=seconds["faiss"] / seconds["flat"],
        )
    some = min(rows, 100_000)
    started = time.perf_counter()
    graph = BinaryIndex.from_arrays(codes[:some], kind="hnsw")
    build_s = time.perf_counter() - started
    small = BinaryIndex.from_arrays(codes[:some])
    truth = small.search(queries, 10).distances[:, -1:]
    seconds = best({"ours": partial(graph.search, queries, 10), "flat": partial(small.search, queries, 10)})
    row(
        "hnsw 32 links, ef 128, k = 10, batch 1024",
        rows=some,
        recall=float((graph.search(queries, 10).distances <= truth).mean()),
        queries_per_s=1024 / seconds["ours"],
        over_our_flat=seconds["flat"] / seconds["ours"],
        build_s=build_s,
    )


def bench_rescored(all_rows: int, width: int = 256) -> None:
    """The 10 nearest vectors by cosine: codes of their signs and then vectors, against qdrant-edge, which
    rescores binary quantisation too, and against exact search of float32 vectors.
    """
    rows = all_rows // 4
    vectors, queries = draw_vectors(rows, width)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/rows.npy", vectors)
        np.save(f"{folder}/queries.npy", queries)
        BinaryIndex.from_arrays(pack_signs(vectors), features=vectors).save(f"{folder}/index")
        index, flat = (OPENED[name](folder) for name in ("hashnet rescored", "IndexFlatIP"))
        try:
            QdrantVectors.write(f"{folder}/qdrant", vectors)
            shard = QdrantVectors(f"{folder}/qdrant")
        except ImportError as error:
            shard = None
            row("rescored, qdrant-edge", skipped=f"not installed: {error}")
        nearest = flat(queries, 10)[1]

        def recall(found: Any) -> float:
            pairs = zip(found, nearest, strict=False)
            return sum(len(np.intersect1d(a, b)) for a, b in pairs) / (10 * len(found))

        for oversample, batch in itertools.product((1, 4, 16), (1, 32)):
            asked = queries[:batch]
            calls = {"ours": partial(index, asked, 10, oversample), "flat": partial(flat, asked, 10)}
            values = {"recall": recall(index(queries[:JUDGED], 10, oversample).ids)}
            if shard is not None and batch == 1:
                calls["qdrant"] = partial(shard.search, asked[0], 10, float(oversample))
                found = [shard.search(query, 10, float(oversample)) for query in queries[:JUDGED]]
                values["qdrant_recall"] = recall(found)
            seconds = best(calls)
            if "qdrant" in seconds:
                values["over_qdrant"] = seconds["qdrant"] / seconds["ours"]
                values["qdrant_queries_per_s"] = batch / seconds["qdrant"]
            row(
                f"rescored {width} bits and values, oversample {oversample}, batch {batch}",
                rows=rows,
                batch=batch,
                queries_per_s=batch / seconds["ours"],
                ratio=seconds["flat"] / seconds["ours"],
                faiss_queries_per_s=batch / seconds["flat"],
                **values,
                latency_ms=seconds["ours"] * 1e3,
            )
        del index, flat, shard
        for name in ("hashnet rescored", "IndexFlatIP", "qdrant-edge"):
            weigh(f"{rows:,} vectors of {width} values, {name}", folder, name)


def bench_memory(rows: int) -> None:
    """What each engine takes in memory for the same codes of 64 bits."""
    codes, _, queries = draw(rows, 64)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/rows.npy", codes)
        np.save(f"{folder}/queries.npy", queries)
        for name in ("hashnet flat", "hashnet ivf", "hashnet multihash", "IndexBinaryFlat"):
            weigh(f"{rows:,} codes of 64 bits, {name}", folder, name)
        np.save(f"{folder}/rows.npy", unpack_codes(codes).astype(np.float32))
        np.save(f"{folder}/queries.npy", unpack_codes(queries).astype(np.float32))
        for name in ("IndexFlatIP", "IndexPQ"):
            weigh(f"{rows:,} codes of 64 bits, {name}", folder, name)


def weigh(what: str, folder: str, name: str) -> None:
    """Prints the row of one engine, opened in a process of its own and searched with all queries."""
    command = [sys.executable, __file__, "--inside", folder, "--engine", name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 0:
        row(f"memory, {what}", **json.loads(done.stdout))
    else:
        row(f"memory, {what}", skipped=done.stderr.strip().splitlines()[-1])


def weigh_inside(folder: str, name: str) -> None:
    """Opens an engine in this process, which did nothing else before; prints the memory that took."""
    BinaryIndex.from_arrays(np.zeros((9, 8), np.uint8)).search(np.zeros((1, 8), np.uint8), 1)
    queries = np.load(f"{folder}/queries.npy")
    before = psutil.Process().memory_info().rss
    search = OPENED[name](folder)
    search(queries, 10)
    gc.collect()
    print(json.dumps({"memory_mb": round((psutil.Process().memory_info().rss - before) / 1e6, 1)}))


def _opened(make: Callable[[np.ndarray], Any]) -> Callable[[str], Any]:
    return lambda folder: make(np.load(f"{folder}/rows.npy")).search


def _rescored(folder: str) -> Callable[..., Any]:
    index = BinaryIndex.load(f"{folder}/index")

    def search(queries: np.ndarray, k: int, oversample: float = 4) -> Any:
        codes = pack_signs(queries)
        return index.search(codes, k, rescore="features", features=queries, oversample=oversample)

    return search


def _qdrant(folder: str) -> Callable[..., Any]:
    shard = QdrantVectors(f"{folder}/qdrant")
    return lambda queries, k: [shard.search(query, k, 4.0) for query in queries]


OPENED: dict[str, Callable[[str], Callable[..., Any]]] = {  # engine → a folder's rows as a search of queries
    "hashnet flat": _opened(BinaryIndex.from_arrays),
    "hashnet ivf": _opened(partial(BinaryIndex.from_arrays, kind="ivf")),
    "hashnet multihash": _opened(partial(BinaryIndex.from_arrays, kind="multihash")),
    "hashnet rescored": _rescored,
    "IndexBinaryFlat": _opened(lambda codes: faiss_index(faiss.IndexBinaryFlat(codes.shape[1] * 8), codes)),
    "IndexFlatIP": _opened(lambda rows: faiss_index(faiss.IndexFlatIP(rows.shape[1]), rows)),
    "IndexPQ": _opened(lambda signs: product_quantiser(faiss.IndexPQ, signs, 8)),
    "qdrant-edge": _qdrant,
}


def draw_vectors(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(vectors, 1,024 queries), float32 of norm 1 in clusters: 32 dimensions matter, as in embeddings."""
    rng = np.random.default_rng(0)
    centres, lift = rng.standard_normal((CLUSTERS, 32)), rng.standard_normal((32, width)) / 32**0.5
    drawn = np.empty((rows + 1024, width), np.float32)
    for start in range(0, len(drawn), 65_536):
        block = drawn[start : start + 65_536]
        latent = centres[rng.integers(0, CLUSTERS, len(block))] + rng.standard_normal((len(block), 32)) * 0.7
        block[:] = latent @ lift + rng.standard_normal(block.shape) * 0.2
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn[:rows], drawn[rows:]


def bench_build(rows: int) -> None:
    codes, labels, queries = draw(rows, 64)
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(f"{folder}/codes", codes, np.arange(rows) * 2, labels, n_classes=CLUSTERS)
        paths, columns = store.paths(), ["row_id", "code", "labels"]

        def save() -> None:
            BinaryIndex.build(store).save(f"{folder}/index")

        seconds = best(
            {
                "build": partial(BinaryIndex.build, store),
                "without labels": partial(BinaryIndex.build, store, labels=False),
                "build and save": save,
                "read": lambda: [pq.read_table(path, columns=columns) for path in paths],
                "read as one": lambda: pq.read_table(paths, columns=columns),
                "read without labels": lambda: pq.read_table(paths, columns=columns[:2]),
                "load": partial(BinaryIndex.load, f"{folder}/index") if save() is None else save,
            },
            spend_s=20,
        )
        row(
            "build flat from Parquet, labels kept",
            rows=rows,
            shards=len(paths),
            build_s=seconds["build"],
            rows_per_s=rows / seconds["build"],
            over_reading=seconds["build"] / seconds["read"],
            over_reading_as_one=seconds["build"] / seconds["read as one"],
            with_save_over_reading=seconds["build and save"] / seconds["read"],
        )
        row(
            "build flat from Parquet, without labels",
            rows=rows,
            build_s=seconds["without labels"],
            over_reading_as_one=seconds["without labels"] / seconds["read without labels"],
        )
        memory = subprocess.run(
            [sys.executable, __file__, "--inside", f"{folder}/codes"],
            check=True,
            capture_output=True,
            text=True,
        )
        row("memory of building flat from Parquet, labels kept", rows=rows, **json.loads(memory.stdout))
        row("load by memory map, sha256 checked", rows=rows, seconds=seconds["load"])
        index = BinaryIndex.load(f"{folder}/index")
        started = time.perf_counter()
        for start in range(0, 1024, 64):
            index.add(queries[start : start + 64])
        row("add 64 codes, committed to disk", rows=rows, seconds=(time.perf_counter() - started) / 16)
        started = time.perf_counter()
        index.compact()
        row("compact", rows=rows, seconds=time.perf_counter() - started)


def build_inside(store: str) -> None:
    """Builds in this process, which did nothing else before; prints the memory that took."""
    BinaryIndex.from_arrays(np.zeros((9, 8), np.uint8), labels=[0] * 9)
    next(
        read_code_blocks(CodeStore.open(store))
    )  # what Parquet, kernels and threads take is no matter of rows
    before = psutil.Process().memory_info().rss
    index = BinaryIndex.build(store)
    peak, resident = peak_bytes() - before, psutil.Process().memory_info().rss - before
    print(json.dumps({"peak_bytes_a_row": peak / len(index), "resident_bytes_a_row": resident / len(index)}))


def peak_bytes() -> int:
    """The most memory this process ever held; getrusage would count its parent's, too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) << 10


def bench_large(rows: int) -> None:
    """What docs/choosing.md reckons with: a flat index of 100 M codes or more, on one machine."""
    rng = np.random.default_rng(0)
    codes = np.frombuffer(rng.bytes(rows * 8), dtype=np.uint8).reshape(rows, 8)
    queries = rng.integers(0, 256, (256, 8), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        index = BinaryIndex.from_arrays(codes)
        index.save(folder)
        build_s = time.perf_counter() - started
        del index, codes
        before = psutil.Process().memory_info().rss
        loads = {
            "checked": partial(BinaryIndex.load, folder),
            "plain": partial(BinaryIndex.load, folder, verify=False),
        }
        times = best(loads)
        index = BinaryIndex.load(folder, verify=False)
        for batch, k in ((1, 10), (1, 1000), (32, 100), (256, 100)):
            seconds = best({"ours": partial(index.search, queries[:batch], k)}, spend_s=10)["ours"]
            row(
                f"flat of {rows:,} codes, 64 bits, k = {k}, batch {batch}",
                rows=rows,
                latency_ms=seconds * 1e3,
                queries_per_s=batch / seconds,
                comparisons_per_s=batch * rows / seconds,
            )
        row(
            f"flat of {rows:,} codes, 64 bits",
            rows=rows,
            build_and_save_s=build_s,
            load_s=times["plain"],
            load_and_check_s=times["checked"],
            resident_bytes=psutil.Process().memory_info().rss - before,
        )


BENCHES = {
    "exact": bench_exact,
    "asymmetric": bench_asymmetric,
    "filtered": bench_filtered,
    "rescored": bench_rescored,
    "approximate": bench_approximate,
    "memory": bench_memory,
    "build": bench_build,
    "large": bench_large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=1_281_167)
    parser.add_argument(
        "--large-rows", type=int, default=100_000_000, help="for --only large (4 GB of memory)"
    )
    parser.add_argument("--only", default="exact,asymmetric,filtered,rescored,approximate,memory,build")
    parser.add_argument(
        "--one-core",
        action="store_true",
        help="one thread each, and its CPU time: for a machine that is busy",
    )
    # a store to build from, or a folder of rows and the engine to open them with: for the memory that takes
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        weigh_inside(arguments.inside, arguments.engine)
        return
    if arguments.inside:
        build_inside(arguments.inside)
        return
    if arguments.one_core:
        global clock
        clock = time.thread_time
        os.environ["OMP_NUM_THREADS"] = "1"
    faiss.omp_set_num_threads(default_threads())
    exact.warm_up(64)
    row(
        "machine",
        cores=os.cpu_count(),
        threads=default_threads(),
        faiss=faiss.__version__,
        times="CPU" if arguments.one_core else "wall",
        load=os.getloadavg()[0],
    )
    for name in arguments.only.split(","):
        BENCHES[name](arguments.large_rows if name == "large" else arguments.rows)


if __name__ == "__main__":
    main()
