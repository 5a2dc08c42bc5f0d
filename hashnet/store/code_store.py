"""CodeStore: a complete folder of code shards, read by its list; and the codes artefact of a run.

>>> import tempfile
>>> import numpy as np
>>> from hashnet.store import write_store
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

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet import labels as label_sets
from hashnet.codes import health_problems
from hashnet.errors import DataError, FormatError
from hashnet.io import (
    Artefact,
    Description,
    binary_matrix,
    check_whole,
    counted,
    read_checked,
    rechunk,
    storage,
)
from hashnet.store.plan import (
    PLAN,
    QUARANTINE,
    RECORDS,
    REDO_SHARD,
    REDO_STORE,
    SUCCESS,
    ShardRecord,
    StorePlan,
    read_plan,
    read_quarantine,
    read_record,
    read_records,
)
from hashnet.store.vectors import Vectors, decoded

# Bytes of shards that are read and hashed at a time: few at first, so that parsing starts at once, then more,
# as handing over single ones costs more.
FIRST_BYTES, AHEAD_BYTES = 128 << 10, 4 << 20


class CodesArtefact(Artefact):
    """A store of codes (or features) as an artefact of a run."""

    header_file = "manifest.json"
    made_by = "encode the database with jobs/encode_db.py"
    fix = REDO_SHARD

    def __init__(self, uri: str, kind: str | None = None) -> None:
        super().__init__(uri)
        self.kind = kind or self._begun_as()

    def _begun_as(self) -> str:
        """ "codes" or "features", whichever the folder's plan says; codes where it says nothing."""
        values = storage.read_json(storage.join(self.uri, PLAN)) if self.begun() else {}
        output = values.get("output") if isinstance(values, dict) else None
        return output if output in ("codes", "features") else "codes"

    def exists(self) -> bool:
        """Whether the store is complete: every shard committed and listed."""
        return storage.exists(storage.join(self.uri, SUCCESS))

    def begun(self) -> bool:
        """Whether encoding into this folder has begun, complete or not."""
        return storage.exists(storage.join(self.uri, PLAN))

    def open(self, verify: bool = True) -> Any:
        return (CodeStore if self.kind == "codes" else FeatureStore).open(self.uri, verify)

    def write(self, codes: np.ndarray, **columns: Any) -> Any:
        from hashnet.store.commit import write_store

        return write_store(self.uri, codes, **columns)

    def describe(self) -> Description:
        return super().describe() if self.exists() else Description(self.uri, self.kind)

    def verify(self) -> list[str]:
        if not self.exists():
            records = storage.list_names(storage.join(self.uri, RECORDS))
            done = sum(name.endswith(".json") for name in records)
            so_far = counted(done, "shard")
            return [f"encoding is not finished ({so_far} so far); run jobs/encode_db.py again to continue"]
        values = self.read()
        return [*self.damage(), *health_problems(values["rows"], values.get("statistics") or {})]

    def damage(self) -> Iterator[str]:
        """Also of plan and records, whose content the header repeats."""
        yield from super().damage()
        values = self.read()
        try:
            check_frozen(self.uri, StorePlan.from_dict(values))
            for shard in values["shards"]:
                name = f"{shard['name']}.json"
                if not storage.exists(storage.join(self.uri, RECORDS, name)):
                    yield f"{RECORDS}/{name} is missing"
                elif read_record(self.uri, name) != ShardRecord.from_dict(shard):
                    yield f"{RECORDS}/{name} differs from the shard that {self.header_file} lists"
        except FormatError as error:
            yield str(error)

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        shards = values["shards"]
        refused = [shard for shard in shards if shard.get("quarantine_sha256")]
        return {f"{shard['name']}.parquet": shard["sha256"] for shard in shards} | {
            f"{QUARANTINE}/{shard['name']}.parquet": shard["quarantine_sha256"] for shard in refused
        }

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        facts = {name: values.get(name) for name in ("rows", "bad_rows", "n_classes", "sha256")}
        facts["n_bits" if values["kind"] == "codes" else "n_features"] = values["width"]
        if values.get("dtype"):
            facts["dtype"] = values["dtype"]
        facts["shards"] = len(values["shards"])
        statistics = values.get("statistics") or {}
        return facts | {name: value for name, value in statistics.items() if not isinstance(value, list)}


