"""The commit protocol of codes/ (and of features/): frozen ranges, shards, records, then the list.

    codes/_plan.json                         what is being made; frozen by the first run
    codes/codes-00017.parquet                a shard: temporary name + rename, or one put
    codes/_quarantine/codes-00017.parquet    its bad rows (row_id, uri, reason), where it has some
    codes/_records/codes-00017.json          written after both: from here on the shard counts
    codes/manifest.json, codes/_SUCCESS      written last, and all that readers trust

The rows of one split are cut, manifest part by manifest part, into ranges of ``rows_per_shard``
rows in row_id order; a range is a shard with a stable name. The bytes of a shard depend on its rows
and its lineage alone (no clock, host or run id), so writing it twice is writing the same file, and
whoever runs the same plan again makes only the shards that have no record yet. A plan may grow by
appended parts while a run of the shorter one goes on: only a run of the longer one writes the list.
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
from hashnet.store.plan import BIT_ORDER, FORMAT_VERSION, ShardRange, StorePlan, read_plan

READERS = 16  # files read at once: on an object store each is a round trip
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


def commit_shard(
    uri: str,
    plan: StorePlan,
    shard: ShardRange,
    rows: pa.Table,
    bad: pa.Table | None = None,
    repair: bool = False,
) -> ShardRecord:
    """Writes shard, quarantine and record, in that order; returns the record.

    ``rows`` has the columns of ``plan.schema`` and ``bad`` row_id, uri, reason; both in any order.
    """
    rows = rows.select(plan.schema.names).cast(plan.schema).sort_by("row_id").combine_chunks()
    bad = QUARANTINE_SCHEMA.empty_table() if bad is None else bad.select(QUARANTINE_SCHEMA.names)
    bad = bad.cast(QUARANTINE_SCHEMA).sort_by("row_id").combine_chunks()
    if rows.num_rows + bad.num_rows != len(shard) and not repair:
        raise FormatError(
            f"{shard.name} must hold {len(shard)} rows, got {rows.num_rows} and {bad.num_rows} bad ones"
        )
    metadata = shard_metadata(plan, shard.part.sha256)
    data = parquet_bytes(rows.replace_schema_metadata(metadata))
    sha256 = hashlib.sha256(data).hexdigest()
    storage.write_bytes(storage.join(uri, f"{shard.name}.parquet"), data)
    quarantine_sha256 = None
    if bad.num_rows:
        refused = parquet_bytes(bad)
        quarantine_sha256 = hashlib.sha256(refused).hexdigest()
        storage.write_bytes(storage.join(uri, QUARANTINE, f"{shard.name}.parquet"), refused)
    counts = pc.value_counts(bad["reason"]).to_pylist()
    record = ShardRecord(
        name=shard.name,
        rows=rows.num_rows,
        bad_rows=bad.num_rows,
        sha256=sha256,
        bytes=len(data),
        part=shard.part.name,
        part_sha256=shard.part.sha256,
        start=shard.start,
        stop=shard.stop,
        reasons={count["values"]: count["counts"] for count in counts},
        quarantine_sha256=quarantine_sha256,
        repair=repair,
    )
    about = {"kind": "shard record", "format_version": FORMAT_VERSION} | record.to_dict()
    storage.write_json(storage.join(uri, RECORDS, f"{shard.name}.json"), about)
    return record


def shard_metadata(plan: StorePlan, part_sha256: str) -> dict[str, str]:
    """Parquet key-value metadata of a shard: the lineage, one ``hashnet.*`` key a fact."""
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
    """Committed shards by name: those whose record and whose file of that size are both there.

    A repair shard counts while all its rows are in quarantine: when a range is encoded anew after its
    rows were re-encoded, they are in its shard.
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
    return _left_and_counting(uri, whole)[1] if repaired else whole


def read_quarantine(uri: str, records: Mapping[str, ShardRecord]) -> pa.Table:
    """Bad rows (row_id, uri, reason) in row_id order that no repair shard holds since."""
    return _left_and_counting(uri, records)[0].sort_by("row_id")


def _left_and_counting(
    uri: str, records: Mapping[str, ShardRecord]
) -> tuple[pa.Table, dict[str, ShardRecord]]:
    """What is left in quarantine, and the records without repair shards that hold anything else."""
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


def finish(uri: str, plan: StorePlan) -> dict[str, Any]:
    """Writes manifest.json and then _SUCCESS; returns what manifest.json holds.

    Refused with FormatError while a shard is missing, or when the store was extended beyond ``plan``.
    Mending shards come last in the list.
    """
    shards = listed(uri, plan)
    repaired = sum(record.rows for record in shards if record.repair)
    about = plan.to_dict() | {
        "rows": sum(record.rows for record in shards),
        "bad_rows": sum(record.bad_rows for record in shards if not record.repair) - repaired,
        "shards": [record.to_dict() for record in shards],
        "statistics": code_statistics(uri, plan, shards) if plan.output == "codes" else {},
    }
    if was_extended(uri, plan):  # asked last, because the statistics take their time
        raise FormatError(
            f"{uri} was extended meanwhile by a job that knows more parts of the manifest; that one finishes "
            "it, with the shards made here: there is nothing to do, unless it died, then run it again"
        )
    about = CodesArtefact(uri, plan.output).write_header(
        about, sha256=content_sha256(shards), lineage=plan.lineage
    )
    storage.write_bytes(storage.join(uri, SUCCESS), b"")
    _remove_leftovers(uri, shards)
    return about


def was_extended(uri: str, plan: StorePlan) -> bool:
    """Whether the store has a longer plan by now: another job's, which writes the list."""
    now = read_plan(uri)
    return now is not None and len(now.parts) > len(plan.parts)


def listed(uri: str, plan: StorePlan) -> list[ShardRecord]:
    """The records of a complete store in the order of its list: the ranges, then repair shards."""
    records = read_records(uri)
    names = [shard.name for shard in plan.ranges()]
    missing = [name for name in names if name not in records]
    if missing:
        raise FormatError(f"{uri} lacks {len(missing)} of {len(names)} shards, the first is {missing[0]}")
    names += sorted(record.name for record in records.values() if record.repair)
    return [records[name] for name in names]


def code_statistics(uri: str, plan: StorePlan, shards: list[ShardRecord]) -> dict[str, Any]:
    """How many different codes there are, and the share of ones per bit; ``READERS`` shards in memory."""
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


def content_sha256(shards: list[ShardRecord]) -> str:
    """One fingerprint of a store: of its shards' names and fingerprints, in order."""
    return hashlib.sha256("".join(f"{s.name} {s.sha256}\n" for s in shards).encode()).hexdigest()


def _remove_leftovers(uri: str, shards: list[ShardRecord]) -> None:
    """What runs that were killed left: temporary files, and bad rows of shards that now have none.

    The bad rows of shards that are not in the list are another run's, and stay.
    """
    for folder in (uri, storage.join(uri, RECORDS), storage.join(uri, QUARANTINE)):
        for name in storage.list_names(folder):
            if storage.TMP_MARK in name:
                storage.delete(storage.join(folder, name))
    without_bad = {record.file for record in shards if not record.bad_rows}
    for name in without_bad.intersection(storage.list_names(storage.join(uri, QUARANTINE))):
        storage.delete(storage.join(uri, QUARANTINE, name))
