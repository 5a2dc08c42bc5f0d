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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashnet.codes import bit_balance
from hashnet.errors import FormatError
from hashnet.io import binary_matrix, storage
from hashnet.store.artefact import QUARANTINE, RECORDS, SUCCESS, CodesArtefact
from hashnet.store.distinct_count import DistinctCounter
from hashnet.store.plan import BIT_ORDER, FORMAT_VERSION, PLAN, ShardRange, StorePlan, check_plan, read_plan

READERS = 16  # files read at once, because each is a round trip on an object store
QUARANTINE_SCHEMA = pa.schema([("row_id", pa.int64()), ("uri", pa.string()), ("reason", pa.string())])


@dataclass(frozen=True)
class ShardRecord:
    """What is known of one committed shard.

    A repair shard holds rows that were in quarantine and could be encoded later, from any range.
    """

    name: str
    rows: int
    bad_rows: int
    sha256: str
    bytes: int
    part: str
    part_sha256: str
    start: int
    stop: int
    reasons: Mapping[str, int]
    quarantine_sha256: str | None = None
    repair: bool = False

    @property
    def file(self) -> str:
        return f"{self.name}.parquet"

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> ShardRecord:
        return cls(**{name: about[_KEYS.get(name, name)] for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}


_KEYS = {"repair": "mends"}  # names on disk that differ from the attribute's


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
            storage.make_folder(self.uri)
            storage.write_json(storage.join(self.uri, PLAN), self.plan.to_dict())
        return self

    def commit(
        self, shard: ShardRange, rows: pa.Table, bad: pa.Table | None = None, repair: bool = False
    ) -> ShardRecord:
        """The record of a shard, after writing shard, quarantine and record, in that order.

        ``rows`` has the columns of ``plan.schema``, ``bad`` has row_id, uri, reason; both in any order.
        """
        schema = self.plan.schema
        rows = rows.select(schema.names).cast(schema).sort_by("row_id").combine_chunks()
        bad = QUARANTINE_SCHEMA.empty_table() if bad is None else bad.select(QUARANTINE_SCHEMA.names)
        bad = bad.cast(QUARANTINE_SCHEMA).sort_by("row_id").combine_chunks()
        if rows.num_rows + bad.num_rows != len(shard) and not repair:
            raise FormatError(
                f"{shard.name} must hold {len(shard)} rows, got {rows.num_rows} and {bad.num_rows} bad ones"
            )
        metadata = shard_metadata(self.plan, shard.part.sha256)
        data = parquet_bytes(rows.replace_schema_metadata(metadata))
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
        values = {"kind": "shard record", "format_version": FORMAT_VERSION} | record.to_dict()
        storage.write_json(storage.join(self.uri, RECORDS, f"{shard.name}.json"), values)
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
            "statistics": code_statistics(self.uri, self.plan, shards) if self.plan.output == "codes" else {},
        }
        if self.was_extended():  # checked last, because the statistics take a while
            raise FormatError(
                f"{self.uri} was extended meanwhile by a job with more parts of the manifest; that job "
                "finishes the store, with the shards made here: nothing is left to do unless it died, "
                "then run it again"
            )
        header = CodesArtefact(self.uri, self.plan.output).write_header(
            values, sha256=content_sha256(shards), lineage=self.plan.lineage
        )
        storage.write_bytes(storage.join(self.uri, SUCCESS), b"")
        self._remove_leftovers(shards)
        return header

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
        """Deletes what killed runs left: temporary files, and bad rows of shards that now have none.

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
    }
    if plan.output == "codes":
        facts["bit_order"] = BIT_ORDER
    return {
        f"hashnet.{name}": value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in sorted(facts.items())
        if value is not None
    }


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
        data_page_version="1.0",
        version="2.6",
    )
    return sink.getvalue().to_pybytes()


def read_records(uri: str) -> dict[str, ShardRecord]:
    """Committed shards by name: those that have a record and a file of the recorded size.

    A repair shard counts while all its rows are in quarantine. When a range is encoded again later, its
    rows are in the range's own shard and the repair shard no longer counts.
    """
    sizes = storage.list_sizes(uri)
    names = [name for name in storage.list_names(storage.join(uri, RECORDS)) if name.endswith(".json")]

    def read(name: str) -> ShardRecord:
        where = storage.join(uri, RECORDS, name)
        about = storage.check_format(storage.read_json(where), where, "shard record", FORMAT_VERSION)
        return ShardRecord.from_dict(about)

    with ThreadPoolExecutor(READERS) as pool:
        records = list(pool.map(read, names))
    whole = {record.name: record for record in records if sizes.get(record.file) == record.bytes}
    repaired = any(record.repair for record in whole.values())
    return _resolve_repairs(uri, whole)[1] if repaired else whole


def read_quarantine(uri: str, records: Mapping[str, ShardRecord]) -> pa.Table:
    """Bad rows (row_id, uri, reason) in row_id order that no repair shard holds."""
    return _resolve_repairs(uri, records)[0].sort_by("row_id")


def _resolve_repairs(uri: str, records: Mapping[str, ShardRecord]) -> tuple[pa.Table, dict[str, ShardRecord]]:
    """The rows left in quarantine, and the records that count (see ``read_records``)."""
    counting = {name: record for name, record in records.items() if not record.repair}
    tables = [QUARANTINE_SCHEMA.empty_table()]
    for record in counting.values():
        if record.bad_rows:
            with storage.open_input(storage.join(uri, QUARANTINE, record.file)) as source:
                tables.append(pq.read_table(source, columns=QUARANTINE_SCHEMA.names))
    bad = pa.concat_tables(tables).cast(QUARANTINE_SCHEMA)
    for record in sorted((record for record in records.values() if record.repair), key=lambda r: r.name):
        with storage.open_input(storage.join(uri, record.file)) as source:
            rows = pq.read_table(source, columns=["row_id"])["row_id"].combine_chunks()
        repaired = pc.is_in(bad["row_id"], value_set=rows)
        if pc.sum(repaired).as_py() == len(rows):
            bad, counting[record.name] = bad.filter(pc.invert(repaired)), record
    return bad, counting


def content_sha256(shards: list[ShardRecord]) -> str:
    """Fingerprint of a store: of the names and fingerprints of its shards, in order."""
    return hashlib.sha256("".join(f"{s.name} {s.sha256}\n" for s in shards).encode()).hexdigest()


def code_statistics(uri: str, plan: StorePlan, shards: list[ShardRecord]) -> dict[str, Any]:
    """The number of different codes, and the fraction of ones per bit; holds ``READERS`` shards in memory."""
    counter, ones, rows = DistinctCounter(), np.zeros(plan.width), 0

    def read(record: ShardRecord) -> np.ndarray:
        with storage.open_input(storage.join(uri, record.file)) as source:
            return binary_matrix(pq.read_table(source, columns=["code"])["code"], plan.width // 8)

    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(shards), READERS):
            for codes in pool.map(read, shards[start : start + READERS]):
                counter.add(codes)
                ones += bit_balance(codes) * len(codes)
                rows += len(codes)
    return {
        "distinct_codes": counter.count,
        "distinct_is_exact": counter.exact,
        "bit_balance": [round(float(share), 6) for share in ones / max(rows, 1)],
    }
