"""Manifest: the pictures or features of a data set with their labels and splits, on disk.

A manifest is a folder of Parquet parts plus ``_manifest.json``, which lists them with their sha256:

    manifest.parquet/
        part-00000.parquet      row_id, uri, [image], [feature], labels, splits, and the user's columns
        part-00001-1f0c77a2.parquet      the same, appended later
        _manifest.json          modality, classes, the parts; written last: from then on they count

Any Parquet reader opens the folder. Row ids are 0, 1, 2, … over all parts. Parts are frozen:
``hashnet.data.writer.append_rows`` adds parts and changes none.

    manifest = Manifest.open("manifest.parquet")
    for table in manifest.batches("database", columns=["row_id", "uri"]):
        ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet import labels as label_sets
from hashnet.data import splits as split_flags
from hashnet.errors import DataError, FormatError, HashnetError
from hashnet.io import Artefact, TableBuffer, check_file, check_whole, rechunk, storage, type_from_text

if TYPE_CHECKING:
    from hashnet.data.summary import ManifestSummary


@dataclass(frozen=True)
class Manifest:
    """An opened manifest. Reading checks each part's sha256 once (``verify=False`` trusts them)."""

    uri: str
    modality: str  # "image" or "features"
    n_classes: int | None  # None: no labels
    class_names: tuple[str, ...] | None
    n_features: int | None
    inline: bool  # pictures are inside, in the column ``image``
    parts: tuple[ManifestPart, ...]
    source: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)  # the user's further ones: name → Arrow type
    verify_files: bool = True
    _checked: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def open(cls, uri: str, verify: bool = True) -> Manifest:
        """The manifest in a folder; DataError where there is none, FormatError where it is damaged."""
        uri = str(uri)
        artefact = ManifestArtefact(uri)
        about = artefact.read()
        try:
            for part in about["parts"]:
                storage.check_plain_name(part["name"], artefact.header_uri)
            return cls(
                uri=uri,
                modality=about["modality"],
                n_classes=about["n_classes"],
                class_names=tuple(about["class_names"]) if about["class_names"] is not None else None,
                n_features=about["n_features"],
                inline=about["inline"],
                parts=tuple(ManifestPart.from_dict(part) for part in about["parts"]),
                source=about["lineage"]["source"] if "lineage" in about else about.get("source", {}),
                columns=dict(about.get("columns") or ()),
                verify_files=verify,
            )
        except (KeyError, TypeError) as error:
            raise FormatError(f"{artefact.header_uri} is damaged: {error!r} is missing or wrong") from error

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    def count(self, split: str | None = None) -> int:
        """Number of rows of a split, or of all splits; reads no file."""
        if split is None:
            return len(self)
        split_flags.flag_of(split)
        return sum(part.splits.get(split, 0) for part in self.parts)

    @property
    def splits(self) -> dict[str, int]:
        """Number of rows per split; empty splits are left out."""
        return {name: self.count(name) for name in split_flags.SPLITS if self.count(name)}

    @property
    def sha256(self) -> str:
        """Fingerprint of the content: it depends on the parts, not on the folder."""
        return _content_sha256(self.modality, self.n_classes, self.class_names, self.parts)

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.modality, self.n_features, self.inline, self.columns)

    def read(
        self,
        split: str | None = None,
        columns: list[str] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> pa.Table:
        """Rows in row_id order. ``start`` and ``stop`` count rows within the split."""
        tables = list(self._groups(split, columns, start, stop))
        return pa.concat_tables(tables) if tables else self._empty(columns)

    def batches(
        self,
        split: str | None = None,
        columns: list[str] | None = None,
        rows: int = 8192,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[pa.Table]:
        """Tables of ``rows`` rows (the last may be shorter) in row_id order; memory stays bounded."""
        check_whole("rows", rows, low=1)
        yield from rechunk(self._groups(split, columns, start, stop), rows)

    def labels(self, split: str | None = None) -> np.ndarray | None:
        """Multi-hot uint8 (n, n_classes) in row_id order, or None for a manifest without labels."""
        if self.n_classes is None:
            return None
        blocks = [
            label_sets.from_lists(table["labels"], self.n_classes)
            for table in self.batches(split, columns=["labels"], rows=65_536)
        ]
        return np.concatenate(blocks) if blocks else np.zeros((0, self.n_classes), dtype=np.uint8)

    def row_ids(self, split: str | None = None) -> np.ndarray:
        """int64 (n,), ascending."""
        return self.read(split, columns=["row_id"])["row_id"].to_numpy()

    def part_rows(
        self, name: str, split: str, columns: list[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[pa.Table]:
        """Rows [start, stop) of a split inside the part ``name``, one row group at a time."""
        part = next(part for part in self.parts if part.name == name)
        self._verify(part)
        yield from read_groups(self.uri, part, split, columns, start, stop)

    def rows_by_id(self, row_ids: np.ndarray, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The rows with these ids, int64 (n,) ascending; one table per row group that holds any."""
        for part in self.parts:
            first = 0  # position of the row group in the part
            for group in part.groups:
                start = part.first_row_id + first
                inside = row_ids[(row_ids >= start) & (row_ids < start + group.rows)]
                if len(inside):
                    self._verify(part)
                    tables = read_groups(self.uri, part, None, columns, first, first + group.rows)
                    yield pa.concat_tables(tables).take(pa.array(inside - start))
                first += group.rows

    def verify(self) -> None:
        """Checks the sha256 of every part; FormatError names the first that differs."""
        for part in self.parts:
            self._verify(part)

    def trust(self, names: set[str]) -> None:
        """These parts were verified elsewhere: they are not hashed again, not even by workers."""
        self._checked.update(part.sha256 for part in self.parts if part.name in names)

    def copy_to(self, uri: str) -> Manifest:
        """A copy under ``uri``, which may already hold this manifest or its first parts."""
        have: tuple[ManifestPart, ...] = ()
        if ManifestArtefact(uri).exists():
            have = Manifest.open(uri).parts
            if have != self.parts[: len(have)]:
                raise DataError(
                    f"{uri} holds another manifest ({sum(p.rows for p in have):,} rows, "
                    f"{len(have)} parts that are not the first of {self.uri}); choose another folder"
                )
        for part in self.parts[len(have) :]:
            self._verify(part)
            with (
                storage.open_input(storage.join(self.uri, part.name)) as source,
                storage.open_output(storage.join(uri, part.name)) as sink,
            ):
                while chunk := source.read(8 << 20):
                    sink.write(chunk)
        if have != self.parts or not have:
            ManifestArtefact(uri).write(self, self.parts, self.source)
        return Manifest.open(uri, verify=self.verify_files)

    def summary(self) -> ManifestSummary:
        """Rows, classes and labels per split, and the pair counts of the training set."""
        from hashnet.data.summary import summarise

        return summarise(self)

    def _groups(
        self, split: str | None, columns: list[str] | None, start: int, stop: int | None
    ) -> Iterator[pa.Table]:
        if split is not None:
            split_flags.flag_of(split)
        missing = [name for name in columns or () if name not in self.schema.names]
        if missing:
            raise DataError(f"{self.uri} has no column {missing[0]!r}: {', '.join(self.schema.names)}")
        position = 0
        for part in self.parts:
            rows = part.rows if split is None else part.splits.get(split, 0)
            before, position = position, position + rows
            if rows == 0 or start >= position or (stop is not None and stop <= before):
                continue
            self._verify(part)
            yield from read_groups(
                self.uri, part, split, columns, start - before, None if stop is None else stop - before
            )

    def _empty(self, columns: list[str] | None) -> pa.Table:
        table = self.schema.empty_table()
        return table if columns is None else table.select(columns)

    def _verify(self, part: ManifestPart) -> None:
        if self.verify_files and part.sha256 not in self._checked:
            check_file(storage.join(self.uri, part.name), part.sha256, ManifestArtefact.made_by)
            self._checked.add(part.sha256)


class ManifestArtefact(Artefact):
    """A manifest as an artefact of a run."""

    kind, header_file = "manifest", "_manifest.json"
    made_by = "make one with `hashnet dataset NAME … --out PATH`"
    error = DataError

    def open(self, verify: bool = True) -> Manifest:
        return Manifest.open(self.uri, verify)

    def write(self, manifest: Any, parts: tuple[ManifestPart, ...], source: Mapping[str, Any]) -> None:
        """Writes the header of parts that are already there, which makes them count."""
        class_names = list(manifest.class_names) if manifest.class_names is not None else None
        self.write_header(
            {
                "modality": manifest.modality,
                "n_classes": manifest.n_classes,
                "class_names": class_names,
                "n_features": manifest.n_features,
                "inline": manifest.inline,
                "columns": [list(pair) for pair in manifest.columns.items()],
                "n_rows": sum(part.rows for part in parts),
                "parts": [asdict(part) for part in parts],
            },
            sha256=_content_sha256(manifest.modality, manifest.n_classes, class_names, parts),
            lineage={"source": dict(source)},
        )

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        return {part["name"]: part["sha256"] for part in values["parts"]}

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        manifest = self.open()
        facts = {
            "modality": manifest.modality,
            "n_classes": manifest.n_classes,
            "n_features": manifest.n_features,
            "columns": dict(manifest.columns),
            "parts": len(manifest.parts),
            "sha256": manifest.sha256,
        }
        try:
            return facts | manifest.summary().to_dict()
        except HashnetError:  # damaged: ``verify`` says so
            return facts


def _content_sha256(
    modality: str, n_classes: int | None, class_names: Sequence[str] | None, parts: Sequence[ManifestPart]
) -> str:
    """Fingerprint of a manifest's content: it depends on the parts, not on the folder."""
    content = [modality, n_classes, class_names, [part.sha256 for part in parts]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ---------------------------------------------------------------- parts
# The frozen Parquet files that make up a manifest: their columns, writing and reading.

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


def schema_of(modality: str, n_features: int | None, inline: bool, further: Mapping[str, str]) -> pa.Schema:
    """Columns of a part: ``image`` only where pictures are inside the manifest, ``feature`` for features.

    ``further`` are the user's own, name → Arrow type; they come last.
    """
    columns = [("row_id", pa.int64()), ("uri", pa.string())]
    if inline:
        columns.append(("image", pa.binary()))
    if modality == "features":
        columns.append(("feature", pa.list_(pa.float32(), n_features)))
    columns += [("labels", pa.list_(pa.int32())), ("splits", pa.list_(pa.string()))]
    return pa.schema(columns + [(name, type_from_text(kind)) for name, kind in further.items()])


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
        columns["splits"] = split_flags.to_lists(flags)
        extra = set(payload.column_names) - set(self.schema.names)
        if extra:
            raise DataError(
                f"the manifest has no column {sorted(extra)[0]!r}; it has {', '.join(self.schema.names)}"
            )
        for column in self.schema:
            columns.setdefault(column.name, pa.nulls(n, column.type))
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
            # The exception keeps the file from being renamed into place; it is not passed on.
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
        counts = split_flags.counts(split_flags.from_lists(table["splits"]))
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
        counts = {
            name: sum(group.splits.get(name, 0) for group in self._groups) for name in split_flags.FLAGS
        }
        self.parts.append(
            ManifestPart(
                name=self._name,
                sha256=storage.sha256_of(uri),
                bytes=storage.size_of(uri),
                rows=sum(group.rows for group in self._groups),
                first_row_id=self._first,
                splits={name: n for name, n in counts.items() if n},
                groups=tuple(self._groups),
            )
        )
        self._number += 1


def read_groups(
    uri: str, part: ManifestPart, split: str | None, columns: list[str] | None, skip: int, stop: int | None
) -> Iterator[pa.Table]:
    """The part's rows of a split, one row group at a time: positions skip ≤ p < stop within the split."""
    flag = None if split is None else split_flags.flag_of(split)
    position = 0
    where = storage.join(uri, part.name)
    with storage.open_input(where) as source, _damage_named(where):
        file = pq.ParquetFile(source, page_checksum_verification=True)
        for number, group in enumerate(part.groups):
            rows = group.rows if split is None else group.splits.get(split, 0)
            low, high = skip - position, rows if stop is None else min(rows, stop - position)
            position += rows
            if rows == 0 or low >= rows or high <= 0:
                continue
            table = file.read_row_group(number, columns=columns)
            if flag is not None and rows < group.rows:
                known = "splits" in table.column_names
                lists = (table if known else file.read_row_group(number, columns=["splits"]))["splits"]
                table = table.filter(pa.array((split_flags.from_lists(lists) & flag) > 0))
            low = max(low, 0)
            yield table.slice(low, high - low)


@contextmanager
def _damage_named(uri: str) -> Iterator[None]:
    """FormatError for whatever Parquet cannot read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{uri} is damaged: {error}") from error
