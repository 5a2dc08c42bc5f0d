"""The public hashing lists, ``images/cat.jpg 0 1 0 …`` a line, read by array operations.

A line is a path and its labels: 0 and 1 for each class, or one class id, or nothing. A path may
hold spaces when it ends like a picture's. A million lines of 80 labels take about a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet import storage
from hashnet.errors import DataError, StorageError

CHUNK = 8 << 20  # bytes read and parsed at once
_PICTURE = re.compile(r"\.(jpe?g|png|webp|bmp|gif|tiff?|ppm)$", re.IGNORECASE)
_SPACE, _NEWLINE, _ZERO, _ONE = 32, 10, 48, 49


@dataclass(frozen=True)
class ListFile:
    """Paths string (n,), class id lists list<int32> (n,) or None, line numbers int64 (n,) from 1."""

    uri: str
    paths: pa.Array
    labels: pa.Array | None
    n_classes: int | None
    multi_hot: bool
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)


def read_list(uri: str) -> ListFile:
    """Parses a list file; DataError names the line and what is wrong with it."""
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
        paths.append(_as_text(uri, found, lines))
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
    """Path and label words of a line, the slow way: to look at the first line, to explain a wrong one."""
    words = line.split()
    pictures = [i for i, word in enumerate(words) if _PICTURE.search(word)]
    at = pictures[-1] if pictures else 0
    return " ".join(words[: at + 1]), words[at + 1 :]


def _blocks(uri: str) -> Iterator[tuple[bytes, int]]:
    """Whole lines with single spaces, each ended by a newline, and the number of the first one."""
    first_line, rest = 1, b""
    try:
        with storage.open_input(uri) as source:
            while True:
                chunk = source.read(CHUNK)
                data = rest + chunk
                cut = data.rfind(b"\n") + 1 if chunk else len(data)
                block, rest = data[:cut], data[cut:]
                if block:
                    block = _tidy(block if block.endswith(b"\n") else block + b"\n")
                    yield block, first_line
                    first_line += block.count(b"\n")
                if not chunk:
                    return
    except (StorageError, OSError) as error:
        raise DataError(f"cannot read the list {uri}: {error}; check the path") from error


def _tidy(block: bytes) -> bytes:
    """Carriage returns, tabs, doubled and trailing spaces gone; a tidy block is only looked through."""
    if b"\r" in block or b"\t" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\t", b" ")
    if b"  " in block:
        block = re.sub(rb" {2,}", b" ", block)
    if b" \n" in block:
        block = block.replace(b" \n", b"\n")
    if b"\n " in block or block.startswith(b" "):
        block = block.replace(b"\n ", b"\n").removeprefix(b" ")
    return block


def _count_labels(block: bytes) -> int | None:
    for line in block.splitlines():
        if line:
            return len(split_line(line.decode(errors="replace"))[1])
    return None


def _parse(
    uri: str, block: bytes, first_line: int, n_labels: int
) -> tuple[pa.Array, pa.Array | None, np.ndarray]:
    """Paths as binary, label lists or None, and line numbers of one block."""
    data = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(data == _NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])
    filled = ends > starts
    lines = np.arange(first_line, first_line + len(ends))[filled]
    whole = _binary(block, np.append(starts, len(data)))  # each line with its newline
    if not filled.all():
        whole, starts, ends = whole.filter(pa.array(filled)), starts[filled], ends[filled]
    if n_labels == 0:
        return pc.binary_slice(whole, 0, -1), None, lines
    if n_labels == 1:
        return (*_parse_ids(uri, whole, lines), lines)
    width = 2 * n_labels  # " 0 1 0": a space and a digit a label, at the end of the line
    long_enough = ends - starts > width
    tails = np.lib.stride_tricks.sliding_window_view(data, width)[np.maximum(ends - width, 0)]
    digits = tails[:, 1::2]
    right = long_enough & (tails[:, 0::2] == _SPACE).all(axis=1) & ((digits | 1) == _ONE).all(axis=1)
    # A further label would hide at the end of the path.
    before = ends - width - 2
    more = (before >= 0) & (data[before] == _SPACE) & ((data[before + 1] | 1) == _ONE)
    for i in np.flatnonzero(~right | more):
        line = block[starts[i] : ends[i]].decode(errors="replace")
        words = split_line(line)[1]
        if len(words) != n_labels or not right[i]:
            raise DataError(_explain(uri, int(lines[i]), words, n_labels))
    rows, classes = np.nonzero(digits == _ONE)
    offsets = np.zeros(len(lines) + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=len(lines)), out=offsets[1:])
    lists = pa.ListArray.from_arrays(offsets, pa.array(classes, pa.int32()))
    return pc.binary_slice(whole, 0, -(width + 1)), lists, lines


def _parse_ids(uri: str, whole: pa.Array, lines: np.ndarray) -> tuple[pa.Array, pa.Array]:
    """Paths and one-element lists of lines that end in a class id."""
    text = pc.binary_slice(whole, 0, -1)
    found = pc.extract_regex(text, r"^(?P<path>.*) (?P<label>[0-9]{1,9})$")
    if found.null_count:
        i = found.is_null().index(True).as_py()
        words = split_line(text[i].as_py().decode(errors="replace"))[1]
        raise DataError(_explain(uri, int(lines[i]), words, 1))
    # extract_regex keeps the type it was given: binary digits are read as text
    ids = found.field("label").cast(pa.string()).cast(pa.int32())
    lists = pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32), ids)
    return found.field("path"), lists


def _explain(uri: str, line: int, words: list[str], n_labels: int) -> str:
    if len(words) != n_labels:
        return (
            f"{uri} line {line} has {len(words)} label columns, its first line has {n_labels}; "
            "every line needs the same number"
        )
    if n_labels == 1:
        return f"{uri} line {line}: the label is {words[0]!r}; it must be a class id such as 0 or 17"
    column = next((i for i, word in enumerate(words) if word not in ("0", "1")), 0)
    return f"{uri} line {line}: label column {column + 1} is {words[column]!r}; labels must be 0 or 1"


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
