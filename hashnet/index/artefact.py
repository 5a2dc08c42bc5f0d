"""The index artefact: its header ``index.json``, read without FAISS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hashnet.errors import FormatError, HashnetError
from hashnet.index import changelog
from hashnet.io import Artefact, storage, write_sealed

HEADER = "index.json"
BUILD_AGAIN = "build the index again (jobs/build_index.py with overwrite=true)"


class IndexArtefact(Artefact):
    """A search index as an artefact of a run. Its sha256 is the header's seal: that lists every file's."""

    kind, header_file, seal_name = "index", HEADER, "sha256"
    format_version = 2  # 1 had no log of changes, and every segment had all columns
    made_by = "build one with jobs/build_index.py (overwrite=true replaces a damaged one)"

    def open(self, **options: Any) -> Any:
        from hashnet.index.binary import BinaryIndex

        return BinaryIndex.load(self.uri, **options)

    def write(self, index: Any) -> None:
        index.save(self.uri)

    def read(self) -> dict[str, Any]:
        """The header's JSON; version, rows and updates are those after the changes in its log."""
        values = self.read_unchanged()
        newest = changelog.last(self.uri, log) if (log := self.log_file(values)) else None
        if newest is None:
            return values
        return values | {"version": newest.version, "rows": newest.rows, "updates": newest.updates}

    def read_unchanged(self) -> dict[str, Any]:
        """The header's JSON as it was written, before the changes in its log."""
        values = super().read()
        if not values.get("sha256"):
            raise FormatError(f"{self.header_uri} was changed: it lacks its sha256; {BUILD_AGAIN}")
        return values

    def write_header(
        self, values: Mapping[str, Any], *, sha256: str | None = None, lineage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Writes the header: in the format of older versions where it holds nothing that they do not know."""
        late_columns = values.get("schema") and any(not s["columns"] for s in values.get("segments", ()))
        version = self.format_version if values.get("log") or late_columns else 1
        whole = {**values, "sha256": sha256, "lineage": dict(lineage)}
        return write_sealed(self.header_uri, self.kind, version, whole, self.seal_name)

    def log_file(self, values: Mapping[str, Any]) -> str | None:
        """The name of the log of changes, None where there is none."""
        name = values.get("log")
        return None if name is None else storage.check_plain_name(name, self.header_uri)

    def damage(self) -> Iterator[str]:
        values = self.read_unchanged()
        yield from self.damaged_files(values)
        log = self.log_file(values)
        try:
            for _ in changelog.read(self.uri, changelog.LogEnd(log)) if log else ():
                pass
        except HashnetError as error:
            yield str(error)

    def version(self) -> int:
        """The version on disk, by reading one small file; 0 where there is no index yet."""
        return self.whole_number(self.read(), "version") if self.exists() else 0

    def sha256(self) -> str | None:
        """The sha256 in the header, None where there is none: a rebuilt index may have the old version."""
        return self.read_unchanged()["sha256"] if self.exists() else None

    def stored_bytes(self) -> int:
        """Bytes of the current version's files, without those kept for readers of the version before."""
        sizes, values = storage.list_sizes(self.uri), self.read_unchanged()
        log = self.log_file(values)
        names = [self.header_file, *self.files(values), *([log] if log else [])]
        return sum(sizes[name] for name in names)

    def drop_damaged(self) -> None:
        """Deletes a damaged header, which saving would have to read; a newer or foreign one is refused."""
        if not self.exists():
            return
        try:
            values = storage.read_json(self.header_uri)
        except FormatError:
            storage.delete(self.header_uri)
            return
        storage.check_format(values, self.header_uri, self.kind, self.format_version)
        try:
            self.read()
        except FormatError:
            storage.delete(self.header_uri)

    def whole_number(self, values: Mapping[str, Any], name: str) -> int:
        """``values[name]``, checked: a header may have been edited by hand."""
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise FormatError(f"{self.header_uri} has {name} = {value!r}; it is damaged")
        return value

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        return {entry["file"]: entry["sha256"] for entry in file_entries(values)}

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = ("index_kind", "n_bits", "n_classes", "rows", "version", "options", "tuned")
        facts = {name: values.get(name) for name in names}
        if features := values.get("features"):
            facts["features"] = {name: features[name] for name in ("width", "dtype", "store")}
        return facts


def file_entries(header: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every {file, sha256, …} that a header names: rows, labels, columns, removed rows and ids, vectors."""
    if header.get("removed_ids"):
        yield header["removed_ids"]
    yield from (header.get("features") or {}).get("layers", ())
    for segment in header.get("segments", []):
        yield segment
        yield from (entry for name in ("labels", "columns", "removed") if (entry := segment.get(name)))
