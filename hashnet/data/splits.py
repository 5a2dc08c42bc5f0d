"""Which rows are learnt from, queried and searched: the three sets, and the protocols that draw them.

Queries are never in the database. Training rows are drawn from the database, except in the zero-shot
protocol, where they are of other classes. Every draw uses a seed and can be repeated.

In memory a row's sets are bit flags, one uint8 per row; in a manifest they are ``splits list<string>``.

>>> import numpy as np
>>> to_lists(np.array([TRAIN | DATABASE, QUERY, 0], dtype=np.uint8)).to_pylist()
[['train', 'database'], ['query'], []]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.data.columns import check_labels
from hashnet.errors import ConfigError, DataError, StorageError
from hashnet.io import key, storage
from hashnet.labels import MAX_CLASSES

TRAIN, QUERY, DATABASE = 1, 2, 4
FLAGS = {"train": TRAIN, "query": QUERY, "database": DATABASE}
SPLITS = tuple(FLAGS)
DEFAULT_QUERY, DEFAULT_TRAIN = 5_000, 10_000  # the paper's counts; a small set gives a tenth as queries

_COMBINATIONS = pa.array(
    [[name for name, flag in FLAGS.items() if bits & flag] for bits in range(8)], pa.list_(pa.string())
)


def flag_of(split: str) -> int:
    """The bit flag of a split by its name, or DataError."""
    if split not in FLAGS:
        raise DataError(f"there is no split {split!r}; a row is in some of {', '.join(SPLITS)}")
    return FLAGS[split]


def to_lists(flags: np.ndarray) -> pa.ListArray:
    """Arrow list<string> (n,) of flags uint8 (n,)."""
    return _COMBINATIONS.take(pa.array(flags, pa.uint8()))


def from_lists(lists: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Flags uint8 (n,) of an Arrow list<string>; DataError for an unknown name."""
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    names = lists.flatten().dictionary_encode()
    bits = np.array([flag_of(str(name)) for name in names.dictionary.to_pylist()], dtype=np.uint8)
    flags = np.zeros(len(lists), dtype=np.uint8)
    if len(names):
        rows = np.repeat(np.arange(len(lists)), lengths)
        np.bitwise_or.at(flags, rows, bits[names.indices.to_numpy(zero_copy_only=False)])
    return flags


def counts(flags: np.ndarray) -> dict[str, int]:
    """Number of rows per split; empty splits are left out."""
    found = {name: int(np.count_nonzero(flags & flag)) for name, flag in FLAGS.items()}
    return {name: n for name, n in found.items() if n}


class JoinedNames(NamedTuple):
    """Lists of names, one per split, stacked and joined: a name is one row, wherever it appears."""

    codes: np.ndarray  # the row of each entry of the stacked lists
    first: np.ndarray  # the entry where each row appears first
    flags: np.ndarray  # the splits of each row


