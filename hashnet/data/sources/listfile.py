"""``listfile``: the public hashing lists, ``images/cat.jpg 0 1 0 …``, one list or one per split.

A line is a path and its labels: a 0 or 1 per class, or one class id, or nothing. A path that ends like
a picture's may contain spaces. A million lines of 80 labels take about a second, as whole blocks of lines
are parsed by array operations.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.data.columns import read_names, uris_below
from hashnet.data.splits import QUERY, join_names
from hashnet.data.writer import SourceRows, find_duplicate, with_keys
from hashnet.errors import DataError, StorageError
from hashnet.io import key, storage
from hashnet.labels import MAX_CLASSES

FILES = {"train": ("train.txt",), "query": ("query.txt", "test.txt"), "database": ("database.txt",)}
ORDER = ("database", "train", "query")  # of the rows
CHUNK = 8 << 20  # bytes read and parsed at once
_ENDING = r"(?i)\.(jpe?g|png|webp|bmp|gif|tiff?|ppm)"  # read by Python and by Arrow alike
_PICTURE = re.compile(_ENDING + "$")
_ID = re.compile("[0-9]{1,9}")
_SPACE, _NEWLINE, _ONE = 32, 10, 49


@dataclass(frozen=True)
class Options:
    path: str | None = key(
        None, "a list, or a folder with train.txt, query.txt (or test.txt) and database.txt: a fixed split"
    )
    root: str | None = key(None, "folder that the paths in the lists start from (default: that of the list)")
    strip: str = key("", "prefix to remove from the paths in the lists, such as the authors' own folder")
    train: str | None = key(None, "list of the training images, instead of PATH")
    query: str | None = key(None, "list of the queries")
    database: str | None = key(None, "list of the database")
    overlap: str = key(
        "error",
        "queries that are also in the database list: error, or drop them there",
        choices=("error", "drop"),
    )
    class_names: list[str] = key([], "names of the label columns, or a text file with one per line")
    # last, because the name hides the function
    key: str | None = key(
        None,
        "path: keep the paths in the lists (without the prefix `strip`) as the column `key`",
        choices=("path",),
    )


def load(options: Options) -> SourceRows:
    """Rows of one list, or of the lists of three splits, joined by path."""
    files = _files(options)
    root = storage.absolute(options.root or storage.parent_folder(next(iter(files.values()))))
    lists = {name: _stripped(read_list(uri), options.strip) for name, uri in files.items()}
    for found in lists.values():
        _refuse_duplicates(found)
    if "all" in lists:
        found = lists["all"]
        return _rows(options, root, found.paths, found.labels, found.n_classes, None, {})
    return _join(options, root, lists)


def _files(options: Options) -> dict[str, str]:
    """Split name → list; a single list that is yet to be split has the name "all"."""
    given = {name: getattr(options, name) for name in ORDER if getattr(options, name)}
    if given and options.path:
        raise DataError("give one list as PATH, or lists as train, query and database, not both")
    if given:
        return given
    if options.path is None:
        raise DataError("no list was given; give PATH, or train, query and database")
    if not storage.is_folder(options.path):
        return {"all": options.path}
    found = {}
    for split in ORDER:
        here = [storage.join(options.path, name) for name in FILES[split]]
        here = [uri for uri in here if storage.exists(uri)]
        if here:
            found[split] = here[0]
    if "query" not in found or len(found) < 2:
        raise DataError(
            f"{options.path} must hold query.txt (or test.txt) and train.txt or database.txt; "
            f"it holds {', '.join(storage.list_names(options.path)[:5]) or 'nothing'}"
        )
    return found


def _stripped(found: ListFile, beginning: str) -> ListFile:
    """The list with ``beginning`` removed from its paths, before paths are compared with one another."""
    if not beginning:
        return found
    rest = pc.utf8_slice_codeunits(found.paths, len(beginning))
    return replace(found, paths=pc.if_else(pc.starts_with(found.paths, beginning), rest, found.paths))


def _refuse_duplicates(found: ListFile) -> None:
    """DataError for a path that occurs twice in one list: the image would be found twice."""
    if twice := find_duplicate(found.paths):
        raise DataError(
            f"{found.uri} line {found.lines[twice.second]} repeats {twice.id!r} of line "
            f"{found.lines[twice.first]} ({twice.n:,} duplicated ids in all); keep one of them"
        )


def _join(options: Options, root: str, lists: dict[str, ListFile]) -> SourceRows:
    """One row per path; its splits are the lists that contain it."""
    _refuse_other_widths(lists)
    n_classes = max((found.n_classes or 0 for found in lists.values()), default=0) or None
    paths: pa.Array = pa.concat_arrays([found.paths for found in lists.values()])
    codes, first, flags = join_names({name: found.paths for name, found in lists.items()})
    notes = _overlap(options, lists, paths, flags, first)
    labels = None
    if n_classes is not None:
        joined = pa.concat_arrays([found.labels for found in lists.values()])
        _refuse_other_labels(lists, joined, codes, first)
        labels = joined.take(pa.array(first))
    return _rows(options, root, paths.take(pa.array(first)), labels, n_classes, flags, notes)


def _refuse_other_widths(lists: dict[str, ListFile]) -> None:
    (_, one), *others = lists.items()
    for _, other in others:
        same = (one.labels is None) == (other.labels is None) and one.multi_hot == other.multi_hot
        if not same or (one.multi_hot and one.n_classes != other.n_classes):
            widths = [0 if f.labels is None else f.n_classes if f.multi_hot else 1 for f in (one, other)]
            raise DataError(
                f"{one.uri} has {widths[0]} label columns, {other.uri} has {widths[1]}; they must be equal"
            )


def _overlap(
    options: Options, lists: dict[str, ListFile], paths: pa.Array, flags: np.ndarray, first: np.ndarray
) -> dict[str, Any]:
    both = np.flatnonzero(((flags & QUERY) > 0) & ((flags & ~np.uint8(QUERY)) > 0))
    if len(both) == 0:
        return {}
    name = paths[int(first[both[0]])].as_py()
    if options.overlap == "error":
        raise DataError(
            f"{len(both):,} paths of {lists['query'].uri} are also in the database or training list, the "
            f"first is {name!r}; a query in the database finds itself: correct the lists, or say overlap=drop"
        )
    flags[both] = QUERY
    return {"queries_dropped_from_database": len(both)}


def _refuse_other_labels(
    lists: dict[str, ListFile], joined: pa.Array, codes: np.ndarray, first: np.ndarray
) -> None:
    """The same path must have the same labels in every list."""
    again = np.flatnonzero(first[codes] != np.arange(len(codes)))
    if len(again) == 0:
        return
    here, there = joined.take(pa.array(again)), joined.take(pa.array(first[codes[again]]))
    same = pc.equal(here.value_lengths(), there.value_lengths()).to_numpy(zero_copy_only=False)
    if same.all():
        differing = np.flatnonzero(here.flatten().to_numpy() != there.flatten().to_numpy())
        if len(differing) == 0:
            return
        at = int(pc.list_parent_indices(here)[int(differing[0])].as_py())
    else:
        at = int(np.flatnonzero(~same)[0])
    row, start = int(again[at]), 0
    for found in lists.values():
        if row < start + len(found):
            i = row - start
            raise DataError(
                f"{found.uri} line {found.lines[i]}: {found.paths[i].as_py()!r} has other labels here than "
                "in another list; correct one of them"
            )
        start += len(found)


def _rows(
    options: Options,
    root: str,
    paths: pa.Array,
    labels: pa.Array | None,
    n_classes: int | None,
    flags: np.ndarray | None,
    notes: dict[str, int | str],
) -> SourceRows:
    names = tuple(read_names(options.class_names)) or None
    if names is not None and len(names) != n_classes:
        raise DataError(f"class_names has {len(names)} names, the lists have {n_classes} classes")

    def payload(start: int, stop: int) -> pa.Table:
        return pa.table({"uri": uris_below(root, paths[start:stop].cast(pa.string()))})

    rows = SourceRows(
        n=len(paths), payload=payload, labels=labels, n_classes=n_classes, class_names=names, names=paths,
        fixed=flags, notes=notes,
    )  # fmt: skip
    return with_keys(rows) if options.key else rows


@dataclass(frozen=True)
class ListFile:
    """Paths large_string (n,), class id lists list<int32> (n,) or None, line numbers int64 (n,) from 1."""

    uri: str
    paths: pa.Array
    labels: pa.Array | None
    n_classes: int | None
    multi_hot: bool
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)


def read_list(uri: str) -> ListFile:
    """A parsed list file; DataError names the line and what is wrong with it."""
    paths: list[pa.Array] = []
    labels: list[pa.Array] = []
    numbers: list[np.ndarray] = []
    n_labels: int | None = None
    for block, first_line in _blocks(uri):
        if n_labels is None:
            n_labels = _count_labels(block)
        if n_labels is None:
            continue  # only empty lines so far
        found, classes, lines = _parse(uri, block, first_line, n_labels)
        found = _as_text(uri, found, lines)
        if n_labels == 0 or b"," in block:
            _refuse_longer(uri, found, lines)
        paths.append(found.cast(pa.large_string()))  # all together may be more than a string array's 2 GiB
        numbers.append(lines)
        if classes is not None:
            labels.append(classes)
    if n_labels is None:
        raise DataError(f"{uri} is empty; a line of it looks like: images/cat.jpg 0 1 0")
    all_labels = pa.concat_arrays(labels) if labels else None
    n_classes = None
    if all_labels is not None:
        n_classes = n_labels if n_labels > 1 else int(pc.max(all_labels.flatten()).as_py()) + 1
    return ListFile(
        uri, pa.concat_arrays(paths), all_labels, n_classes, n_labels > 1, np.concatenate(numbers)
    )


def split_line(line: str) -> tuple[str, list[str]]:
    """Path and label words of one line; slow, for the first line and for explaining a wrong one."""
    words = line.split()
    pictures = [i for i, word in enumerate(words) if _PICTURE.search(word)]
    at = pictures[-1] if pictures else 0
    return " ".join(words[: at + 1]), words[at + 1 :]


def _blocks(uri: str) -> Iterator[tuple[bytes, int]]:
    """Whole lines, each ended by a newline, and the number of the first one."""
    first_line, rest = 1, b""
    try:
        with storage.open_input(uri) as source:
            while True:
                chunk = source.read(CHUNK)
                data = rest + chunk
                cut = data.rfind(b"\n") + 1 if chunk else len(data)
                block, rest = data[:cut], data[cut:]
                if first_line == 1:
                    block = block.removeprefix(codecs.BOM_UTF8)
                if block:
                    block = block if block.endswith(b"\n") else block + b"\n"
                    yield block, first_line
                    first_line += block.count(b"\n")
                if not chunk:
                    return
    except (StorageError, OSError) as error:
        raise DataError(f"cannot read the list {uri}: {error}; check the path") from error


def _tidy(block: bytes, n_labels: int) -> bytes:
    """The block without carriage returns, tabs, leading and trailing spaces; one space before each label.

    Doubled spaces inside a path belong to it, and no line is lost.
    """
    if b"\r" in block or b"\t" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\t", b" ")
    if b"\n " in block or block.startswith(b" "):
        block = re.sub(rb"\n +", b"\n", block.lstrip(b" "))
    if b"  " in block or b" \n" in block:
        # Anchored where the labels begin: tried from every label, a line with one too few is slow.
        begins, label = (rb"(?<! )(?<! [01])", rb"[01]") if n_labels > 1 else (b"", rb"[0-9]+")
        tail = rb"%b((?: +%b){%d}) *\n" % (begins, label, n_labels)
        block = re.sub(tail, lambda found: b" ".join([b"", *found[1].split()]) + b"\n", block)
    return block


def _count_labels(block: bytes) -> int | None:
    first = block.lstrip().partition(b"\n")[0]
    return len(split_line(first.decode(errors="replace"))[1]) if first else None


def _parse(
    uri: str, block: bytes, first_line: int, n_labels: int
) -> tuple[pa.Array, pa.Array | None, np.ndarray]:
    """Paths as binary, label lists or None, and line numbers of one block."""
    if n_labels == 0:
        whole, _, _, lines = _lines(_tidy(block, 0), first_line)
        return pc.binary_slice(whole, 0, -1), None, lines
    if n_labels == 1:
        return _parse_ids(uri, _tidy(block, 1), first_line)
    found = _parse_multi_hot(block, first_line, n_labels)
    if found is None:  # most lists need no tidying, which costs more than parsing, so it comes second
        block = _tidy(block, n_labels)
        found = _parse_multi_hot(block, first_line, n_labels)
    if found is None:
        raise DataError(_first_mistake(uri, block, first_line, n_labels))
    return found


def _lines(block: bytes, first_line: int) -> tuple[pa.Array, np.ndarray, np.ndarray, np.ndarray]:
    """The non-empty lines as binary with their newline; their starts, ends and line numbers."""
    data = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(data == _NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])
    whole = _binary(block, np.append(starts, len(data)))
    numbers = np.arange(first_line, first_line + len(ends))
    filled = ends > starts
    if filled.all():
        return whole, starts, ends, numbers
    return whole.filter(pa.array(filled)), starts[filled], ends[filled], numbers[filled]


def _parse_multi_hot(
    block: bytes, first_line: int, n_labels: int
) -> tuple[pa.Array, pa.Array, np.ndarray] | None:
    """Paths, label lists and line numbers; None when a line is not a path and n_labels times " 0" or " 1"."""
    data = np.frombuffer(block, dtype=np.uint8)
    whole, starts, ends, lines = _lines(block, first_line)
    width = 2 * n_labels  # " 0 1 0" at the end of the line
    if len(lines) == 0:
        return pa.array([], pa.binary()), pa.array([], pa.list_(pa.int32())), lines
    if (ends - starts).min() <= width:
        return None
    tails = np.lib.stride_tricks.sliding_window_view(data, width)[ends - width]  # (lines, width)
    labels = tails.view("<u2")  # (lines, n_labels): 0x3020 is " 0", 0x3120 is " 1"
    if not ((labels | 0x0100) == 0x3120).all():
        return None
    before, last = data[np.maximum(ends - width - 2, 0)], data[ends - width - 1]
    spaced = (data[starts] == _SPACE) | (last == _SPACE)
    if (spaced | ((before == _SPACE) & ((last | 1) == _ONE))).any():
        return None  # the path starts or ends in a space, or one more label hides at its end
    hits = np.flatnonzero(labels.ravel() == 0x3120)
    rows = hits // n_labels
    offsets = np.zeros(len(lines) + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=len(lines)), out=offsets[1:])
    classes = (hits - rows * n_labels).astype(np.int32)
    return pc.binary_slice(whole, 0, -(width + 1)), pa.ListArray.from_arrays(offsets, classes), lines


def _first_mistake(uri: str, block: bytes, first_line: int, n_labels: int) -> str:
    for number, line in enumerate(block.split(b"\n"), first_line):
        words = split_line(line.decode(errors="replace"))[1]
        right = {"0", "1"}.issuperset(words) if n_labels > 1 else all(map(_is_id, words))
        if line and (len(words) != n_labels or not right):
            return _explain(uri, number, words, n_labels)
    return f"{uri}: lines {first_line} and following are not PATH 0 1 0 … with {n_labels} labels"


def _is_id(word: str) -> bool:
    return _ID.fullmatch(word) is not None and int(word) < MAX_CLASSES


def _parse_ids(uri: str, block: bytes, first_line: int) -> tuple[pa.Array, pa.Array, np.ndarray]:
    """Paths, one-element lists and line numbers of lines that end in a class id."""
    data = np.frombuffer(block, dtype=np.uint8)
    _, starts, ends, lines = _lines(block, first_line)
    spaces = np.concatenate([[-1], np.flatnonzero(data == _SPACE)])
    last = spaces[np.searchsorted(spaces, ends) - 1]  # the last space before the end of each line
    words = pa.array([], pa.string())
    if (last > starts).all():
        # path, id, path, id, …: cut the block after the last space and at the start of each line
        cuts = np.stack([starts, last + 1], axis=1).ravel()
        pieces = _binary(block, np.append(cuts, len(data)))
        words = pc.ascii_trim_whitespace(_as_text(uri, pieces[1::2], lines))
    if len(words) != len(lines) or not pc.all(pc.match_substring_regex(words, "^[0-9]{1,9}$")).as_py():
        raise DataError(_first_mistake(uri, block, first_line, 1))
    if len(spaces) - 1 > len(lines):  # a path holds a space, or a line one label too many
        more = np.flatnonzero(np.searchsorted(spaces, last) - np.searchsorted(spaces, starts) > 0)
        if any(len(split_line(block[starts[i] : ends[i]].decode(errors="replace"))[1]) != 1 for i in more):
            raise DataError(_first_mistake(uri, block, first_line, 1))
    ids = words.cast(pa.int32())
    if len(ids) and pc.max(ids).as_py() >= MAX_CLASSES:
        raise DataError(_first_mistake(uri, block, first_line, 1))
    lists = pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32), ids)
    return pc.binary_slice(pieces[::2], 0, -1), lists, lines


def _explain(uri: str, line: int, words: list[str], n_labels: int) -> str:
    if len(words) != n_labels:
        return (
            f"{uri} line {line} has {len(words)} label columns, its first line has {n_labels}; "
            "every line needs the same number"
        )
    if n_labels == 1:
        return (
            f"{uri} line {line}: the label is {words[0]!r}; it must be a class id such as 0 or 17, below "
            f"{MAX_CLASSES:,}: map other ids to 0..n-1"
        )
    column = next((i for i, word in enumerate(words) if word not in ("0", "1")), 0)
    return f"{uri} line {line}: label column {column + 1} is {words[column]!r}; labels must be 0 or 1"


def _refuse_longer(uri: str, paths: pa.Array, lines: np.ndarray) -> None:
    """DataError for a path that continues after a picture's ending: it holds a label, as in ``cat.jpg,0``."""
    longer = pc.match_substring_regex(paths, _ENDING + "[ ,;]")
    wrong = pc.and_not(longer, pc.match_substring_regex(paths, _ENDING + "$"))
    if pc.any(wrong).as_py():
        at = wrong.index(True).as_py()
        raise DataError(
            f"{uri} line {lines[at]}: the path {paths[at].as_py()!r} continues after the picture's name; a "
            "line is a path and its labels, a space before each and as many as in the first line: "
            "images/cat.jpg 0 1 0"
        )


def _binary(block: bytes, offsets: np.ndarray) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(block)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _as_text(uri: str, paths: pa.Array, lines: np.ndarray) -> pa.Array:
    try:
        return paths.cast(pa.string())
    except pa.ArrowInvalid:
        for line, path in zip(lines, paths.to_pylist(), strict=True):
            try:
                path.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{uri} line {line}: the path is not UTF-8 ({error})") from None
        raise
