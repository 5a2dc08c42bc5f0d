"""Vectors of items as they are stored for rescoring: float16, or int8 with a scale per row; read row by row.

A file is Parquet with the columns row_id, ``feature`` (the bytes of a vector), ``scale`` (int8 only) and
``check``. ``feature`` is uncompressed and one page, so its rows lie one after another: they are memory-mapped
and only the requested ones are read (on an object store: fetched). A row that is read is compared with
its check, because hashing the whole file would read all of it. The check is a sum of the row's 8-byte words,
each times an odd number of its own, and of its id and scale: a single word that changed always shows, several
together go unseen once in 2**64 times.

>>> import numpy as np
>>> vectors = Vectors.of_arrays(np.array([7, 9]), np.array([[3.0, 4.0], [0.0, 2.0]]))
>>> vectors.scores(np.array([[0.0, 1.0]], np.float32), np.array([[9, 7, -1]]), "cosine").round(6).tolist()
[[1.0, 0.800000011920929, -inf]]
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.errors import CodeError, DataError, FormatError
from hashnet.io import as_array, binary_column, binary_matrix, check_file, storage

METRICS = ("cosine", "inner_product")
MAX_PAGE = 1 << 30  # bytes of one file's vectors: a Parquet page has less than 2**31
READERS = 16  # files opened, or rows of an object store fetched, at once
ROWS_PER_THREAD = 1024  # fewer are scored before another thread has woken up
DAMAGED = "encode the features again, or restore the file"


def row_bytes(width: int, dtype: str) -> int:
    """Bytes of a stored row: a multiple of 8."""
    return -(-width * np.dtype(dtype).itemsize // 8) * 8


def vector_schema(width: int, dtype: str) -> list[pa.Field]:
    """The columns of a file that hold its vectors."""
    fields = [pa.field("feature", pa.binary(row_bytes(width, dtype)), nullable=False)]
    if dtype == "int8":
        fields.append(pa.field("scale", pa.float32(), nullable=False))
    return [*fields, pa.field("check", pa.uint64(), nullable=False)]


def vector_columns(ids: np.ndarray, vectors: np.ndarray, dtype: str) -> dict[str, pa.Array]:
    """The columns of ``vector_schema`` for vectors float (n, width)."""
    rows, scales = stored_rows(vectors, dtype)
    if rows.nbytes > MAX_PAGE:
        raise DataError(f"a file of vectors has at most {MAX_PAGE >> 20} MB; give a smaller rows_per_shard")
    columns = {"feature": binary_column(rows)}
    if dtype == "int8":
        columns["scale"] = pa.array(scales)
    return columns | {"check": pa.array(row_checks(rows, ids, scales))}


def stored_rows(vectors: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 (n, row_bytes), scales float32 (n,)) of vectors float (n, width)."""
    scales = np.ones(len(vectors), dtype=np.float32)
    if dtype == "int8":
        largest = np.abs(vectors).max(axis=1, initial=0).astype(np.float32)
        scales = np.where(largest > 0, largest / 127, scales).astype(np.float32)
        values = np.rint(vectors / scales[:, None]).astype(np.int8)
    else:
        with np.errstate(over="ignore"):
            values = vectors.astype(dtype)
        if not np.isfinite(values).all():
            row = int((~np.isfinite(values).all(axis=1)).argmax())
            raise DataError(f"vector {row} does not fit into {dtype}; store them as int8 or float32")
    rows = np.zeros((len(vectors), row_bytes(vectors.shape[1], dtype)), dtype=np.uint8)
    data = np.ascontiguousarray(values).view(np.uint8).reshape(len(vectors), -1)
    rows[:, : data.shape[1]] = data
    return rows, scales


def as_float32(rows: np.ndarray, width: int, dtype: str, scales: np.ndarray) -> np.ndarray:
    """Vectors float32 (n, width) of stored rows uint8 (n, row_bytes)."""
    used = np.ascontiguousarray(rows[:, : width * np.dtype(dtype).itemsize])
    values = used.view(dtype).astype(np.float32)
    return values * scales[:, None] if dtype == "int8" else values


