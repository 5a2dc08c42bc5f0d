"""``webdataset``: tars of KEY.jpg with KEY.cls or KEY.json.

Pictures stay in the tars and are given by offset and size, so that reading one is one ranged read.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from hashnet.data.columns import PICTURES, check_utf8, expand_pattern, read_names
from hashnet.data.fetch import byte_range_uris
from hashnet.data.writer import SourceRows, refuse_duplicates, rows_of_uris, with_keys
from hashnet.errors import DataError
from hashnet.io import REQUIRED, key, storage
from hashnet.labels import MAX_CLASSES

BUFFER = 8 << 20  # a tar is read through once, in pieces of this size
_CLASS_ID = re.compile("-?[0-9]+")


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "a tar, a folder of tars, or a pattern such as shard-{00000..00012}.tar")
    label: str = key("label,labels,cls,class", "fields of KEY.json that may hold the labels")
    n_classes: int | None = key(None, "number of classes, where ids of the last ones may be missing", low=1)
    class_names: list[str] = key([], "names of the classes, or a text file with one per line")
    # last, because the name hides the function
    key: str | None = key(
        None,
        "__key__: keep each sample's KEY, with its folder in the tar, as the column `key`",
        choices=("__key__",),
    )


@dataclass
class _Sample:
    key: str
    offset: int = -1
    size: int = 0
    labels: list[int | str] | None = field(default=None)


def load(options: Options) -> SourceRows:
    """Rows in the order of the tars; samples without a picture are left out."""
    uris, keys, found = [], [], list[list[int | str] | None]()
    for uri in expand_pattern(options.path, ".tar"):
        samples = [sample for sample in _samples(uri, options.label.split(",")) if sample.offset >= 0]
        check_utf8((sample.key for sample in samples), uri)
        here = byte_range_uris(uri, [s.offset for s in samples], [s.size for s in samples])
        uris.append(here.cast(pa.large_string()))
        keys += [sample.key for sample in samples]
        found += [sample.labels for sample in samples]
    names = pa.array(keys, pa.large_string())
    refuse_duplicates(names, f"the keys of {options.path}")
    given = read_names(options.class_names)
    labels, classes, n_classes = _numbered(found, given, options)
    rows = rows_of_uris(
        pa.concat_arrays(uris), labels=labels, n_classes=n_classes, class_names=classes, names=names
    )
    return with_keys(rows) if options.key else rows


def _samples(uri: str, fields: list[str]) -> Iterator[_Sample]:
    """The samples of one tar: neighbouring members whose names are equal up to the first dot."""
    current: _Sample | None = None
    try:
        with (
            storage.open_input(uri) as source,
            tarfile.open(fileobj=source, mode="r|", bufsize=BUFFER) as tar,
        ):
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                if not member.isfile() or base.startswith("."):  # macOS adds a ._a.jpg to each a.jpg
                    continue
                stem, _, ending = base.partition(".")
                name = folder + slash + stem
                if current is None or current.key != name:
                    if current is not None:
                        yield current
                    current = _Sample(name)
                ending = ending.lower()
                if f".{ending.rpartition('.')[2]}" in PICTURES and current.offset < 0:
                    current.offset, current.size = member.offset_data, member.size
                elif ending in ("cls", "json"):
                    content = tar.extractfile(member)
                    assert content is not None
                    current.labels = _read_labels(f"{uri}: {member.name}", ending, content.read(), fields)
    except tarfile.TarError as error:
        hint = "; unpack .gz first: a picture inside cannot be read on its own" if uri.endswith("gz") else ""
        raise DataError(f"{uri} is not a plain tar ({error}){hint}") from error
    if current is not None:
        yield current


def _read_labels(where: str, ending: str, content: bytes, fields: list[str]) -> list[int | str] | None:
    text = content.decode(errors="replace")
    labels = _from_cls(text) if ending == "cls" else _from_json(where, text, fields)
    top = max((v for v in labels or () if isinstance(v, int)), default=0)
    if top >= MAX_CLASSES:
        raise DataError(f"{where} holds class {top}; number classes from 0, at most {MAX_CLASSES:,} of them")
    return labels


def _from_cls(text: str) -> list[int | str]:
    """Class ids with spaces or newlines between them; a line of other text is one name."""
    labels: list[int | str] = []
    for line in text.splitlines():
        words = line.split()
        labels += map(int, words) if all(map(_CLASS_ID.fullmatch, words)) else [line.strip()]
    return labels


def _from_json(where: str, text: str, fields: list[str]) -> list[int | str] | None:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    value = (
        next((content[name] for name in fields if name in content), None)
        if isinstance(content, dict)
        else content
    )
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, (int, str)) and not isinstance(v, bool) for v in values):
        raise DataError(f"{where}: labels must be class ids or names, got {value!r}")
    return values


def _numbered(
    found: list[list[int | str] | None], given: list[str], options: Options
) -> tuple[pa.Array | None, tuple[str, ...] | None, int | None]:
    """Label lists, class names, number of classes; names become ids in sorted order."""
    if all(labels is None for labels in found):
        return None, None, None
    words = {v for labels in found for v in labels or () if isinstance(v, str)}
    classes: tuple[str, ...] | None = tuple(given) or None
    if words:
        classes = classes or tuple(sorted(words))
        number: dict[int | str, int] = {name: i for i, name in enumerate(classes)}
        unknown = sorted(words - set(classes))
        if unknown:
            raise DataError(f"class {unknown[0]!r} of {options.path} is not among the class_names")
        found = [None if labels is None else [number.get(v, v) for v in labels] for labels in found]
    lists = pa.array(
        [None if v is None else sorted({int(i) for i in v if int(i) >= 0}) for v in found],
        pa.list_(pa.int32()),
    )
    top = max((max(v, default=0) for v in lists.to_pylist() if v), default=0)
    return lists, classes, options.n_classes or (len(classes) if classes else top + 1)
