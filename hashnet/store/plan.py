"""StorePlan and ShardRecord: what a store is to hold, cut into frozen ranges, and what is committed of it.

The rows of one split are cut, manifest part by manifest part, into ranges of ``rows_per_shard``
rows in row_id order. A range is one shard with a stable name. The first run freezes the plan in the
output folder; a later plan must be the same, or the same over more parts, or it is refused.

>>> parts = PlannedPart("part-00000", "ab", 5), PlannedPart("part-00001", "cd", 3)
>>> plan = StorePlan("codes", 64, rows_per_shard=4, parts=parts)
>>> for shard in plan.ranges():
...     print(shard.name, shard.part.name, shard.start, shard.stop)
codes-00000 part-00000 0 4
codes-00001 part-00000 4 5
codes-00002 part-00001 0 3
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashnet.errors import FormatError, LineageMismatch
from hashnet.io import read_checked, read_sealed, storage, type_from_text, write_sealed
from hashnet.store.vectors import vector_schema

FORMAT_VERSION = 1
PLAN, RECORDS, QUARANTINE, SUCCESS = "_plan.json", "_records", "_quarantine", "_SUCCESS"
READERS = 16  # files read at once, because each is a round trip on an object store
BIT_ORDER = "msb first, 1 where >= 0"
REDO_STORE = "delete the folder and encode again"
REDO_SHARD = "delete it and run the same encode_db command again: only its rows are encoded anew"
# Lineage that determines the bytes of a code: output made with other values is never mixed.
IDENTITY = ("model_sha256", "preprocess_version", "engine", "dtype", "batch_rows", "bit_order")

QUARANTINE_SCHEMA = pa.schema([("row_id", pa.int64()), ("uri", pa.string()), ("reason", pa.string())])


@dataclass(frozen=True)
class PlannedPart:
    """A frozen manifest part: ``rows`` counts only the rows of the encoded split."""

    name: str
    sha256: str
    rows: int


@dataclass(frozen=True)
class ShardRange:
    """Rows [start, stop) of the split inside one manifest part: what shard ``name`` holds."""

    name: str
    part: PlannedPart
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StorePlan:
    """What a store is made of. ``width`` is n_bits of codes, or the length of a feature."""

    output: str  # "codes" or "features"
    width: int
    rows_per_shard: int
    parts: tuple[PlannedPart, ...]
    split: str = "database"
    n_classes: int | None = None
    lineage: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)  # the manifest's further ones: Arrow types
    dtype: str | None = None  # of features, as they are stored; None: float32 lists of older versions
    class_names: tuple[str, ...] | None = None  # of a store without a manifest, which would have them

    def ranges(self) -> Iterator[ShardRange]:
        """Every shard in order. Ranges never cross a part, so an appended part adds shards only."""
        number = 0
        for part in self.parts:
            for start in range(0, part.rows, self.rows_per_shard):
                stop = min(start + self.rows_per_shard, part.rows)
                yield ShardRange(f"{self.output}-{number:05d}", part, start, stop)
                number += 1

    @property
    def n_rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def n_shards(self) -> int:
        return sum(-(-part.rows // self.rows_per_shard) for part in self.parts)

    @property
    def column(self) -> str:
        return "code" if self.output == "codes" else "feature"

    @property
    def schema(self) -> pa.Schema:
        """Columns of a shard, without metadata."""
        if self.output == "codes":
            values = [pa.field("code", pa.binary(self.width // 8), nullable=False)]
        elif self.dtype is None:
            values = [pa.field("feature", pa.list_(pa.float32(), self.width), nullable=False)]
        else:
            values = vector_schema(self.width, self.dtype)
        return pa.schema(
            [
                pa.field("row_id", pa.int64(), nullable=False),
                pa.field("uri", pa.string()),
                pa.field("labels", pa.list_(pa.int32())),
                *values,
                *(pa.field(name, type_from_text(kind)) for name, kind in self.columns.items()),
            ]
        )

    @property
    def rows_sha256(self) -> str:
        """Which rows these are and in what order, whatever is stored of them."""
        return hashlib.sha256(
            "".join(f"{part.sha256} {part.rows}\n" for part in self.parts).encode()
        ).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"columns": [list(pair) for pair in self.columns.items()]}

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> StorePlan:
        values = {name: about[name] for name in about if name in cls.__dataclass_fields__}
        parts = tuple(PlannedPart(**part) for part in values.pop("parts"))
        columns = dict(values.pop("columns", ()))  # older stores have none, and no class names
        names = values.pop("class_names", None)
        class_names = None if names is None else tuple(names)
        return cls(parts=parts, columns=columns, class_names=class_names, **values)

    def difference(self, requested: StorePlan) -> str | None:
        """What keeps a store of this plan from being one of ``requested``, or from growing into it."""
        for name in ("output", "width", "split", "rows_per_shard", "n_classes", "columns", "dtype"):
            before, now = getattr(self, name), getattr(requested, name)
            if now != before:
                name = {"width": "n_bits" if self.output == "codes" else "feature length"}.get(name, name)
                return f"was made with {name} {before}, requested is {now}"
        for name in IDENTITY:
            before, now = self.lineage.get(name), requested.lineage.get(name)
            if now != before:
                return f"was made with {name} {before!r}, requested is {now!r}"
        for i, part in enumerate(self.parts):
            new = requested.parts[i] if i < len(requested.parts) else None
            if new is None or (new.sha256, new.rows) != (part.sha256, part.rows):
                have = f"{new.sha256[:12]} ({new.rows} rows)" if new else "missing"
                return (
                    f"was made from a manifest whose part {i} ({part.name}) is {part.sha256[:12]} "
                    f"({part.rows} rows), now it is {have}; parts may be appended, not changed"
                )
        return None


def write_plan(uri: str, plan: StorePlan) -> None:
    """Freezes the plan in a folder."""
    storage.make_folder(uri)
    write_sealed(storage.join(uri, PLAN), "plan", FORMAT_VERSION, plan.to_dict())


def read_plan(uri: str) -> StorePlan | None:
    """The plan in a folder, or None where no store was begun."""
    where = storage.join(uri, PLAN)
    if not storage.exists(where):
        return None
    about = read_sealed(where, "plan", FORMAT_VERSION, REDO_STORE)
    try:
        return StorePlan.from_dict(about)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{where} lacks {error}; it is damaged or was not written by hashnet") from error


def check_plan(uri: str, requested: StorePlan) -> StorePlan:
    """``requested``, when the folder is empty, holds it or can be extended to it; else LineageMismatch."""
    found = read_plan(uri)
    if found is not None and (differing := found.difference(requested)):
        fix = "give another output folder, or delete this one to encode again"
        raise LineageMismatch(f"{uri} {differing}; {fix}")
    return requested


def repair_range(plan: StorePlan, number: int, rows: int) -> ShardRange:
    """The range of repair shard ``number``; its rows may come from any range of the plan."""
    part = PlannedPart("quarantine", plan.parts[-1].sha256, rows)
    return ShardRange(f"{plan.output}-mended-{number:05d}", part, 0, rows)


@dataclass(frozen=True)
class ShardRecord:
    """The record of one committed shard.

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

    def table(self, uri: str, columns: list[str], quarantined: bool = False) -> pa.Table:
        """The shard's rows, or its bad rows, after a check of the file's sha256."""
        where = storage.join(uri, *((QUARANTINE,) if quarantined else ()), self.file)
        sha256 = self.quarantine_sha256 if quarantined else self.sha256
        data = read_checked(where, str(sha256), REDO_SHARD)
        return pq.read_table(pa.BufferReader(data), columns=columns, use_threads=False)

    def to_dict(self) -> dict[str, Any]:
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}