def join_names(names: Mapping[str, pa.Array]) -> JoinedNames:
    """Rows in the order of appearance. Without a database list the training rows are the database."""
    codes = pa.concat_arrays(list(names.values())).dictionary_encode().indices.to_numpy()
    first = np.full(int(codes.max()) + 1, -1, dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    flags = np.zeros(len(first), dtype=np.uint8)
    bits = [np.full(len(listed), flag_of(split), dtype=np.uint8) for split, listed in names.items()]
    np.bitwise_or.at(flags, codes, np.concatenate(bits))
    if "database" not in names:
        flags[(flags & TRAIN) > 0] |= DATABASE
    return JoinedNames(codes, first, flags)


@dataclass(frozen=True)
class Protocol:
    """How to split. ``None`` means the default of the data set."""

    n_query: int | None = key(None, "how many queries to draw (default: the data set's)", low=0)
    n_train: int | None = key(None, "how many training images to draw from the database", low=0)
    query_per_class: int | None = key(None, "queries per class, instead of n_query", low=1)
    train_per_class: int | None = key(None, "training images per class, instead of n_train", low=1)
    zero_shot: float | None = key(
        None,
        "fraction of the classes that training never sees; queries and database come from these",
        low=0,
        high=1,
    )
    split_files: list[str] = key([], "a fixed split: train=FILE,query=FILE,database=FILE, one name per line")
    all_in: list[str] = key([], "put every row into these splits and draw nothing", choices=tuple(FLAGS))
    seed: int = key(0, "seed of every draw", low=0)

    def __post_init__(self) -> None:
        if "query" in self.all_in and len(set(self.all_in)) > 1:
            raise ConfigError(
                "queries must not be in another split, where each would find itself; give all_in=query to "
                "rows that are queries only, or draw some with n_query"
            )


def assign_splits(
    protocol: Protocol,
    n: int,
    labels: pa.Array | None = None,
    n_classes: int | None = None,
    names: pa.Array | None = None,
    fixed: np.ndarray | None = None,
) -> np.ndarray:
    """Split flags uint8 (n,) of n rows.

    ``labels`` are class id lists, ``names`` the names that split files use for rows. ``fixed`` is the
    split that came with the data set; what the protocol sets explicitly overrides it.
    """
    _check_classes(labels, n_classes)
    if protocol.split_files:
        flags = _from_files(protocol.split_files, names, n)
    elif protocol.all_in:
        flags = np.full(n, sum({FLAGS[name] for name in protocol.all_in}), dtype=np.uint8)
    elif protocol.zero_shot is not None:
        flags = _zero_shot(
            protocol, n, _require_labels(labels, "the zero-shot protocol"), n_classes or 0, fixed
        )
    elif fixed is not None and not _sets_counts(protocol):
        flags = fixed.astype(np.uint8)
    else:
        flags = _draw(protocol, n, labels, fixed)
    _check_similar_pair(flags, labels)
    return flags


def _check_classes(labels: pa.Array | None, n_classes: int | None) -> None:
    """Runs before anything is counted per class: a class id of a billion would take gigabytes."""
    if n_classes is not None and n_classes > MAX_CLASSES:
        raise DataError(
            f"{n_classes:,} classes are too many, the limit is {MAX_CLASSES:,}; map the ids to "
            "0..n-1, or give class names instead of ids"
        )
    check_labels(labels, n_classes)


def _sets_counts(protocol: Protocol) -> bool:
    counts = (protocol.n_query, protocol.n_train, protocol.query_per_class, protocol.train_per_class)
    return any(count is not None for count in counts)


def _require_labels(labels: pa.Array | None, what: str) -> pa.Array:
    if labels is None or labels.null_count == len(labels):
        raise DataError(f"{what} needs labels and these rows have none; give n_query and n_train instead")
    return labels


def _draw(protocol: Protocol, n: int, labels: pa.Array | None, fixed: np.ndarray | None) -> np.ndarray:
    """Flags of drawn queries, the rest as database, and training rows from it; fixed queries stay."""
    rng = np.random.default_rng([protocol.seed, 0])
    rows = np.arange(n) if fixed is None else np.flatnonzero(fixed)
    query = _draw_query(protocol, rng, rows, labels, fixed)
    flags = np.zeros(n, dtype=np.uint8)
    flags[rows] = DATABASE
    flags[query] = QUERY
    flags[_draw_train(protocol, rng, np.flatnonzero(flags == DATABASE), labels)] |= TRAIN
    return flags


def _draw_query(
    protocol: Protocol,
    rng: np.random.Generator,
    rows: np.ndarray,
    labels: pa.Array | None,
    fixed: np.ndarray | None,
) -> np.ndarray:
    if protocol.query_per_class:
        labels = _require_labels(labels, "query_per_class")
        return _per_class(rng, rows, labels, protocol.query_per_class, "query")
    if protocol.n_query is not None:
        return _draw_rows(rng, _labelled(rows, labels), protocol.n_query, "query")
    if fixed is not None and (fixed & QUERY).any():
        return rows[(fixed[rows] & QUERY) > 0]
    # The protocol leaves it open: rows without labels are only searched.
    return _draw_rows(rng, rows, 0 if labels is None else min(DEFAULT_QUERY, len(rows) // 10), "query")


def _draw_train(
    protocol: Protocol, rng: np.random.Generator, rows: np.ndarray, labels: pa.Array | None
) -> np.ndarray:
    if protocol.train_per_class:
        labels = _require_labels(labels, "train_per_class")
        return _per_class(rng, rows, labels, protocol.train_per_class, "training")
    rows, n_train = _labelled(rows, labels), protocol.n_train
    if n_train is None:
        n_train = 0 if labels is None else min(DEFAULT_TRAIN, len(rows))
    return _draw_rows(rng, rows, n_train, "training")


def _labelled(rows: np.ndarray, labels: pa.Array | None) -> np.ndarray:
    """The rows that have a label; all, where none has: nothing is relevant to a row without one."""
    if labels is None or labels.null_count == len(labels):
        return rows
    with_label = rows[pc.fill_null(pc.list_value_length(labels), 0).to_numpy(zero_copy_only=False)[rows] > 0]
    return with_label if len(with_label) else rows


def _draw_rows(rng: np.random.Generator, rows: np.ndarray, n: int, what: str) -> np.ndarray:
    if n > len(rows):
        raise DataError(
            f"{n:,} {what} rows were requested, but there are only {len(rows):,} to draw from; "
            f"lower {'n_query (--n-query)' if what == 'query' else 'n_train (--n-train)'} or add rows"
        )
    return rng.permutation(rows)[:n]


def _per_class(rng: np.random.Generator, rows: np.ndarray, labels: pa.Array, n: int, what: str) -> np.ndarray:
    """``n`` rows per class; a row of several classes counts for the first class that draws it."""
    owners = pc.list_parent_indices(labels).to_numpy()
    classes = labels.flatten().to_numpy()
    inside = np.zeros(len(labels), dtype=bool)
    inside[rows] = True
    keep = inside[owners]
    owners, classes = owners[keep], classes[keep]
    order = rng.permutation(len(owners))
    order = order[np.argsort(classes[order], kind="stable")]  # by class, shuffled within
    found, starts = np.unique(classes[order], return_index=True)
    chosen = np.zeros(len(labels), dtype=bool)
    for class_id, members in zip(found, np.split(owners[order], starts[1:]), strict=True):
        free = members[~chosen[members]][:n]
        if len(free) < n:
            option = "query_per_class" if what == "query" else "train_per_class"
            raise DataError(
                f"class {class_id} has only {len(free):,} images to draw {n:,} {what} images from; "
                f"lower {option} or leave the class out"
            )
        chosen[free] = True
    return np.flatnonzero(chosen)


def _zero_shot(
    protocol: Protocol, n: int, labels: pa.Array, n_classes: int, fixed: np.ndarray | None
) -> np.ndarray:
    """Flags with only seen classes in training, only unseen ones elsewhere; mixed rows are in no set."""
    rng = np.random.default_rng([protocol.seed, 1])
    n_unseen = round((protocol.zero_shot or 0) * n_classes)
    if not 0 < n_unseen < n_classes:
        raise DataError(
            f"zero_shot={protocol.zero_shot} of {n_classes} classes leaves {n_unseen} unseen and "
            f"{n_classes - n_unseen} seen; both must be at least 1"
        )
    unseen = np.zeros(n_classes, dtype=bool)
    unseen[rng.permutation(n_classes)[:n_unseen]] = True
    owners = pc.list_parent_indices(labels).to_numpy()
    of_unseen = unseen[labels.flatten().to_numpy()]
    n_labels = np.bincount(owners, minlength=n)
    n_of_unseen = np.bincount(owners, weights=of_unseen, minlength=n)
    new = np.flatnonzero((n_labels > 0) & (n_of_unseen == n_labels))
    old = np.flatnonzero((n_labels > 0) & (n_of_unseen == 0))
    if fixed is not None:
        new, old = new[fixed[new] > 0], old[(fixed[old] & ~np.uint8(QUERY)) > 0]
        draws = protocol.n_train is not None or protocol.train_per_class is not None
        if not draws and (fixed & TRAIN).any():  # the rows that were chosen for training, as in the paper
            old = old[(fixed[old] & TRAIN) > 0]
            protocol = dataclasses.replace(protocol, n_train=len(old))
    flags = np.zeros(n, dtype=np.uint8)
    flags[new] = DATABASE
    flags[_draw_query(protocol, rng, new, labels, fixed)] = QUERY
    flags[_draw_train(protocol, rng, old, labels)] = TRAIN
    return flags


def _from_files(words: list[str], names: pa.Array | None, n: int) -> np.ndarray:
    """Flags of the rows that the files NAME=FILE list, by row name or number."""
    if names is None:
        names = pc.cast(pa.array(np.arange(n)), pa.string())
    flags = np.zeros(n, dtype=np.uint8)
    for word in words:
        split_name, equals, uri = word.partition("=")
        if not equals:
            raise DataError(f"split_files takes train=FILE, query=FILE or database=FILE, got {word!r}")
        bit = flag_of(split_name)
        try:
            lines = storage.read_bytes(uri).decode("utf-8-sig").splitlines()
        except (StorageError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the split file {uri}: {error}") from error
        listed = [line.strip() for line in lines]
        where = pc.index_in(pa.array(listed, names.type), value_set=names)
        unknown = [i for i, row in enumerate(where.to_pylist()) if row is None and listed[i]]
        if unknown:
            raise DataError(
                f"{uri} line {unknown[0] + 1}: there is no row named {listed[unknown[0]]!r} "
                f"({len(unknown):,} such lines; a name looks like {names[0].as_py()!r})"
            )
        flags[where.drop_null().to_numpy()] |= bit
    both = np.flatnonzero((flags & QUERY > 0) & (flags & DATABASE > 0))
    if len(both):
        raise DataError(
            f"{len(both):,} rows are query and database at once, the first is {names[both[0]].as_py()!r}; "
            "a query in the database finds itself: remove it from one of the files"
        )
    return flags


def _check_similar_pair(flags: np.ndarray, labels: pa.Array | None) -> None:
    """DataError when a labelled training set has no similar pair: there is nothing to learn."""
    train = np.flatnonzero(flags & TRAIN)
    if labels is None or len(train) == 0 or labels.null_count == len(labels):
        return
    of_train = labels.take(pa.array(train)).flatten().to_numpy()
    if len(of_train) == 0 or np.bincount(of_train).max() < 2:
        raise DataError(
            f"no two of the {len(train):,} training images share a label, so there is no similar pair to "
            "learn from; take more training images, or check that the labels are classes and not ids"
        )
