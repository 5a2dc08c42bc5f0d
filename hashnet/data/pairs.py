"""Similarity without labels: a table of pairs, ``row_a, row_b, similar``, that goes with a manifest.

S is the set of listed pairs; a pair that is not listed is unknown and carries no loss. Each pair is
kept once, with row_a < row_b, in ascending order.

A table made from neighbours is the other way round, as nearly all pairs of a large set are far apart: what is
not listed is dissimilar, and pairs that are neither near nor far are listed without a value.

``neighbour_pairs`` makes such a table from vectors alone. Mutual neighbours (each among the k nearest of the
other) are similar. Of the other pairs, those of which one row is among the FAR * k nearest of the other are
unknown; all others are dissimilar, and not listed.

>>> pairs = PairTable.from_arrays([0, 2, 1], [1, 0, 2], [True, False, True])
>>> pairs.counts()
PairCounts(n_pairs=3, n_similar=2, jaccard_sum=2.0)
>>> pairs.row_a.tolist(), pairs.row_b.tolist(), pairs.similar.tolist()
([0, 0, 1], [1, 2, 2], [True, False, True])
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from hashnet.data.columns import is_among
from hashnet.errors import DataError, StorageError
from hashnet.io import as_array, check_ids, check_whole, storage
from hashnet.labels import PairCounts

if TYPE_CHECKING:
    from hashnet.data.manifest import Manifest

DISSIMILAR = "dissimilar"  # in the metadata of a table: what its unlisted pairs are
FAR = 2
NEAREST = 10  # k, unless told otherwise
ROWS = 4096  # whose neighbours are searched at once
NEIGHBOURS = "neighbours"  # the word that stands for such a table where a path is expected


@dataclass(frozen=True)
class PairTable:
    """Listed pairs: row_a < row_b int64 (n,), similar bool (n,), sorted by (row_a, row_b), each once.

    ``n_rows`` None: pairs that are not listed are unknown. Otherwise they are dissimilar, ``n_rows`` is the
    number of rows that the pairs are of, and ``uncertain`` bool (n,) marks listed pairs that are neither.
    """

    COLUMNS: ClassVar = ("row_a", "row_b", "similar")

    row_a: np.ndarray
    row_b: np.ndarray
    similar: np.ndarray
    uncertain: np.ndarray | None = None
    n_rows: int | None = None

    @classmethod
    def open(cls, uri: str, manifest: Manifest | None = None, split: str = "train") -> PairTable:
        """Pairs from a Parquet or CSV file with the columns row_a, row_b, similar.

        With a manifest, every row must be in its ``split``.
        """
        table = _read(uri)
        missing = [name for name in cls.COLUMNS if name not in table.column_names]
        if missing:
            raise DataError(f"{uri} has no column {missing[0]!r}; a pairs table has {', '.join(cls.COLUMNS)}")
        rows = None if manifest is None else manifest.row_ids(split)
        where = "" if manifest is None else f"the {split} rows of {manifest.uri}"
        n_rows = _rows_of_complete(table.schema)
        uncertain = None
        if n_rows is not None:
            uncertain = table["similar"].is_null().to_numpy()
            filled = pc.fill_null(table["similar"], False)
            table = table.set_column(table.column_names.index("similar"), "similar", filled)
        row_a, row_b, similar = _columns(uri, table)
        made = cls.from_arrays(row_a, row_b, similar, rows=rows, where=where, name=uri)
        if n_rows is not None and len(made) != len(row_a):
            raise DataError(f"{uri} lists pairs more than once; make it again")
        return dataclasses.replace(made, uncertain=uncertain, n_rows=n_rows)

    @classmethod
    def from_arrays(
        cls,
        row_a: Any,
        row_b: Any,
        similar: Any,
        rows: np.ndarray | None = None,
        where: str = "the given rows",
        name: str = "pairs",
    ) -> PairTable:
        """Validated pairs: no self pair, no contradiction, no row outside ``rows`` (where given).

        A pair that is listed twice with the same value, in either order, is kept once.
        """
        a, b = np.asarray(row_a, dtype=np.int64), np.asarray(row_b, dtype=np.int64)
        values = np.asarray(similar, dtype=bool)
        if not len(a) == len(b) == len(values):
            raise DataError(
                f"{name}: {len(a)} row_a, {len(b)} row_b and {len(values)} similar; they must be equal"
            )
        if len(a) == 0:
            raise DataError(f"{name} lists no pair")
        _refuse(np.flatnonzero(a == b), a, b, name, "pairs a row with itself; remove such pairs")
        if rows is not None:
            unknown = ~(np.isin(a, rows) & np.isin(b, rows))
            _refuse(np.flatnonzero(unknown), a, b, name, f"names a row that is not among {where}")
        low, high = np.minimum(a, b), np.maximum(a, b)
        order = np.lexsort((high, low))
        low, high, values = low[order], high[order], values[order]
        again = np.flatnonzero((low[1:] == low[:-1]) & (high[1:] == high[:-1])) + 1
        against = again[values[again] != values[again - 1]]
        if len(against):
            first, second = sorted((int(order[against[0] - 1]), int(order[against[0]])))
            raise DataError(
                f"{name} rows {first} and {second} contradict each other: pair ({low[against[0]]}, "
                f"{high[against[0]]}) is similar in one, dissimilar in the other "
                f"({len(against):,} contradictions in all); keep one of them"
            )
        once = np.ones(len(low), dtype=bool)
        once[again] = False
        return cls(low[once], high[once], values[once])

    def __len__(self) -> int:
        return len(self.row_a)

    def counts(self) -> PairCounts:
        """|S| and |S1| of the listed pairs; without labels c_ij is 1, so its sum is |S1|."""
        n_similar, n_pairs = int(np.count_nonzero(self.similar)), len(self)
        if self.n_rows is not None:
            unknown = 0 if self.uncertain is None else int(np.count_nonzero(self.uncertain))
            n_pairs = self.n_rows * (self.n_rows - 1) // 2 - unknown
        return PairCounts(n_pairs=n_pairs, n_similar=n_similar, jaccard_sum=float(n_similar))

    def among(self, row_ids: np.ndarray) -> PairTable:
        """The pairs of which both rows are among ``row_ids``, int64 ascending."""
        inside = np.isin(self.row_a, row_ids) & np.isin(self.row_b, row_ids)
        return PairTable(
            self.row_a[inside],
            self.row_b[inside],
            self.similar[inside],
            None if self.uncertain is None else self.uncertain[inside],
            None if self.n_rows is None else len(row_ids),
        )

    def save(self, uri: str, lineage: Mapping[str, Any] | None = None) -> None:
        """Writes the pairs as Parquet; ``lineage`` says what they were made from, in the file's metadata."""
        similar = pa.array(self.similar, mask=self.uncertain)
        table = pa.table({"row_a": self.row_a, "row_b": self.row_b, "similar": similar})
        about = {} if self.n_rows is None else {"unlisted": DISSIMILAR, "n_rows": self.n_rows}
        if lineage is not None or about:
            text = json.dumps({**(lineage or {}), **about}, sort_keys=True)
            table = table.replace_schema_metadata({"hashnet": text})
        with storage.open_output(uri) as sink:
            pq.write_table(table, sink, compression="zstd")


