"""The commit protocol of codes/ (and of features/): frozen ranges, shards, records, then the list.

    codes/_plan.json                         what is being written; frozen by the first run
    codes/codes-00017.parquet                a shard: temporary name + rename, or one put
    codes/_quarantine/codes-00017.parquet    its bad rows (row_id, uri, reason), where it has some
    codes/_records/codes-00017.json          written after both: from then on the shard counts
    codes/manifest.json, codes/_SUCCESS      written last; readers trust nothing else

The rows of one split are cut, manifest part by manifest part, into ranges of ``rows_per_shard``
rows in row_id order; a range is a shard with a stable name. The bytes of a shard depend on its rows
and its lineage alone (no clock, host or run id), so writing it twice gives the same file, and running
the same plan again writes only the shards that have no record yet. A plan may grow by appended parts
while a run of the shorter plan is under way: only a run of the longer plan writes the list.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashnet import labels as label_sets
from hashnet.codes import check_codes, code_statistics
from hashnet.data import check_labels, further_columns, plain_column, refuse_duplicates, schema_type
from hashnet.errors import CodeError, DataError, FormatError
from hashnet.io import binary_column, binary_matrix, check_ids, storage
from hashnet.store.code_store import CodesArtefact, CodeStore, FeatureStore
from hashnet.store.plan import (
    BIT_ORDER,
    FORMAT_VERSION,
    PLAN,
    QUARANTINE,
    QUARANTINE_SCHEMA,
    READERS,
    RECORDS,
    SUCCESS,
    PlannedPart,
    ShardRange,
    ShardRecord,
    StorePlan,
    check_plan,
    read_plan,
    read_records,
    write_plan,
    write_record,
)
from hashnet.store.vectors import check_vectors, vector_columns, vector_file

ROWS_PER_SHARD = 8192


@dataclass(frozen=True)
class StoreWriter:
    """Writes one store by the commit protocol. It is small, so every worker may have a copy."""

    uri: str
    plan: StorePlan

    def begin(self) -> StoreWriter:
        """Freezes the plan in the folder; LineageMismatch when the folder holds another store."""
        check_plan(self.uri, self.plan)
        found = read_plan(self.uri)
        if found is None or len(found.parts) < len(self.plan.parts):
            write_plan(self.uri, self.plan)
        return self

    def commit(
        self, shard: ShardRange, rows: pa.Table, bad: pa.Table | None = None, repair: bool = False
    ) -> ShardRecord:
        """The record of a shard, after writing shard, quarantine and record, in that order.

        ``rows`` has the columns of ``plan.schema``, ``bad`` has row_id, uri, reason; both in any order.
        """
        schema = self.plan.schema
        if self.plan.dtype is not None:
            rows = with_stored_vectors(rows, self.plan)
        rows = rows.select(schema.names).cast(schema).sort_by("row_id").combine_chunks()
        bad = QUARANTINE_SCHEMA.empty_table() if bad is None else bad.select(QUARANTINE_SCHEMA.names)
        bad = bad.cast(QUARANTINE_SCHEMA).sort_by("row_id").combine_chunks()
        if rows.num_rows + bad.num_rows != len(shard) and not repair:
            raise FormatError(
                f"{shard.name} must hold {len(shard)} rows, got {rows.num_rows} and {bad.num_rows} bad ones"
            )
        metadata = shard_metadata(self.plan, shard.part.sha256)
        to_bytes = parquet_bytes if self.plan.dtype is None else vector_file
        data = to_bytes(rows.replace_schema_metadata(metadata))
        storage.write_bytes(storage.join(self.uri, f"{shard.name}.parquet"), data)
        quarantine_sha256 = None
        if bad.num_rows:
            refused = parquet_bytes(bad)
            quarantine_sha256 = hashlib.sha256(refused).hexdigest()
            storage.write_bytes(storage.join(self.quarantine_uri, f"{shard.name}.parquet"), refused)
        counts = pc.value_counts(bad["reason"]).to_pylist()
        record = ShardRecord(
            name=shard.name,
            rows=rows.num_rows,
            bad_rows=bad.num_rows,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            part=shard.part.name,
            part_sha256=shard.part.sha256,
            start=shard.start,
            stop=shard.stop,
            reasons={count["values"]: count["counts"] for count in counts},
            quarantine_sha256=quarantine_sha256,
            repair=repair,
        )
        write_record(self.uri, record)
        return record

    @property
    def quarantine_uri(self) -> str:
        """The folder with the bad rows of each shard."""
        return storage.join(self.uri, QUARANTINE)

    def listed(self) -> list[ShardRecord]:
        """The records of a complete store in the order of its list: the ranges, then repair shards."""
        records = read_records(self.uri)
        names = [shard.name for shard in self.plan.ranges()]
        missing = [name for name in names if name not in records]
        if missing:
            raise FormatError(
                f"{self.uri} lacks {len(missing)} of {len(names)} shards, the first is {missing[0]}; "
                "run the same encode_db command again"
            )
        names += sorted(record.name for record in records.values() if record.repair)
        return [records[name] for name in names]

    def was_extended(self) -> bool:
        """Whether the folder has a longer plan by now: that of another job, which will write the list."""
        now = read_plan(self.uri)
        return now is not None and len(now.parts) > len(self.plan.parts)

    def finish(self) -> dict[str, Any]:
        """The content of manifest.json, after writing it and then _SUCCESS.

        FormatError while a shard is missing, or when the store was extended beyond this plan.
        """
        shards = self.listed()
        repaired = sum(record.rows for record in shards if record.repair)
        values = self.plan.to_dict() | {
            "rows": sum(record.rows for record in shards),
            "bad_rows": sum(record.bad_rows for record in shards if not record.repair) - repaired,
            "shards": [record.to_dict() for record in shards],
            "statistics": self._statistics(shards) if self.plan.output == "codes" else {},
        }
        if self.was_extended():  # checked last, because the statistics take a while
            raise FormatError(
                f"{self.uri} has been extended by a job with more parts of the manifest; that job "
                "finishes the store, with the shards made here: nothing is left to do unless it died, "
                "then run it again"
            )
        header = CodesArtefact(self.uri, self.plan.output).write_header(
            values, sha256=content_sha256(shards), lineage=self.plan.lineage
        )
        storage.write_bytes(storage.join(self.uri, SUCCESS), b"")
        self._remove_leftovers(shards)
        return header

    def _statistics(self, shards: list[ShardRecord]) -> dict[str, Any]:
        """See ``code_statistics``; holds ``READERS`` shards in memory."""

        def read(record: ShardRecord) -> np.ndarray:
            return binary_matrix(record.table(self.uri, ["code"])["code"], self.plan.width // 8)

        def blocks() -> Iterator[np.ndarray]:
            with ThreadPoolExecutor(READERS) as pool:
                for start in range(0, len(shards), READERS):
                    yield from pool.map(read, shards[start : start + READERS])

        return code_statistics(blocks(), self.plan.width)

    def completed(self, shards: list[ShardRecord]) -> dict[str, Any] | None:
        """The header of the store, if it is complete and lists exactly these shards."""
        artefact = CodesArtefact(self.uri)
        header = artefact.read() if artefact.exists() else {}
        return header if header.get("sha256") == content_sha256(shards) else None

    def withdraw_stale(self, shards: list[ShardRecord]) -> None:
        """Deletes _SUCCESS if the header lists a shard that was replaced since; not that of a longer plan."""
        artefact = CodesArtefact(self.uri)
        if artefact.exists() and not self.was_extended():
            there = {record.file: record.sha256 for record in shards}
            listed = {f"{shard['name']}.parquet": shard["sha256"] for shard in artefact.read()["shards"]}
            if not listed.items() <= there.items():
                storage.delete(storage.join(self.uri, SUCCESS))

    def _remove_leftovers(self, shards: list[ShardRecord]) -> None:
        """Deletes what killed runs left behind: temporary files, and bad rows of shards that now have none.

        The bad rows of shards that are not in the list belong to another run and stay.
        """
        for folder in (self.uri, storage.join(self.uri, RECORDS), self.quarantine_uri):
            for name in storage.list_names(folder):
                if storage.TMP_MARK in name:
                    storage.delete(storage.join(folder, name))
        without_bad = {record.file for record in shards if not record.bad_rows}
        for name in without_bad.intersection(storage.list_names(self.quarantine_uri)):
            storage.delete(storage.join(self.quarantine_uri, name))


def shard_metadata(plan: StorePlan, part_sha256: str) -> dict[str, str]:
    """Parquet key-value metadata of a shard: the lineage, one ``hashnet.*`` key per fact."""
    facts: dict[str, Any] = dict(plan.lineage) | {
        "kind": plan.output,
        "format_version": FORMAT_VERSION,
        "manifest_part_sha256": part_sha256,
        "split": plan.split,
        "n_bits" if plan.output == "codes" else "n_features": plan.width,
        "vectors_dtype": plan.dtype,
    }
    if plan.output == "codes":
        facts["bit_order"] = BIT_ORDER
    return {
        f"hashnet.{name}": value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in sorted(facts.items())
        if value is not None
    }


def with_stored_vectors(rows: pa.Table, plan: StorePlan) -> pa.Table:
    """``rows`` with the columns that store ``feature``, a list of float32, in the plan's dtype."""
    vectors = rows["feature"].combine_chunks().flatten().to_numpy().reshape(len(rows), plan.width)
    columns = vector_columns(rows["row_id"].to_numpy(), vectors, str(plan.dtype))
    kept = {name: rows[name] for name in rows.column_names if name != "feature"}
    return pa.table(kept | columns)


