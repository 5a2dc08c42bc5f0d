"""From a CodeStore's shards to rows in id order: streaming, with one copy of the codes in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hashnet.errors import DataError, IndexMismatch
from hashnet.index.kinds import KINDS, parse_options
from hashnet.index.segment import Segment
from hashnet.index.snapshot import Snapshot, is_plain_range
from hashnet.index.stored_rows import Postings, new_flat, with_flat_ids
from hashnet.io import binary_matrix, storage
from hashnet.kernels import default_threads

if TYPE_CHECKING:
    from hashnet.store import CodeStore

REMOTE_READERS = 16  # shards read at once from an object store


@dataclass(frozen=True)
class CodeBlock:
    """Rows of a shard: ids int64 (n,), codes uint8 (n, n_bits // 8), and (label, row) pairs or None."""

    ids: np.ndarray
    codes: np.ndarray
    labels: np.ndarray | None
    label_rows: np.ndarray | None


def read_code_blocks(
    store: CodeStore, labels: bool = True, shards: Sequence[int] | None = None
) -> Iterator[CodeBlock]:
    """One CodeBlock per shard of a store, in order; ``shards`` picks some by number.

    A few shards are read ahead by threads, which hides an object store's latency.
    """
    with_labels = labels and store.n_classes is not None
    columns = ["row_id", "code"] + (["labels"] if with_labels else [])
    numbers = range(len(store.shards)) if shards is None else shards
    threads = default_threads() if storage.is_local(store.uri) else REMOTE_READERS

    def read(number: int) -> CodeBlock:
        (table,) = store.tables(columns, [number])
        pairs = _label_pairs(table["labels"]) if with_labels else (None, None)
        return CodeBlock(table["row_id"].to_numpy(), binary_matrix(table["code"], store.n_bits // 8), *pairs)

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


@dataclass(frozen=True)
class IndexSpec:
    """What an index is to be: its kind and the options given, what its codes are, where they come from."""

    n_bits: int
    kind: str = "flat"
    options: Mapping[str, Any] = field(default_factory=dict)
    n_classes: int | None = None  # None: without labels
    lineage: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_store(
        cls, store: CodeStore, kind: str, options: Mapping[str, Any], *, labels: bool = True
    ) -> IndexSpec:
        """An index of a store's codes, with their labels or without."""
        n_classes = store.n_classes if labels else None
        return cls(
            store.n_bits, kind, options, n_classes, dict(store.lineage) | {"codes_sha256": store.sha256}
        )


def build_snapshot(blocks: Iterable[CodeBlock], n: int, spec: IndexSpec) -> Snapshot:
    """The first version of an index of the ``n`` rows that the blocks hold together."""
    if n == 0:
        raise DataError("there are no codes to index: the input has 0 rows; encode some first")
    flat, codes = new_flat(spec.n_bits, n)
    ids, pairs = _collect(blocks, n, codes)
    order = _order(ids)
    if order is not None:
        ids, codes[:] = ids[order], codes[order]
    _refuse_bad_ids(ids)
    postings = _postings(pairs, spec.n_classes, order) if spec.n_classes is not None else None
    options = parse_options(spec.kind, spec.options, spec.n_bits, n)
    stored = None if is_plain_range(ids) else ids
    kind = KINDS[spec.kind]
    if spec.kind == "flat":  # the codes lie in it already
        index = with_flat_ids(flat, stored)
    else:
        index = kind.build(options, codes, stored)
    segment = Segment(kind.rows(index, postings), options)
    return Snapshot(spec.kind, spec.n_bits, options, spec.n_classes, dict(spec.lineage), (segment,))


def _collect(
    blocks: Iterable[CodeBlock], n: int, codes: np.ndarray
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The ids int64 (n,) and the (label, row) pairs of all blocks; fills ``codes`` (n, n_bits // 8)."""
    ids = np.empty(n, dtype=np.int64)
    pairs, start = [], 0
    for block in blocks:
        stop = start + len(block.ids)
        if stop > n:
            break
        ids[start:stop] = block.ids
        codes[start:stop] = block.codes
        if block.labels is not None and block.label_rows is not None:
            pairs.append((block.labels, block.label_rows + start))
        start = stop
    if start != n:
        raise IndexMismatch(f"{n} rows were announced, but the shards do not hold exactly that many")
    return ids, pairs


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
    pairs: list[tuple[np.ndarray, np.ndarray]], n_classes: int, order: np.ndarray | None
) -> Postings:
    label = np.concatenate([np.empty(0, dtype=np.int32), *(labels for labels, _ in pairs)])
    row = np.concatenate([np.empty(0, dtype=np.int64), *(rows for _, rows in pairs)])
    pairs.clear()  # sorting needs their memory
    if len(label) and not 0 <= label.min() <= label.max() < n_classes:
        raise IndexMismatch(f"labels hold classes {label.min()}..{label.max()}, but there are {n_classes}")
    if order is not None:
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        row = place[row]
    return Postings.from_pairs(label, row, n_classes)
