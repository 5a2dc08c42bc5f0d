"""What the ``uri`` of a manifest row may be, and how one is read.

    /data/cat.jpg, s3://bucket/cat.jpg              a file
    …/shard-0001.tar#offset=1536&size=20480         bytes inside a file: a tar member in one ranged read
    …/data_batch_1.bin#offset=1&size=3072&raw=3x32x32   the same, holding bare pixels (planes of R, G, B)
    …/pictures.parquet#column=image.bytes&group=2&row=17    a value of a Parquet file

The part after ``#`` counts only when it has one of these forms, so a file name may hold a ``#``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_RANGE = re.compile(r"offset=(\d+)&size=(\d+)(?:&raw=(\d+)x(\d+)x(\d+))?")
_VALUE = re.compile(r"column=(.+)&group=(\d+)&row=(\d+)")


@dataclass(frozen=True)
class Reference:
    """A file (``file`` alone), a range of its bytes, or a value of a Parquet file."""

    file: str
    offset: int | None = None
    size: int = 0
    raw: tuple[int, int, int] | None = None  # channels, height, width of bare pixels
    column: str | None = None
    group: int = 0
    row: int = 0


def parse(uri: str) -> Reference:
    """The reference a uri makes."""
    file, mark, fragment = uri.rpartition("#")
    if mark:
        if found := _RANGE.fullmatch(fragment):
            offset, size, *shape = found.groups()
            raw = tuple(int(n) for n in shape) if shape[0] else None
            return Reference(file, offset=int(offset), size=int(size), raw=raw)  # type: ignore[arg-type]
        if found := _VALUE.fullmatch(fragment):
            return Reference(file, column=found[1], group=int(found[2]), row=int(found[3]))
    return Reference(uri)


def byte_ranges(file: str, offsets: Any, size: Any, raw: str = "") -> pa.Array:
    """Arrow strings, one reference per offset (n,); ``size`` is one number or (n,)."""
    start = pc.cast(pa.array(offsets, pa.int64()), pa.string())
    sizes = (
        pa.array(size, pa.int64()) if hasattr(size, "__len__") else pa.array([size] * len(start), pa.int64())
    )
    tail = f"&raw={raw}" if raw else ""
    return pc.binary_join_element_wise(
        f"{file}#offset=", start, "&size=", pc.cast(sizes, pa.string()), tail, ""
    )


def parquet_values(file: str, column: str, group: int, n: int) -> pa.Array:
    """Arrow strings, one reference per row 0..n-1 of a row group."""
    rows = pc.cast(pa.array(range(n), pa.int64()), pa.string())
    return pc.binary_join_element_wise(f"{file}#column={column}&group={group}&row=", rows, "")