class ShardStore:
    """What code and feature stores share: the list, the shards, ids, labels and uris."""

    output = ""

    def __init__(self, uri: str, about: dict[str, Any], verify: bool = True) -> None:
        self.uri, self.verify_files = str(uri), verify
        self.plan = StorePlan.from_dict(about)
        self.shards = [ShardRecord.from_dict(record) for record in about["shards"]]
        self.n_rows: int = about["rows"]
        self.n_bad: int = about["bad_rows"]
        self.n_classes = self.plan.n_classes
        self.class_names = self.plan.class_names  # of codes from elsewhere; a manifest has those of a run
        self.lineage: dict[str, Any] = dict(self.plan.lineage)
        self.sha256: str = about["sha256"]
        self.rows_sha256 = self.plan.rows_sha256
        self.statistics: dict[str, Any] = about["statistics"]

    @classmethod
    def open(cls, uri: str, verify: bool = True):  # type: ignore[no-untyped-def]
        """The complete store at ``uri``; FormatError where it is missing, not finished or damaged.

        A shard's sha256 is checked whenever it is read, unless ``verify`` is false.
        """
        uri = str(uri)
        if not CodesArtefact(uri).exists():
            raise FormatError(_why_not(uri))
        artefact = CodesArtefact(uri, cls.output)
        about = artefact.read()
        try:
            store = cls(uri, about, verify)
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{artefact.header_uri} lacks {error}; it is damaged or was not written by hashnet"
            ) from error
        if verify:
            check_frozen(uri, store.plan)
        return store

    def __len__(self) -> int:
        return self.n_rows

    def paths(self) -> list[str]:
        """The Parquet files, in order, for any other reader."""
        return [storage.join(self.uri, shard.file) for shard in self.shards]

    @contextmanager
    def open_shard(self, shard: ShardRecord) -> Iterator[pq.ParquetFile]:
        """One shard's Parquet file; FormatError where its bytes are damaged or cannot be read."""
        with self._parsing(shard, self._source(shard)) as file:
            yield file

    @contextmanager
    def _parsing(self, shard: ShardRecord, source: pa.NativeFile) -> Iterator[pq.ParquetFile]:
        remote = not storage.is_local(self.uri)  # there, columns are requested together
        with source:
            try:
                yield pq.ParquetFile(source, pre_buffer=remote and not self.verify_files)
            except (pa.ArrowException, OSError) as error:
                raise FormatError(f"{self.uri}/{shard.file} is damaged or out of reach: {error}") from error

    def _source(self, shard: ShardRecord) -> pa.NativeFile:
        """A shard's bytes, checked, or the open file where nothing is to be verified."""
        where = storage.join(self.uri, shard.file)
        if not self.verify_files:
            return storage.open_input(where)
        return pa.BufferReader(read_checked(where, shard.sha256, REDO_SHARD))

    def _sources(self, shards: Sequence[ShardRecord]) -> Iterator[pa.NativeFile]:
        """The source of each shard; a thread reads and hashes the next few while the caller parses these."""
        if len(shards) < 2 or not self.verify_files:
            yield from map(self._source, shards)
            return
        with ThreadPoolExecutor(1) as pool:
            waiting: list[Future[list[pa.NativeFile]]] = []
            for group in _groups(shards):
                waiting.append(pool.submit(lambda some: [self._source(shard) for shard in some], group))
                if len(waiting) == 2:
                    yield from waiting.pop(0).result()
            yield from waiting.pop().result()

    def tables(
        self, columns: list[str] | None = None, shards: Sequence[int] | None = None
    ) -> Iterator[pa.Table]:
        """One Arrow table per shard, in order; ``shards`` selects some by their position in the list."""
        chosen = self.shards if shards is None else [self.shards[i] for i in shards]
        for shard, source in zip(chosen, self._sources(chosen), strict=True):
            with self._parsing(shard, source) as file:
                # plain single-threaded reads: twice as fast for files of this size, and callers
                # that need more read several shards at once
                table = file.read(columns=columns, use_threads=False)
            if table.num_rows != shard.rows:
                raise FormatError(
                    f"{self.uri}/{shard.file} has {table.num_rows} rows, its record says {shard.rows}"
                )
            yield table

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the manifest's further columns, in the shards beside row_id, uri, labels and code."""
        return tuple(self.plan.columns)

    def read(self, columns: list[str]) -> pa.Table:
        """These columns of all rows, in storage order."""
        unknown = [name for name in columns if name not in self.plan.schema.names]
        if unknown:
            raise DataError(f"{self.uri} has no column {unknown[0]!r}: {', '.join(self.plan.schema.names)}")
        empty = self.plan.schema.empty_table().select(columns)
        return pa.concat_tables([empty, *self.tables(columns)])

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
        n_classes = self.n_classes
        labels = np.zeros((len(self), n_classes), dtype=np.uint8)
        return self._filled(labels, ["labels"], lambda rows: label_sets.from_lists(rows["labels"], n_classes))

    def _filled(
        self, whole: np.ndarray, columns: list[str], rows_of: Callable[[pa.Table], np.ndarray]
    ) -> np.ndarray:
        """``whole`` (n, …), filled shard by shard with what ``rows_of`` makes of these columns."""
        start = 0
        for table in self.tables(columns):
            whole[start : start + len(table)] = rows_of(table)
            start += len(table)
        return whole

    def quarantine(self) -> pa.Table:
        """Rows that could not be encoded: row_id, uri, reason."""
        return read_quarantine(self.uri, {shard.name: shard for shard in self.shards})

    def verify(self) -> None:
        """Reads every file and compares its sha256 with the list; FormatError at the first difference."""
        CodesArtefact(self.uri, self.output).check()

    def _matrix(self, table: pa.Table) -> np.ndarray:
        raise NotImplementedError

    def _block_columns(self) -> list[str]:
        """The columns that ``_matrix`` reads."""
        return [self.plan.column]

    def blocks(
        self, rows: int = 65_536, labels: bool = True
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """(ids, codes or features, multi-hot labels or None) of ``rows`` rows each, the last one shorter."""
        check_whole("rows", rows, low=1)
        with_labels = labels and self.n_classes is not None
        columns = ["row_id", *self._block_columns()] + (["labels"] if with_labels else [])
        for table in rechunk(self.tables(columns), rows):
            multi_hot = label_sets.from_lists(table["labels"], self.n_classes or 0) if with_labels else None
            yield table["row_id"].to_numpy(), self._matrix(table), multi_hot


class CodeStore(ShardStore):
    """Packed codes of a database with row ids, uris and labels. Open one with ``CodeStore.open``."""

    output = "codes"

    def __repr__(self) -> str:
        return f"CodeStore({self.uri!r}, {len(self):,} x {self.n_bits} bits)"

    @property
    def n_bits(self) -> int:
        return self.plan.width

    def _matrix(self, table: pa.Table) -> np.ndarray:
        return binary_matrix(table["code"], self.n_bits // 8)

    def codes(self) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), in storage order."""
        codes = np.zeros((len(self), self.n_bits // 8), dtype=np.uint8)
        return self._filled(codes, ["code"], self._matrix)


class FeatureStore(ShardStore):
    """Vectors of a database, by the same protocol (``output=features``): for rescoring, or to look at."""

    output = "features"

    @property
    def n_features(self) -> int:
        return self.plan.width

    @property
    def dtype(self) -> str:
        """How they are stored: float16, int8 or float32."""
        return self.plan.dtype or "float32"

    def vectors(self) -> Vectors:
        """The vectors by id, memory-mapped: only requested rows are read."""
        if self.plan.dtype is None:
            raise FormatError(
                f"{self.uri} was written by an older version, whose vectors can only be read all together; "
                "delete the folder and run encode_db again with output=features"
            )
        return Vectors.open(self.paths(), self.n_features, self.dtype, self.verify_files)

    def _matrix(self, table: pa.Table) -> np.ndarray:
        if self.plan.dtype is not None:
            return decoded(table, self.n_features, self.dtype)
        column = table["feature"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(table), self.n_features)

    def _block_columns(self) -> list[str]:
        return ["feature", "scale"] if self.plan.dtype == "int8" else ["feature"]

    def features(self) -> np.ndarray:
        """Features, float32 (n, n_features), in storage order."""
        features = np.zeros((len(self), self.n_features), dtype=np.float32)
        return self._filled(features, self._block_columns(), self._matrix)


def _groups(shards: Sequence[ShardRecord]) -> Iterator[list[ShardRecord]]:
    """The shards in lists of at least one, whose bytes double from FIRST_BYTES up to AHEAD_BYTES."""
    group: list[ShardRecord] = []
    room = FIRST_BYTES
    for shard in shards:
        if group and sum(one.bytes for one in group) + shard.bytes > room:
            yield group
            group, room = [], min(2 * room, AHEAD_BYTES)
        group.append(shard)
    if group:
        yield group


def _why_not(uri: str) -> str:
    plan = read_plan(uri)
    if plan is None and not storage.exists(uri):
        return f"{uri} does not exist; run jobs/encode_db.py first"
    if plan is None:
        return f"{uri} is not a store of codes or features (it has no {SUCCESS}); run jobs/encode_db.py first"
    done = sum(not record.repair for record in read_records(uri).values())
    return (
        f"{uri} is not complete: {done} of {plan.n_shards} shards are there and no {SUCCESS}; "
        "run the same encode_db command again to finish it"
    )


def check_frozen(uri: str, plan: StorePlan) -> None:
    """FormatError unless the plan in the folder is this one, of the header, or one that extends it."""
    found = read_plan(uri)
    if found is None:
        raise FormatError(f"{uri}/{PLAN} is missing; restore it, or {REDO_STORE}")
    if differing := plan.difference(found):
        raise FormatError(f"{uri} {differing} by {PLAN}: one of the two files is of another store")
