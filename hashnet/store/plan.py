"""StorePlan: what a store is made of, cut into frozen ranges; and which plan a folder accepts.

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

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from hashnet.errors import FormatError, LineageMismatch
from hashnet.io import storage

FORMAT_VERSION = 1
PLAN = "_plan.json"
BIT_ORDER = "msb first, 1 where >= 0"
# Lineage that determines the bytes of a code: output made with other values is never mixed.
IDENTITY = ("model_sha256", "preprocess_version", "engine", "dtype", "batch_rows", "bit_order")


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
        value = pa.binary(self.width // 8) if self.output == "codes" else pa.list_(pa.float32(), self.width)
        return pa.schema(
            [
                pa.field("row_id", pa.int64(), nullable=False),
                pa.field("uri", pa.string()),
                pa.field("labels", pa.list_(pa.int32())),
                pa.field(self.column, value, nullable=False),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "plan", "format_version": FORMAT_VERSION} | asdict(self)

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> StorePlan:
        values = {name: about[name] for name in cls.__dataclass_fields__}
        return cls(**values | {"parts": tuple(PlannedPart(**part) for part in about["parts"])})


def read_plan(uri: str) -> StorePlan | None:
    """The plan in a folder, or None where no store was begun."""
    where = storage.join(uri, PLAN)
    if not storage.exists(where):
        return None
    about = storage.check_format(storage.read_json(where), where, "plan", FORMAT_VERSION)
    try:
        return StorePlan.from_dict(about)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{where} lacks {error}; it is damaged or was not written by hashnet") from error


def check_plan(uri: str, requested: StorePlan) -> StorePlan:
    """``requested``, when the folder is empty, holds it or can be extended to it; else LineageMismatch."""
    found = read_plan(uri)
    if found is None:
        return requested
    fix = "give another output folder, or delete this one to encode again"
    for name in ("output", "width", "split", "rows_per_shard", "n_classes"):
        now, before = getattr(requested, name), getattr(found, name)
        if now != before:
            name = {"width": "n_bits" if found.output == "codes" else "feature length"}.get(name, name)
            raise LineageMismatch(f"{uri} was made with {name} {before}, requested is {now}; {fix}")
    for name in IDENTITY:
        now, before = requested.lineage.get(name), found.lineage.get(name)
        if now != before:
            raise LineageMismatch(f"{uri} was made with {name} {before!r}, requested is {now!r}; {fix}")
    for i, part in enumerate(found.parts):
        new = requested.parts[i] if i < len(requested.parts) else None
        if new is None or (new.sha256, new.rows) != (part.sha256, part.rows):
            have = f"{new.sha256[:12]} ({new.rows} rows)" if new else "missing"
            raise LineageMismatch(
                f"{uri} was made from a manifest whose part {i} ({part.name}) is {part.sha256[:12]} "
                f"({part.rows} rows), now it is {have}; parts may be appended, not changed: {fix}"
            )
    return requested


def repair_range(plan: StorePlan, number: int, rows: int) -> ShardRange:
    """The range of repair shard ``number``; its rows may come from any range of the plan."""
    part = PlannedPart("quarantine", plan.parts[-1].sha256, rows)
    return ShardRange(f"{plan.output}-mended-{number:05d}", part, 0, rows)
