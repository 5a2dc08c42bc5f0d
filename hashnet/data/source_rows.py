"""SourceRows: what every source returns, whatever it read: payload, labels and names, before the split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hashnet.errors import DataError


@dataclass(frozen=True)
class SourceRows:
    """n rows in their final order.

    ``payload(start, stop)`` is the table of those rows with ``uri``, and ``image`` or ``feature``. It is
    called for ascending blocks, so that features larger than memory can be streamed. ``labels`` are
    class id lists list<int32> (n,), ``names`` the names that split files use for rows, ``fixed`` the
    split flags that came with the data. Text of all rows is large_string, because 32-bit offsets end
    at 2 GiB; it becomes string when a block is written.
    """

    n: int
    payload: Callable[[int, int], pa.Table]
    modality: str = "image"
    labels: pa.Array | None = None
    n_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    n_features: int | None = None
    inline: bool = False
    names: pa.Array | None = None
    fixed: np.ndarray | None = None
    notes: dict[str, int | str] = field(default_factory=dict)  # for the manifest's ``source``
    block_rows: int = 32_768
    undo: Callable[[], None] | None = None  # removes the files that the payload wrote


def rows_of_uris(uris: pa.Array, **fields: Any) -> SourceRows:
    """Rows of pictures that are given by their uris; ``fields`` are those of ``SourceRows``."""
    return SourceRows(n=len(uris), payload=lambda start, stop: pa.table({"uri": uris[start:stop]}), **fields)


class Duplicate(NamedTuple):
    """An id that occurs twice, its first two rows, and the number of repetitions in all."""

    id: str
    first: int
    second: int
    n: int


def find_duplicate(ids: pa.Array) -> Duplicate | None:
    """The first id that occurs twice, or None."""
    codes = ids.dictionary_encode().indices.to_numpy()
    if len(codes) == 0 or len(codes) == codes.max() + 1:
        return None
    order = np.argsort(codes, kind="stable")
    again = np.flatnonzero(np.diff(codes[order]) == 0)
    first, second = int(order[again[0]]), int(order[again[0] + 1])
    return Duplicate(ids[first].as_py(), first, second, len(again))


def refuse_duplicates(ids: pa.Array, what: str) -> None:
    """DataError that names the first id that occurs twice, with both rows, or the first row without one."""
    if ids.null_count:
        row = ids.is_null().index(True).as_py()
        raise DataError(f"{what}: row {row} has no id; give every row one")
    if twice := find_duplicate(ids):
        raise DataError(
            f"{what}: rows {twice.first} and {twice.second} both have id {twice.id!r} "
            f"({twice.n:,} duplicated ids in all); ids must differ"
        )