def parquet_bytes(table: pa.Table) -> bytes:
    """The Parquet file of a table. The options are fixed: the same rows are the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        row_group_size=65_536,
        use_dictionary=["labels.list.element"],  # codes, ids and uris hardly ever repeat
        write_statistics=["row_id"],
        write_page_checksum=True,  # for readers that do not check the sha256
        data_page_version="1.0",
        version="2.6",
    )
    return sink.getvalue().to_pybytes()


def content_sha256(shards: list[ShardRecord]) -> str:
    """Fingerprint of a store: of the names and fingerprints of its shards, in order."""
    return hashlib.sha256("".join(f"{s.name} {s.sha256}\n" for s in shards).encode()).hexdigest()


def write_store(
    uri: str,
    codes: np.ndarray,
    ids: np.ndarray | None = None,
    labels: np.ndarray | pa.Array | None = None,
    uris: list[str] | None = None,
    n_classes: int | None = None,
    rows_per_shard: int = ROWS_PER_SHARD,
    lineage: dict[str, Any] | None = None,
    overwrite: bool = False,
    columns: pa.Table | None = None,
    class_names: Sequence[str] | None = None,
) -> CodeStore:
    """A complete store of the given codes, uint8 (n, n_bits // 8); ids default to 0..n-1.

    ``labels`` are class ids, multi-hot rows, or an Arrow array of class id lists (then with ``n_classes``);
    ``class_names`` has one name per class.
    ``columns`` are further ones of the same rows, for filters and hits; ``key`` among them is a text, or a
    whole number that is kept as one, and differs for every row. Rows are stored in the order of their ids,
    which must differ. A folder that holds a store is refused unless ``overwrite``.
    """
    codes = check_codes(codes)
    n = len(codes)
    ids = np.arange(n, dtype=np.int64) if ids is None else check_ids(ids, n=n, lowest=0)
    lists, n_classes = _label_lists(labels, n_classes)
    if class_names is not None and len(class_names) != n_classes:
        raise DataError(
            f"{len(class_names)} class names came with {n_classes or 'no'} classes; give one each"
        )
    for name, column in (("labels", lists), ("uris", uris), ("columns", columns)):
        if column is not None and len(column) != n:
            raise CodeError(f"{n} codes came with {len(column)} {name}")
    if len(np.unique(ids)) != n:
        raise CodeError(f"ids must differ; {n - len(np.unique(ids))} of {n} are repeated")
    _make_room(uri, overwrite)
    further = pa.table({}) if columns is None else columns
    further_columns(further.column_names, None, further.schema, set(), "columns")  # refuses what cannot be
    if "key" in further.column_names:
        refuse_duplicates(plain_column(further["key"], "key").combine_chunks(), "column 'key'")
    order = np.argsort(ids, kind="stable")
    part = PlannedPart("arrays", hashlib.sha256(ids[order].tobytes() + codes[order].tobytes()).hexdigest(), n)
    writer = StoreWriter(
        uri,
        StorePlan(
            output="codes",
            width=codes.shape[1] * 8,
            rows_per_shard=rows_per_shard,
            parts=(part,),
            n_classes=n_classes,
            lineage={"bit_order": BIT_ORDER} | (lineage or {}),
            columns={name: str(schema_type(further.schema, name, name)) for name in further.column_names},
            class_names=None if class_names is None else tuple(class_names),
        ),
    ).begin()
    for shard in writer.plan.ranges():
        rows = order[shard.start : shard.stop]
        table = pa.table(
            {
                "row_id": ids[rows],
                "uri": pa.array([None if uris is None else uris[i] for i in rows], pa.string()),
                "labels": pa.nulls(len(rows), pa.list_(pa.int32())) if lists is None else lists.take(rows),
                "code": binary_column(codes[rows]),
                **{name: plain_column(further[name], name).take(rows) for name in further.column_names},
            }
        )
        writer.commit(shard, table)
    writer.finish()
    return CodeStore.open(uri)


def write_features(
    uri: str,
    vectors: np.ndarray,
    codes: CodeStore,
    dtype: str = "float16",
    lineage: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> FeatureStore:
    """A complete store of vectors float (n, width), one per row of a code store and in its order.

    Vectors of your own, to rescore hits by: they need not come from the model that made the codes.
    """
    vectors = check_vectors(vectors, None, "features", len(codes))
    _make_room(uri, overwrite)
    plan = StorePlan(
        output="features",
        width=vectors.shape[1],
        rows_per_shard=codes.plan.rows_per_shard,
        parts=codes.plan.parts,
        split=codes.plan.split,
        lineage=lineage or {},
        dtype=dtype,
    )
    writer, start = StoreWriter(uri, plan).begin(), 0
    for shard, table in zip(codes.shards, codes.tables(["row_id", "uri"]), strict=True):
        rows = vectors[start : start + len(table)]
        start += len(table)
        feature = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), plan.width)
        table = table.append_column("labels", pa.nulls(len(table), pa.list_(pa.int32())))
        part = next((part for part in plan.parts if part.name == shard.part), plan.parts[-1])
        name = f"features-{shard.name.partition('-')[2]}"
        where = ShardRange(name, part, shard.start, shard.stop)
        bad = None
        if shard.bad_rows:
            bad = shard.table(codes.uri, QUARANTINE_SCHEMA.names, quarantined=True)
        writer.commit(where, table.append_column("feature", feature), bad, shard.repair)
    writer.finish()
    return FeatureStore.open(uri)


def _make_room(uri: str, overwrite: bool) -> None:
    """Deletes the store in the folder, if there is one; DataError unless that is wanted."""
    if storage.exists(storage.join(uri, PLAN)):
        if not overwrite:
            raise DataError(f"{uri} holds a store already; give another folder or overwrite=True")
        storage.delete(uri)


def _label_lists(labels: Any, n_classes: int | None) -> tuple[pa.Array | None, int | None]:
    """Class id lists list<int32> (n,) and the number of classes; None and None without labels."""
    if labels is None:
        return None, None
    if isinstance(labels, pa.Array):
        check_labels(labels, n_classes)
        return labels, n_classes
    multi_hot = label_sets.as_multi_hot(labels, n_classes)
    return label_sets.to_lists(multi_hot), multi_hot.shape[1]
