"""What the artefacts of a run have in common: one header on disk, and the same five verbs.

An artefact is a folder (or file) that one stage writes and later ones read: manifest, model, codes, index,
report. Its header is a small JSON file, written last, so that it makes the artefact count:

    kind             what it is
    format_version   a newer one is refused with a sentence, an older one is read
    sha256           fingerprint of the content
    lineage          which artefacts it was made from, and by what
    seal             fingerprint of the header itself: one that was edited or damaged is refused

Beside these the header lists the artefact's own facts and its files, each with its sha256. A package
that owns an artefact subclasses ``Artefact``; ``hashnet.Run`` names where each one lies.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hashnet.errors import FormatError, HashnetError
from hashnet.io import storage


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

    @abc.abstractmethod
    def open(self) -> Any:
        """The artefact, ready to use; an error that names the fix where it is missing or damaged."""

    @abc.abstractmethod
    def write(self, *args: Any, **kwargs: Any) -> Any:
        """Writes the artefact: whole, or not at all."""

    def describe(self) -> Description:
        """Facts and lineage, read from the header alone."""
        values = self.read()
        return Description(self.uri, values["kind"], self.facts(values), dict(values.get("lineage") or {}))

    def verify(self) -> list[str]:
        """A sentence for each file that is missing or damaged; empty where the artefact is sound."""
        return list(wrong_files(self.uri, self.header().files))

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
            raise self.error(
                f"{self.uri} holds no {self.kind} (it has no {self.header_file}); {self.made_by}"
            )
        values = storage.check_format(
            storage.read_json(self.header_uri), self.header_uri, self.kind, self.format_version
        )
        seal = values.get(self.seal_name)
        if seal is not None and seal != fingerprint(values, without=(self.seal_name,)):
            raise FormatError(
                f"{self.header_uri} was changed or damaged after it was written: its {self.seal_name} does "
                f"not fit its content; restore it, or {self.made_by}"
            )
        return values

    def write_header(
        self, values: Mapping[str, Any], *, sha256: str | None = None, lineage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Writes the header, the moment from which the artefact counts; returns what it holds."""
        whole = {
            **values,
            "kind": self.kind,
            "format_version": self.format_version,
            "sha256": sha256,
            "lineage": dict(lineage),
        }
        whole[self.seal_name] = fingerprint(whole, without=(self.seal_name,))
        storage.write_json(self.header_uri, whole)
        return whole

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


def wrong_files(uri: str, files: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each listed file that is missing or whose sha256 differs."""
    for name, recorded in files.items():
        where = storage.join(uri, name)
        if not storage.exists(where):
            yield f"{name} is missing"
        elif (found := storage.sha256_of(where)) != recorded:
            yield f"{name} is damaged: its sha256 is {found[:12]}…, recorded is {recorded[:12]}…"
