"""The frozen Parquet files that make up a manifest: their columns, writing and reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.data import splits
from hashnet.errors import DataError, FormatError
from hashnet.io import TableBuffer, storage, type_from_text

GROUP_ROWS = 32_768  # rows of a Parquet row group, which a reader has to read at once …
GROUP_BYTES = 16 << 20  # … or this many bytes, where rows are large (pictures, features)
PART_ROWS = 1_000_000
PART_BYTES = 256 << 20


@dataclass(frozen=True)
class RowGroup:
    """One row group: its rows, and how many of them are in each split."""

    rows: int
    splits: dict[str, int]


@dataclass(frozen=True)
class ManifestPart:
    """One frozen file. Its rows have the ids first_row_id, first_row_id + 1, …"""

    name: str
    sha256: str
    bytes: int
    rows: int
    first_row_id: int
    splits: dict[str, int]
    groups: tuple[RowGroup, ...]

    @classmethod
    def from_dict(cls, about: dict[str, Any]) -> ManifestPart:
        return cls(**{**about, "groups": tuple(RowGroup(**group) for group in about["groups"])})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "groups": [asdict(group) for group in self.groups]}


def schema_of(
    modality: str, n_features: int | None, inline: bool, further: Mapping[str, str] | None = None
) -> pa.Schema:
    """Columns of a part: ``image`` only where pictures are inside the manifest, ``feature`` for features.

    ``further`` are the user's own, name → Arrow type; they come last.
    """
    columns = [("row_id", pa.int64()), ("uri", pa.string())]
    if inline:
        columns.append(("image", pa.binary()))
    if modality == "features":
        columns.append(("feature", pa.list_(pa.float32(), n_features)))
    columns += [("labels", pa.list_(pa.int32())), ("splits", pa.list_(pa.string()))]
    return pa.schema(columns + [(name, type_from_text(kind)) for name, kind in (further or {}).items()])


class _Aborted(Exception):
    pass


class PartsWriter:
    """Writes rows as parts of bounded size; a part gets its name when it is complete.

    Rows come in blocks of any size: ``write`` cuts them into row groups, ``finish`` returns the parts.
    ``suffix`` ends the parts' names, so that two writers in one folder never write the same file.
    """

    def __init__(
        self, folder: str, schema: pa.Schema, first_part: int = 0, first_row_id: int = 0, suffix: str = ""
    ) -> None:
        self.folder, self.schema, self._suffix = folder, schema, suffix
        self.parts: list[ManifestPart] = []
        self._number, self._next_row_id = first_part, first_row_id
        self._waiting = TableBuffer()  # rows that do not fill a row group yet
        self._open: ExitStack | None = None

    def write(self, payload: pa.Table, labels: pa.Array | None, flags: np.ndarray) -> None:
        """Adds rows: payload columns (uri, image, feature), label lists or None, split flags (n,)."""
        n = len(flags)
        columns: dict[str, Any] = {name: payload[name] for name in payload.column_names}
        columns["row_id"] = pa.array(np.arange(self._next_row_id, self._next_row_id + n))
        columns["labels"] = pa.nulls(n, pa.list_(pa.int32())) if labels is None else labels
        columns["splits"] = splits.to_lists(flags)
        extra = set(payload.column_names) - set(self.schema.names)
        if extra:
            raise DataError(
                f"the manifest has no column {sorted(extra)[0]!r}; it has {', '.join(self.schema.names)}"
            )
        for field in self.schema:
            columns.setdefault(field.name, pa.nulls(n, field.type))
        try:
            table = pa.table([columns[name] for name in self.schema.names], schema=self.schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"the rows do not fit the columns of the manifest: {error}") from error
        self._next_row_id += n
        self._waiting.add(table)
        self._flush(everything=False)

    def finish(self) -> list[ManifestPart]:
        """Closes the last part and returns all of them."""
        self._flush(everything=True)
        if self._open is not None:
            self._close_part()
        return self.parts

    def abort(self) -> None:
        """Deletes everything that was written."""
        if self._open is not None:
            # An exception keeps the file from getting its name; it ends here.
            with suppress(_Aborted):
                self._open.__exit__(_Aborted, _Aborted(), None)
            self._open = None
        for part in self.parts:
            storage.delete(storage.join(self.folder, part.name))

    def _flush(self, everything: bool) -> None:
        """Writes the waiting rows as row groups of bounded size; a last short one only on ``everything``."""
        while n := len(self._waiting):
            rows = min(GROUP_ROWS, max(64, GROUP_BYTES * n // max(self._waiting.nbytes, 1)))
            if n < rows and not everything:
                break
            self._write_group(self._waiting.take(min(rows, n)))

    def _write_group(self, table: pa.Table) -> None:
        if self._open is None:
            self._open_part(table["row_id"][0].as_py())
        self._writer.write_table(table, row_group_size=len(table))
        counts = splits.counts(splits.from_lists(table["splits"]))
        self._groups.append(RowGroup(len(table), counts))
        self._bytes += table.nbytes
        if self._bytes >= PART_BYTES or sum(group.rows for group in self._groups) >= PART_ROWS:
            self._close_part()

    def _open_part(self, first_row_id: int) -> None:
        self._name = f"part-{self._number:05d}{self._suffix}.parquet"
        self._first, self._groups, self._bytes = first_row_id, list[RowGroup](), 0
        self._open = ExitStack()
        sink = self._open.enter_context(storage.open_output(storage.join(self.folder, self._name)))
        self._writer = self._open.enter_context(
            pq.ParquetWriter(
                sink,
                self.schema,
                compression="zstd",
                use_dictionary=["labels.list.element", "splits.list.element"],
                column_encoding={"uri": "DELTA_BYTE_ARRAY"},  # neighbours share their folder
                write_statistics=["row_id"],
                write_page_checksum=True,  # a part is hashed once, its pages are checked at every read
            )
        )

    def _close_part(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        uri = storage.join(self.folder, self._name)
        totals = {name: sum(group.splits.get(name, 0) for group in self._groups) for name in splits.SPLITS}
        self.parts.append(
            ManifestPart(
                name=self._name,
                sha256=storage.sha256_of(uri),
                bytes=storage.size_of(uri),
                rows=sum(group.rows for group in self._groups),
                first_row_id=self._first,
                splits={name: n for name, n in totals.items() if n},
                groups=tuple(self._groups),
            )
        )
        self._number += 1


def read_groups(
    uri: str, part: ManifestPart, split: str | None, columns: list[str] | None, skip: int, stop: int | None
) -> Iterator[pa.Table]:
    """The part's rows of a split, one row group at a time: positions skip ≤ p < stop within the split."""
    flag = None if split is None else splits.flag_of(split)
    position = 0
    with storage.open_input(storage.join(uri, part.name)) as source:
        read = _reader(source, f"{uri}/{part.name}")
        for number, group in enumerate(part.groups):
            rows = group.rows if split is None else group.splits.get(split, 0)
            low, high = skip - position, rows if stop is None else min(rows, stop - position)
            position += rows
            if rows == 0 or low >= rows or high <= 0:
                continue
            table = read(number, columns)
            if flag is not None and rows < group.rows:
                lists = table["splits"] if "splits" in table.column_names else None
                if lists is None:
                    lists = read(number, ["splits"])["splits"]
                table = table.filter(pa.array((splits.from_lists(lists) & flag) > 0))
            low = max(low, 0)
            yield table.slice(low, high - low)


def _reader(source: pa.NativeFile, uri: str) -> Callable[[int, list[str] | None], pa.Table]:
    """Reads columns of a row group; FormatError where the file is damaged."""
    try:
        file = pq.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{uri} is damaged: {error}") from error

    def read(group: int, columns: list[str] | None) -> pa.Table:
        try:
            return file.read_row_group(group, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{uri} is damaged: {error}") from error

    return read
