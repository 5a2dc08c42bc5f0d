"""From a CodeStore's shards to rows in id order: streaming, with one copy of the codes in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hashnet.errors import DataError, IndexMismatch
from hashnet.index.kinds import FlatOptions, Options, build_rows, parse_options
from hashnet.index.postings import Postings
from hashnet.index.rows import Rows, flat_rows, new_flat
from hashnet.index.segment import Segment
from hashnet.index.state import State, is_plain_range
from hashnet.io import binary_matrix, storage
from hashnet.kernels import default_threads

if TYPE_CHECKING:
    from hashnet.store import CodeStore

REMOTE_READERS = 16  # shards asked for at once from an object store


@dataclass(frozen=True)
class Part:
    """Rows as a shard holds them: ids int64 (n,), codes uint8 (n, n_bytes), (label, row) pairs or None."""

    ids: np.ndarray
    codes: np.ndarray
    labels: np.ndarray | None
    label_rows: np.ndarray | None


def read_parts(store: CodeStore, labels: bool = True, shards: Sequence[int] | None = None) -> Iterator[Part]:
    """One Part a shard of a store, in order; ``shards`` picks some by number.

    A few shards are read ahead by threads, which hides an object store's latency.
    """
    with_labels = labels and store.n_classes is not None
    columns = ["row_id", "code"] + (["labels"] if with_labels else [])
    numbers = range(len(store.shards)) if shards is None else shards
    threads = default_threads() if storage.is_local(store.uri) else REMOTE_READERS

    def read(number: int) -> Part:
        (table,) = store.tables(columns, [number])
        pairs = _label_pairs(table["labels"]) if with_labels else (None, None)
        return Part(table["row_id"].to_numpy(), binary_matrix(table["code"], store.n_bits // 8), *pairs)

    with ThreadPoolExecutor(threads) as pool:
        waiting = deque(pool.submit(read, number) for number in numbers[: 2 * threads])
        for number in numbers[2 * threads :]:
            yield waiting.popleft().result()
            waiting.append(pool.submit(read, number))
        while waiting:
            yield waiting.popleft().result()


def _label_pairs(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    lists = column.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    return lists.flatten().to_numpy(), np.repeat(np.arange(len(lengths)), lengths)


def assemble(
    parts: Iterable[Part], n: int, n_bits: int, n_classes: int | None, kind: str, given: dict[str, Any]
) -> tuple[Rows, Options]:
    """Rows of an index kind from parts that hold ``n`` rows together, and the options they have."""
    if n == 0:
        raise DataError("there are no codes to index: the input has 0 rows; encode some first")
    flat, codes = new_flat(n_bits, n)
    ids = np.empty(n, dtype=np.int64)
    labels, label_rows, start = [], [], 0
    for part in parts:
        stop = start + len(part.ids)
        if stop > n:
            break
        ids[start:stop] = part.ids
        codes[start:stop] = part.codes
        if part.labels is not None and part.label_rows is not None:
            labels.append(part.labels)
            label_rows.append(part.label_rows + start)
        start = stop
    if start != n:
        raise IndexMismatch(f"{n} rows were announced, but the shards do not hold exactly that many")
    order = _order(ids)
    if order is not None:
        ids, codes[:] = ids[order], codes[order]
    _refuse_bad_ids(ids)
    postings = None
    if n_classes is not None:
        postings = _postings(labels, label_rows, n_classes, order)
    options = parse_options(kind, given, n_bits, n)
    stored = None if is_plain_range(ids) else ids
    if isinstance(options, FlatOptions):
        return flat_rows(flat, stored, postings), options
    return build_rows(kind, options, codes, stored, postings), options


def build_state(
    parts: Iterable[Part],
    n: int,
    n_bits: int,
    n_classes: int | None,
    kind: str,
    options: dict[str, Any],
    lineage: dict[str, Any],
) -> State:
    """The first version of an index of these rows."""
    rows, made = assemble(parts, n, n_bits, n_classes, kind, options)
    return State(kind, n_bits, made, n_classes, lineage, (Segment(rows, made),))


def lineage_of(store: CodeStore) -> dict[str, Any]:
    """What the codes of a store say of themselves, and which store it was."""
    return dict(store.lineage) | {"codes_sha256": store.sha256}


def _order(ids: np.ndarray) -> np.ndarray | None:
    """The order that sorts the ids; None where they ascend already, as a store's do."""
    return None if (ids[1:] > ids[:-1]).all() else np.argsort(ids, kind="stable")


def _refuse_bad_ids(ids: np.ndarray) -> None:
    if ids[0] < 0:
        raise IndexMismatch(f"ids must be >= 0 (-1 marks an unused slot), got {ids[0]}")
    repeated = np.flatnonzero(ids[1:] == ids[:-1])
    if len(repeated):
        raise IndexMismatch(
            f"id {ids[repeated[0]]} is given twice ({len(repeated)} ids of {len(ids)} repeat another); "
            "ids must differ"
        )


def _postings(
    labels: list[np.ndarray], rows: list[np.ndarray], n_classes: int, order: np.ndarray | None
) -> Postings:
    label = np.concatenate([np.empty(0, dtype=np.int32), *labels])
    row = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    labels.clear()  # sorting needs their memory
    rows.clear()
    if len(label) and not 0 <= label.min() <= label.max() < n_classes:
        raise IndexMismatch(f"labels hold classes {label.min()}..{label.max()}, but there are {n_classes}")
    if order is not None:
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        row = place[row]
    return Postings.from_pairs(label, row, n_classes)