def lists_neighbours(uri: str) -> bool:
    """Whether ``uri`` is a table of neighbours, in which unlisted pairs are dissimilar."""
    try:
        with storage.open_input(uri) as source:
            return _rows_of_complete(pq.read_schema(source)) is not None
    except (StorageError, pa.ArrowInvalid):
        return False


def _rows_of_complete(schema: pa.Schema) -> int | None:
    """The number of rows of a table whose unlisted pairs are dissimilar; None for any other."""
    try:
        about = json.loads((schema.metadata or {}).get(b"hashnet", b"{}"))
        return int(about["n_rows"]) if about.get("unlisted") == DISSIMILAR else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _read(uri: str) -> pa.Table:
    try:
        with storage.open_input(uri) as source:
            if storage.name_of(uri).endswith((".csv", ".txt")):
                return pyarrow.csv.read_csv(source)
            return pq.read_table(source)
    except StorageError as error:
        raise DataError(f"cannot read the pairs {uri}: {error}") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{uri} is neither Parquet nor CSV (a .csv file): {error}") from error


def _columns(uri: str, table: pa.Table) -> list[np.ndarray]:
    columns = []
    for name in PairTable.COLUMNS:
        column = table[name].combine_chunks()
        if column.null_count:
            raise DataError(f"{uri} row {column.is_null().index(True).as_py()}: {name} is missing")
        if name == "similar" and not pa.types.is_boolean(column.type):
            one = pc.equal(column, pa.scalar(1).cast(column.type))
            allowed = pc.or_(one, pc.equal(column, pa.scalar(0).cast(column.type)))
            if not pc.all(allowed).as_py():
                row = allowed.index(False).as_py()
                raise DataError(f"{uri} row {row}: similar is {column[row].as_py()!r}; it must be 0 or 1")
            column = one
        elif name != "similar" and not pa.types.is_integer(column.type):
            raise DataError(f"{uri}: {name} must hold row ids (whole numbers), not {column.type}")
        columns.append(column.to_numpy(zero_copy_only=False))
    return columns


