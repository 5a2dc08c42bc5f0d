"""CodeStore: a complete folder of code shards, read by its list; and write_store, to make one of arrays.

>>> import tempfile
>>> import numpy as np
>>> codes = np.arange(24, dtype=np.uint8).reshape(3, 8)
>>> with tempfile.TemporaryDirectory() as folder:
...     store = write_store(folder + "/codes", codes, labels=np.array([0, 1, 1]))
...     len(store), store.n_bits, store.ids().tolist(), store.labels().tolist()
(3, 64, [0, 1, 2], [[1, 0], [0, 1], [0, 1]])

Other tools read the shards themselves: ``pandas.read_parquet(store.paths())``, and the same list for
polars and DuckDB, where ``code`` is bytes. Spark reads it as binary from version 3.4 on; older ones refuse
Parquet's fixed-length bytes. ``hashnet.store.commit`` describes how the folder is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet import labels as label_sets
from hashnet.codes import check_codes
from hashnet.errors import CodeError, DataError, FormatError
from hashnet.io import as_array, binary_column, binary_matrix, check_whole, rechunk, storage
from hashnet.store.artefact import SUCCESS, CodesArtefact
from hashnet.store.commit import ShardRecord, StoreWriter, read_quarantine, read_records
from hashnet.store.plan import BIT_ORDER, PLAN, PlannedPart, StorePlan, read_plan

ROWS_PER_SHARD = 8192


class ShardStore:
    """What code and feature stores share: the list, the shards, ids, labels and uris."""

    output = ""

    def __init__(self, uri: str, about: dict[str, Any]) -> None:
        self.uri = str(uri)
        self.plan = StorePlan.from_dict(about)
        self.shards = [ShardRecord.from_dict(record) for record in about["shards"]]
        self.n_rows: int = about["rows"]
        self.n_bad: int = about["bad_rows"]
        self.n_classes = self.plan.n_classes
        self.lineage: dict[str, Any] = dict(self.plan.lineage)
        self.sha256: str = about["sha256"]
        self.statistics: dict[str, Any] = about["statistics"]

    @classmethod
    def open(cls, uri: str):  # type: ignore[no-untyped-def]
        """The complete store at ``uri``; FormatError where it is missing or not finished."""
        uri = str(uri)
        if not CodesArtefact(uri).exists():
            raise FormatError(_why_not(uri))
        artefact = CodesArtefact(uri, cls.output)
        about = artefact.read()
        try:
            return cls(uri, about)
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{artefact.header_uri} lacks {error}; it is damaged or was not written by hashnet"
            ) from error

    def __len__(self) -> int:
        return self.n_rows

    def paths(self) -> list[str]:
        """The Parquet files, in order, for any other reader."""
        return [storage.join(self.uri, shard.file) for shard in self.shards]

    @contextmanager
    def open_shard(self, shard: ShardRecord) -> Iterator[pq.ParquetFile]:
        """One shard's Parquet file; FormatError where opening it, or reading it inside the block, fails."""
        remote = not storage.is_local(self.uri)  # there, columns are requested together
        with storage.open_input(storage.join(self.uri, shard.file)) as source:
            try:
                yield pq.ParquetFile(source, pre_buffer=remote)
            except (pa.ArrowException, OSError) as error:
                raise FormatError(f"{self.uri}/{shard.file} is damaged or out of reach: {error}") from error

    def tables(
        self, columns: list[str] | None = None, shards: Sequence[int] | None = None
    ) -> Iterator[pa.Table]:
        """One Arrow table per shard, in order; ``shards`` selects some by their position in the list."""
        for shard in self.shards if shards is None else [self.shards[i] for i in shards]:
            with self.open_shard(shard) as file:
                # plain single-threaded reads: twice as fast for files of this size, and callers
                # that need more read several shards at once
                table = file.read(columns=columns, use_threads=False)
            if table.num_rows != shard.rows:
                raise FormatError(
                    f"{self.uri}/{shard.file} has {table.num_rows} rows, its record says {shard.rows}"
                )
            yield table

    def ids(self) -> np.ndarray:
        """Row ids, int64 (n,), in storage order."""
        ids = [table["row_id"].to_numpy() for table in self.tables(["row_id"])]
        return np.concatenate(ids) if ids else np.zeros(0, dtype=np.int64)

    def uris(self) -> list[str | None]:
        """The uri of each row's picture; None where it has none."""
        return [uri for table in self.tables(["uri"]) for uri in table["uri"].to_pylist()]

    def labels(self) -> np.ndarray | None:
        """Multi-hot labels, uint8 (n, n_classes); None when the database has none."""
        if self.n_classes is None:
            return None
        labels = np.zeros((len(self), self.n_classes), dtype=np.uint8)
        start = 0
        for table in self.tables(["labels"]):
            labels[start : start + len(table)] = label_sets.from_lists(table["labels"], self.n_classes)
            start += len(table)
        return labels

    def quarantine(self) -> pa.Table:
        """Rows that could not be encoded: row_id, uri, reason."""
        return read_quarantine(self.uri, {shard.name: shard for shard in self.shards})

    def verify(self) -> None:
        """Reads every shard and compares its sha256 with the list; FormatError at the first difference."""
        for shard, path in zip(self.shards, self.paths(), strict=True):
            found = storage.sha256_of(path)
            if found != shard.sha256:
                raise FormatError(f"{path} has sha256 {found[:12]}, the list says {shard.sha256[:12]}")

    def _matrix(self, table: pa.Table) -> np.ndarray:
        raise NotImplementedError

    def blocks(
        self, rows: int = 65_536, labels: bool = True
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """(ids, codes or features, multi-hot labels or None) of ``rows`` rows each, the last one shorter."""
        check_whole("rows", rows, low=1)
        with_labels = labels and self.n_classes is not None
        columns = ["row_id", self.plan.column] + (["labels"] if with_labels else [])
        for table in rechunk(self.tables(columns), rows):
            yield self._block(table, with_labels)

    def _block(self, table: pa.Table, with_labels: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        labels = label_sets.from_lists(table["labels"], self.n_classes or 0) if with_labels else None
        return table["row_id"].to_numpy(), self._matrix(table), labels


class CodeStore(ShardStore):
    """Packed codes of a database with row ids, uris and labels. Open one with ``CodeStore.open``."""

    output = "codes"

    @property
    def n_bits(self) -> int:
        return self.plan.width

    def _matrix(self, table: pa.Table) -> np.ndarray:
        return binary_matrix(table["code"], self.n_bits // 8)

    def codes(self) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), in storage order."""
        codes = np.zeros((len(self), self.n_bits // 8), dtype=np.uint8)
        start = 0
        for table in self.tables(["code"]):
            codes[start : start + len(table)] = self._matrix(table)
            start += len(table)
        return codes


class FeatureStore(ShardStore):
    """Backbone features of a database, by the same protocol (``output=features``)."""

    output = "features"

    @property
    def n_features(self) -> int:
        return self.plan.width

    def _matrix(self, table: pa.Table) -> np.ndarray:
        column = table["feature"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(table), self.n_features)

    def features(self) -> np.ndarray:
        """Features, float32 (n, n_features), in storage order."""
        features = np.zeros((len(self), self.n_features), dtype=np.float32)
        start = 0
        for table in self.tables(["feature"]):
            features[start : start + len(table)] = self._matrix(table)
            start += len(table)
        return features


def write_store(
    uri: str,
    codes: np.ndarray,
    ids: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    uris: list[str] | None = None,
    n_classes: int | None = None,
    rows_per_shard: int = ROWS_PER_SHARD,
    lineage: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> CodeStore:
    """A complete store of the given codes, uint8 (n, n_bits // 8); ids default to 0..n-1.

    Rows are stored in the order of their ids, which must differ. A folder that holds a store is
    refused unless ``overwrite``.
    """
    codes = check_codes(codes)
    n = len(codes)
    ids = np.arange(n, dtype=np.int64) if ids is None else as_array(ids, "ids")
    if len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0):
        raise CodeError(f"ids must be whole numbers from 0 on, got {ids.dtype}, the least {ids.min()}")
    if len(ids) and int(ids.max()) > np.iinfo(np.int64).max:
        raise CodeError(f"ids must fit into int64, got {ids.max()}")
    ids = ids.astype(np.int64)
    multi_hot = None if labels is None else label_sets.as_multi_hot(labels, n_classes)
    for name, column in (("ids", ids), ("labels", multi_hot), ("uris", uris)):
        if column is not None and len(column) != n:
            raise CodeError(f"{n} codes came with {len(column)} {name}")
    if len(np.unique(ids)) != n:
        raise CodeError(f"ids must differ; {n - len(np.unique(ids))} of {n} are repeated")
    if storage.exists(storage.join(uri, PLAN)):
        if not overwrite:
            raise DataError(f"{uri} holds a store already; give another folder or overwrite=True")
        storage.delete(uri)
    order = np.argsort(ids, kind="stable")
    part = PlannedPart("arrays", hashlib.sha256(ids[order].tobytes() + codes[order].tobytes()).hexdigest(), n)
    writer = StoreWriter(
        uri,
        StorePlan(
            output="codes",
            width=codes.shape[1] * 8,
            rows_per_shard=rows_per_shard,
            parts=(part,),
            n_classes=None if multi_hot is None else multi_hot.shape[1],
            lineage={"bit_order": BIT_ORDER} | (lineage or {}),
        ),
    ).begin()
    for shard in writer.plan.ranges():
        rows = order[shard.start : shard.stop]
        lists = None if multi_hot is None else label_sets.to_lists(multi_hot[rows])
        table = pa.table(
            {
                "row_id": ids[rows],
                "uri": pa.array([None if uris is None else uris[i] for i in rows], pa.string()),
                "labels": pa.nulls(len(rows), pa.list_(pa.int32())) if lists is None else lists,
                "code": binary_column(codes[rows]),
            }
        )
        writer.commit(shard, table)
    writer.finish()
    return CodeStore.open(uri)


def _why_not(uri: str) -> str:
    plan = read_plan(uri)
    if plan is None:
        return f"{uri} is not a store of codes or features (it has no {SUCCESS})"
    done = sum(not record.repair for record in read_records(uri).values())
    return (
        f"{uri} is not complete: {done} of {plan.n_shards} shards are there and no {SUCCESS}; "
        "run the same encode_db command again to finish it"
    )