def decoded(table: pa.Table, width: int, dtype: str) -> np.ndarray:
    """Vectors float32 (n, width) of a table with the columns of ``vector_schema``."""
    rows = binary_matrix(table["feature"], row_bytes(width, dtype))
    scales = table["scale"].to_numpy() if dtype == "int8" else np.ones(len(rows), np.float32)
    return as_float32(rows, width, dtype, scales)


@functools.cache
def check_weights(n_words: int) -> np.ndarray:
    """uint64 (n_words + 2,), odd: of the words of a row, of its id and of its scale."""
    drawn = np.random.default_rng(0x5EED).integers(0, 2**63, n_words + 2, dtype=np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


def row_checks(rows: np.ndarray, ids: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint64 (n,): the checks of rows uint8 (n, a multiple of 8), with their ids and scales."""
    words = np.ascontiguousarray(rows).view(np.uint64)
    weights = check_weights(words.shape[1])
    found = ids.view(np.uint64) * weights[-2] + scales.view(np.uint32).astype(np.uint64) * weights[-1]
    for column in range(words.shape[1]):  # one at a time: no second array of the rows' size
        found += words[:, column] * weights[column]
    return found


def check_vectors(vectors: Any, width: int | None, what: str, n: int | None = None) -> np.ndarray:
    """``vectors`` as C-contiguous float32 (n, width), finite; one row may come as 1-D."""
    array = np.atleast_2d(as_array(vectors, what))
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.shape[1]:
        raise CodeError(f"{what} must be numbers of shape (n, width), got {array.dtype} of {array.shape}")
    if width is not None and array.shape[1] != width:
        raise CodeError(
            f"{what} have {array.shape[1]} values, those stored {width}; give vectors of the same model"
        )
    if n is not None and len(array) != n:
        raise CodeError(f"{n} codes came with {len(array)} rows of {what}; give one row per code")
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array).all(axis=1)).argmax())
        raise CodeError(f"row {row} of {what} holds NaN or infinity")
    return array


@dataclass(frozen=True)
class _File:
    """The vectors of one file: where they are, and id, scale and check of each row."""

    uri: str
    start: int  # of the first row in the file
    ids: np.ndarray  # int64 (n,)
    scales: np.ndarray  # float32 (n,)
    checks: np.ndarray  # uint64 (n,)
    mapped: np.ndarray | None  # uint8 (n, row_bytes); None on an object store


class Vectors:
    """Vectors by id, in files or in memory. ``verify=False`` reads rows without comparing their checks."""

    def __init__(self, files: Sequence[_File], width: int, dtype: str, verify: bool = True) -> None:
        self.width, self.dtype, self.verify = width, dtype, verify
        self._files = files
        self.row_bytes = row_bytes(width, dtype)
        self.ids = np.concatenate([np.empty(0, np.int64), *(file.ids for file in files)])
        self._scales = np.concatenate([np.empty(0, np.float32), *(file.scales for file in files)])
        self._checks = np.concatenate([np.empty(0, np.uint64), *(file.checks for file in files)])
        self._first = np.cumsum([0, *(len(file.ids) for file in files)])  # number of each file's first row
        ascending = bool((self.ids[1:] > self.ids[:-1]).all())
        self._order = None if ascending else np.argsort(self.ids, kind="stable")
        self._memory, self._starts = _joined(files)

    @classmethod
    def open(cls, uris: Sequence[str], width: int, dtype: str, verify: bool = True) -> Vectors:
        """The vectors of these files."""
        with ThreadPoolExecutor(READERS) as pool:
            return cls(list(pool.map(lambda uri: _open(uri, width, dtype), uris)), width, dtype, verify)

    @classmethod
    def of_arrays(cls, ids: np.ndarray, vectors: np.ndarray, dtype: str = "float16") -> Vectors:
        """Vectors float (n, width) in memory, as they would be stored."""
        rows, scales = stored_rows(vectors, dtype)
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        return cls([_File("", 0, ids, scales, row_checks(rows, ids, scales), rows)], vectors.shape[1], dtype)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The row of each id, int64; -1 where it has no vector."""
        if not len(self.ids):
            return np.full(ids.shape, -1, dtype=np.int64)
        rows = np.minimum(np.searchsorted(self.ids, ids, sorter=self._order), len(self.ids) - 1)
        rows = rows if self._order is None else self._order[rows]
        return np.where(self.ids[rows] == ids, rows, -1)

    def scores(self, queries: np.ndarray, ids: np.ndarray, metric: str) -> np.ndarray:
        """float32 (q, m) of queries float32 (q, width) and ids (q, m); -inf for an id without a vector."""
        from hashnet.kernels import DTYPES, default_threads, run_all, score_rows  # numba: writers do without

        scores = np.full(ids.shape, -np.inf, dtype=np.float32)
        rows = self.find(ids)
        of_query, place = np.nonzero(rows >= 0)
        if metric == "cosine":
            norms = np.linalg.norm(queries, axis=1, keepdims=True)
            queries = queries / np.where(norms > 0, norms, 1)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        found = np.empty(len(place), dtype=np.float32)
        dtype = DTYPES.index(self.dtype)

        def score(some: slice) -> None:
            at = rows[of_query[some], place[some]]
            memory, starts = self._located(at)
            cosine, mine = metric == "cosine", of_query[some]
            score_rows(memory, starts, dtype, self._scales[at], queries, mine, cosine, found[some])

        pieces = max(1, min(default_threads(), len(place) // ROWS_PER_THREAD))
        cuts = np.linspace(0, len(place), pieces + 1).astype(int).tolist()
        run_all([functools.partial(score, slice(a, b)) for a, b in pairwise(cuts)])
        scores[of_query, place] = found
        return scores

    def take(self, ids: np.ndarray) -> np.ndarray:
        """The vectors of these ids, float32 (n, width); CodeError where one has none."""
        rows = self.find(ids)
        if (rows < 0).any():
            raise CodeError(f"id {ids[(rows < 0).argmax()]} has no vector")
        memory, starts = self._located(rows)
        data = np.empty((len(rows), self.row_bytes), dtype=np.uint8)
        for i, start in enumerate(starts.tolist()):
            data[i] = memory[start : start + self.row_bytes]
        return as_float32(data, self.width, self.dtype, self._scales[rows])

    def blocks(self, n: int = 8192) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids int64 (n,), vectors float32 (n, width)) of all rows, in storage order."""
        for number, file in enumerate(self._files):
            for start in range(0, len(file.ids), n):
                some = np.arange(start, min(start + n, len(file.ids)))
                at = some + self._first[number]
                memory, starts = self._located(at)
                data = memory[int(starts[0]) : int(starts[0]) + len(some) * self.row_bytes]
                yield (
                    file.ids[some],
                    as_float32(data.reshape(len(some), -1), self.width, self.dtype, self._scales[at]),
                )

    def _located(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(memory, where each row starts in it), after a comparison of the rows with their checks."""
        number = np.searchsorted(self._first, rows, side="right") - 1
        within = (rows - self._first[number]) * self.row_bytes
        if self._memory is not None:
            memory, starts = self._memory, self._starts[number] + within
        else:
            memory, starts = self._fetched(number, within), np.arange(len(rows)) * self.row_bytes
        if self.verify:
            from hashnet.kernels import damaged_row

            n_words, weights = self.row_bytes // 8, check_weights(self.row_bytes // 8)
            scale_bits, checks = self._scales[rows].view(np.uint32), self._checks[rows]
            wrong = damaged_row(memory, starts, n_words, weights, self.ids[rows], scale_bits, checks)
            if wrong >= 0:
                raise FormatError(
                    f"{self._files[number[wrong]].uri or 'memory'}: the vector of id "
                    f"{self.ids[rows[wrong]]} is damaged; {DAMAGED}"
                )
        return memory, starts

    def _fetched(self, number: np.ndarray, within: np.ndarray) -> np.ndarray:
        """The bytes of rows of an object store, one after another."""
        opened = {int(i): storage.open_input(self._files[int(i)].uri) for i in np.unique(number)}

        def fetch(i: int) -> bytes:
            file = int(number[i])
            return opened[file].read_at(self.row_bytes, self._files[file].start + int(within[i]))

        try:
            with ThreadPoolExecutor(READERS) as pool:
                return np.frombuffer(bytearray(b"".join(pool.map(fetch, range(len(within))))), np.uint8)
        finally:
            for source in opened.values():
                source.close()


def vector_file(table: pa.Table) -> bytes:
    """The Parquet file of a table with vectors; the same rows are the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression={"feature": "none", "row_id": "zstd", "uri": "zstd", "labels.list.element": "zstd"},
        row_group_size=max(len(table), 1),
        max_rows_per_page=len(table) + 1,
        data_page_size=2 * MAX_PAGE - 1,
        use_dictionary=False,
        write_statistics=["row_id"],
        write_page_checksum=True,
        data_page_version="1.0",
        version="2.6",
    )
    return sink.getvalue().to_pybytes()


def write_vectors(uri: str, ids: np.ndarray, vectors: np.ndarray, dtype: str) -> str:
    """Writes one file of vectors float (n, width); returns its sha256."""
    schema = pa.schema(
        [pa.field("row_id", pa.int64(), nullable=False), *vector_schema(vectors.shape[1], dtype)]
    )
    columns = {"row_id": pa.array(ids), **vector_columns(ids, vectors, dtype)}
    data = vector_file(pa.table(columns, schema=schema))
    storage.write_bytes(uri, data)
    return hashlib.sha256(data).hexdigest()


def read_vectors(uri: str, sha256: str, width: int, dtype: str) -> Vectors:
    """The vectors of one file, which must have this sha256."""
    check_file(uri, sha256, DAMAGED)
    return Vectors.open([uri], width, dtype)


def _open(uri: str, width: int, dtype: str) -> _File:
    """One file, its small columns read, its vectors mapped."""
    names = ["row_id", "scale", "check"] if dtype == "int8" else ["row_id", "check"]
    n_bytes = row_bytes(width, dtype)
    try:
        with pq.ParquetFile(storage.open_input(uri), page_checksum_verification=True) as file:
            table = file.read(names, use_threads=False)
            start, n = _page_start(file.metadata, n_bytes), table.num_rows
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        raise FormatError(f"{uri} does not hold vectors: {error}; {DAMAGED}") from error
    if start < 0 or start + n * n_bytes > storage.size_of(uri):
        raise FormatError(f"{uri} does not hold {n} vectors of {width} x {dtype}; {DAMAGED}")
    scales = table["scale"].to_numpy() if dtype == "int8" else np.ones(n, dtype=np.float32)
    mapped = None
    if not n:
        mapped = np.zeros((0, n_bytes), np.uint8)
    elif storage.is_local(uri):
        mapped = np.memmap(storage.resolve(uri)[1], np.uint8, "r", start, (n, n_bytes))
    ids, checks = np.array(table["row_id"].to_numpy()), np.array(table["check"].to_numpy())
    return _File(uri, start, ids, np.array(scales), checks, mapped)


def _page_start(metadata: Any, n_bytes: int) -> int:
    """Where the rows of ``feature`` begin: behind the header of its one page; -1 where it has several."""
    if metadata.num_rows == 0:
        return 0
    chunk = next(
        chunk
        for chunk in map(metadata.row_group(0).column, range(metadata.num_columns))
        if chunk.path_in_schema == "feature"
    )
    header = chunk.total_compressed_size - metadata.num_rows * n_bytes
    plain = chunk.compression == "UNCOMPRESSED" and metadata.num_row_groups == 1 and 0 < header < 256
    return chunk.data_page_offset + header if plain else -1


def _joined(files: Sequence[_File]) -> tuple[np.ndarray | None, np.ndarray]:
    """(one array over the memory of all files, where each file starts in it); None on an object store."""
    if any(file.mapped is None for file in files):
        return None, np.empty(0, np.int64)
    from hashnet.kernels import memory_between

    used = [file.mapped for file in files if file.mapped is not None and file.mapped.size]
    addresses = np.array(
        [0 if file.mapped is None else file.mapped.ctypes.data for file in files], dtype=np.int64
    )
    if not used:
        return np.zeros(8, np.uint8), np.zeros(len(files), np.int64)
    low = min(array.ctypes.data for array in used)
    high = max(array.ctypes.data + array.nbytes for array in used)
    return memory_between(low, high), addresses - low
