"""What the artefacts of a run have in common: one header on disk, the same five verbs, checked files.

An artefact is a folder (or file) that one stage writes and later ones read: manifest, model, codes, index,
report. Its header is a small JSON file, written last, so that it makes the artefact count:

    kind             what it is
    format_version   a newer one is refused with a sentence, an older one is read
    sha256           fingerprint of the content
    lineage          which artefacts it was made from, and by what
    seal             fingerprint of the header itself: one that was edited or damaged is refused

Beside these the header lists the artefact's own facts and its files, each with its sha256. A package
that owns an artefact subclasses ``Artefact``; ``hashnet.Run`` knows where each one is.

A damaged file is never used. A file that is read whole is hashed in memory, and what was hashed is what is
parsed (``read_checked``); one that is read in pieces is hashed once before (``check_file``); a small JSON
file that no header lists yet carries its own seal (``write_sealed``, ``read_sealed``). ``verify=False``
of a reader skips the hashing.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from hashnet.errors import FormatError, HashnetError, StorageError
from hashnet.io import storage

READERS = 8  # files hashed at once


@dataclass(frozen=True)
class Header:
    """The part of an artefact's JSON that every kind shares; ``files`` maps a file to its sha256."""

    kind: str
    format_version: int
    sha256: str | None
    lineage: Mapping[str, Any]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Description:
    """What an artefact, or a whole run, says about itself; ``problems`` are sentences, none means sound."""

    uri: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    lineage: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    parts: list[Description] = field(default_factory=list)  # of a run

    @property
    def sound(self) -> bool:
        return not self.problems and all(part.sound for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Artefact(abc.ABC):
    """One artefact at a path or URI: ``exists · open · write · describe · verify``.

    Describing and verifying read JSON and bytes only: neither torch nor faiss is loaded.
    """

    kind: str
    format_version: ClassVar[int] = 1
    header_file: ClassVar[str]  # in the artefact's folder
    seal_name: ClassVar[str] = "seal"
    made_by: ClassVar[str]  # the command that makes one, for errors
    fix: ClassVar[str] = ""  # what to do about a damaged file, where that is not ``made_by``
    error: ClassVar[type[HashnetError]] = FormatError  # raised where it is missing

    def __init__(self, uri: str) -> None:
        self.uri = str(uri)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @property
    def header_uri(self) -> str:
        return storage.join(self.uri, self.header_file)

    def exists(self) -> bool:
        """Whether a complete one is there."""
        return storage.exists(self.header_uri)

    def begun(self) -> bool:
        """Whether its folder is there, complete or not."""
        return storage.exists(self.uri)

    @abc.abstractmethod
    def open(self) -> Any:
        """The artefact, ready to use; an error that names the fix where it is missing or damaged."""

    @abc.abstractmethod
    def write(self, *args: Any, **kwargs: Any) -> Any:
        """Writes the artefact completely or not at all."""

    def describe(self) -> Description:
        """Facts and lineage, read from the header alone."""
        values = self.read()
        return Description(self.uri, values["kind"], self.facts(values), dict(values.get("lineage") or {}))

    def verify(self) -> list[str]:
        """A sentence for everything that is wrong; empty where the artefact is sound."""
        return list(self.damage())

    def damage(self) -> Iterator[str]:
        """A sentence for each file that is missing or damaged."""
        yield from self.damaged_files(self.read())

    def damaged_files(self, values: Mapping[str, Any]) -> Iterator[str]:
        """The same for the files that a header's JSON lists."""
        files = self.files(values)
        uris = [storage.join(self.uri, name) for name in files]
        with ThreadPoolExecutor(READERS) as pool:
            for name, wrong in zip(files, pool.map(_wrong, uris, files.values()), strict=True):
                if wrong:
                    yield f"{name} {wrong}"

    def check(self) -> None:
        """FormatError at the first file that is missing or damaged."""
        for sentence in self.damage():
            raise FormatError(f"{self.uri}: {sentence}; restore it, or {self.fix or self.made_by}")

    def read_file(self, name: str) -> pa.Buffer:
        """The bytes of a file that the header lists; FormatError unless they are the recorded ones."""
        recorded = self.files(self.read()).get(name)
        if recorded is None:
            raise FormatError(f"{self.uri} does not list a file {name}")
        return read_checked(storage.join(self.uri, name), recorded, self.fix or self.made_by)

    def copy_to(self, uri: str) -> None:
        """Copies the artefact's files, checked, and at last its header into the folder ``uri``."""
        for name in self.files(self.read()):
            storage.write_bytes(storage.join(uri, name), self.read_file(name).to_pybytes())
        storage.write_bytes(storage.join(uri, self.header_file), storage.read_bytes(self.header_uri))

    def header(self) -> Header:
        """The typed header."""
        values = self.read()
        return Header(
            kind=values["kind"],
            format_version=values["format_version"],
            sha256=values.get("sha256"),
            lineage=values.get("lineage") or {},
            files=self.files(values),
        )

    def read(self) -> dict[str, Any]:
        """The header's JSON, checked: of this kind, in a format this version reads, and unchanged."""
        if not storage.exists(self.header_uri):
            why = f"it has no {self.header_file}" if self.begun() else "it does not exist"
            raise self.error(f"{self.uri} holds no {self.kind} ({why}); {self.made_by}")
        return read_sealed(self.header_uri, self.kind, self.format_version, self.made_by, self.seal_name)

    def write_header(
        self, values: Mapping[str, Any], *, sha256: str | None = None, lineage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Writes the header, which makes the artefact count; returns what it holds."""
        whole = {**values, "sha256": sha256, "lineage": dict(lineage)}
        return write_sealed(self.header_uri, self.kind, self.format_version, whole, self.seal_name)

    @abc.abstractmethod
    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        """File → sha256 of everything the header lists."""

    @abc.abstractmethod
    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What ``describe`` shows of the header."""


def fingerprint(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """Hex sha256 of JSON values but for some names; spaces and order do not count."""
    kept = {name: value for name, value in values.items() if name not in without}
    plain = json.loads(json.dumps(kept))  # as a reader will find it
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sealed(kind: str, version: int, values: Mapping[str, Any], seal_name: str = "seal") -> dict[str, Any]:
    """The values with their kind, their format version and a seal of it all."""
    whole = {**values, "kind": kind, "format_version": version}
    return whole | {seal_name: fingerprint(whole, without=(seal_name,))}


def write_sealed(
    uri: str, kind: str, version: int, values: Mapping[str, Any], seal_name: str = "seal"
) -> dict[str, Any]:
    """Writes the sealed values as JSON; returns what the file holds."""
    whole = sealed(kind, version, values, seal_name)
    storage.write_json(uri, whole)
    return whole


def read_sealed(uri: str, kind: str, version: int, fix: str, seal_name: str = "seal") -> dict[str, Any]:
    """The JSON that ``write_sealed`` wrote; older files without a seal are read. FormatError otherwise."""
    values = storage.check_format(storage.read_json(uri), uri, kind, version)
    seal = values.get(seal_name)
    if seal is not None and seal != fingerprint(values, without=(seal_name,)):
        raise FormatError(
            f"{uri} was changed or damaged after it was written: its {seal_name} does not fit its content; "
            f"restore it, or {fix}"
        )
    return values


def read_checked(uri: str, sha256: str, fix: str) -> pa.Buffer:
    """A file's bytes; FormatError unless they have this sha256: what was hashed is what is returned."""
    try:
        data = storage.read_buffer(uri)
    except StorageError as error:
        if storage.exists(uri):
            raise
        raise FormatError(f"{uri} is missing; restore it, or {fix}") from error
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise FormatError(f"{uri} {_differs(found, sha256)}; restore it, or {fix}")
    return data


def check_file(uri: str, sha256: str, fix: str) -> None:
    """FormatError unless the file has this sha256; for files that are too large to be read whole."""
    if wrong := _wrong(uri, sha256):
        raise FormatError(f"{uri} {wrong}; restore it, or {fix}")


def _wrong(uri: str, sha256: str) -> str | None:
    if not storage.exists(uri):
        return "is missing"
    found = storage.sha256_of(uri)
    return None if found == sha256 else _differs(found, sha256)


def _differs(found: str, recorded: str) -> str:
    return f"is damaged: its sha256 is {found[:12]}…, recorded is {str(recorded)[:12]}…"