_KEYS = {"repair": "mends"}  # names on disk that differ from the attribute's


def write_record(uri: str, record: ShardRecord) -> None:
    """Writes a shard's record, which makes the shard count."""
    where = storage.join(uri, RECORDS, f"{record.name}.json")
    write_sealed(where, "shard record", FORMAT_VERSION, record.to_dict())


def read_record(uri: str, name: str) -> ShardRecord:
    """The record in the file ``name``; FormatError where it is damaged or that of another shard."""
    where = storage.join(uri, RECORDS, name)
    about = read_sealed(where, "shard record", FORMAT_VERSION, REDO_SHARD)
    try:
        record = ShardRecord.from_dict(about)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{where} lacks {error}; it is damaged: {REDO_SHARD}") from error
    if f"{record.name}.json" != name:
        raise FormatError(f"{where} is the record of {record.name}; {REDO_SHARD}")
    return record


def read_records(uri: str) -> dict[str, ShardRecord]:
    """Committed shards by name: those that have a record and a file of the recorded size.

    A repair shard counts while all its rows are in quarantine. When a range is encoded again later, its
    rows are in the range's own shard and the repair shard no longer counts.
    """
    sizes = storage.list_sizes(uri)
    names = [name for name in storage.list_names(storage.join(uri, RECORDS)) if name.endswith(".json")]

    with ThreadPoolExecutor(READERS) as pool:
        records = list(pool.map(lambda name: read_record(uri, name), names))
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
            tables.append(record.table(uri, QUARANTINE_SCHEMA.names, quarantined=True))
    bad = pa.concat_tables(tables).cast(QUARANTINE_SCHEMA)
    for record in sorted((record for record in records.values() if record.repair), key=lambda r: r.name):
        rows = record.table(uri, ["row_id"])["row_id"].combine_chunks()
        repaired = pc.is_in(bad["row_id"], value_set=rows)
        if pc.sum(repaired).as_py() == len(rows):
            bad, counting[record.name] = bad.filter(pc.invert(repaired)), record
    return bad, counting