def _refuse(wrong: np.ndarray, a: np.ndarray, b: np.ndarray, name: str, what: str) -> None:
    if len(wrong):
        row = wrong[0]
        raise DataError(f"{name} row {row}: ({a[row]}, {b[row]}) {what} ({len(wrong):,} such rows)")


def neighbour_pairs(
    vectors: Any,
    row_ids: Any = None,
    k: int = NEAREST,
    *,
    radius: float | None = None,
    near: np.ndarray | None = None,
) -> PairTable:
    """The pairs table of vectors float (n, d) whose rows have ascending ids int64 (n,), by default 0 … n - 1.

    Nearness is Euclidean. With ``radius``, neighbours within that distance are similar even where only one
    is among the k nearest of the other. ``near`` int64 (n, FAR * k) are the nearest rows of each, where they
    are known already (see ``nearest_rows``). Memory: the FAR * k nearest of every row, never n x n.
    """
    k = check_whole("k", k, 1)
    vectors = np.ascontiguousarray(as_array(vectors, "vectors"), dtype=np.float32)
    n = len(vectors)
    row_ids = np.arange(n) if row_ids is None else check_ids(row_ids, "row_ids")
    if n < k + 2:
        raise DataError(f"there are {n} vectors; {k} neighbours of each need at least {k + 2}")
    near = nearest_rows(vectors, 0, n, k) if near is None else near
    own = np.arange(n)
    wanted = np.zeros(near.shape, dtype=bool)  # which of the nearest are similar
    listed = np.sort((own[:, None] * n + near[:, :k]).ravel())  # directed pairs as one number
    wanted[:, :k] = is_among(near[:, :k] * n + own[:, None], listed)
    if radius is not None:
        for column in range(k):
            far = np.linalg.norm(vectors - vectors[near[:, column]], axis=1)
            wanted[:, column] |= far <= radius
    a, b = np.repeat(own, near.shape[1]), near.ravel()
    keys, where = np.unique(np.minimum(a, b) * n + np.maximum(a, b), return_inverse=True)
    similar = np.zeros(len(keys), dtype=bool)
    np.logical_or.at(similar, where, wanted.ravel())
    # ids ascend with the rows, so that pairs in the order of rows are in the order of ids
    return PairTable(row_ids[keys // n], row_ids[keys % n], similar, ~similar, n)


def nearest_rows(vectors: Any, start: int, stop: int, k: int = NEAREST) -> np.ndarray:
    """int64 (stop - start, FAR * k): for each of these rows, the nearest other rows, the nearest first."""
    from hashnet.metrics import exact_neighbours  # numba, which a reader of manifests does not need

    vectors = np.ascontiguousarray(as_array(vectors, "vectors"), dtype=np.float32)
    width, blocks = min(FAR * k, len(vectors) - 1), []
    for first in range(start, stop, ROWS):
        own = np.arange(first, min(first + ROWS, stop))
        blocks.append(exact_neighbours(vectors[own], [vectors], width, skip=own))
    return np.concatenate(blocks)
