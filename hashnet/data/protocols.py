"""Protocols: which rows are queried, which are searched, which are learnt from.

Queries are never in the database; training rows are drawn from the database (the zero-shot
protocol apart, where they are of other classes). Everything is drawn with a seed and repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.data import splits
from hashnet.data.parts import check_labels
from hashnet.data.splits import DATABASE, FLAGS, QUERY, TRAIN
from hashnet.errors import DataError, StorageError
from hashnet.io import key, storage
from hashnet.labels import MAX_CLASSES

AUTO_QUERY, AUTO_TRAIN = 5_000, 10_000  # the paper's counts; a small set gives a tenth as queries


@dataclass(frozen=True)
class Protocol:
    """How to split; ``None`` takes the data set's default."""

    n_query: int | None = key(None, "how many queries to draw (default: the data set's)", low=0)
    n_train: int | None = key(None, "how many training images to draw from the database", low=0)
    query_per_class: int | None = key(None, "queries of each class, instead of n_query", low=1)
    train_per_class: int | None = key(None, "training images of each class, instead of n_train", low=1)
    zero_shot: float | None = key(
        None,
        "share of the classes that training never sees; queries and database are of these",
        low=0,
        high=1,
    )
    split_files: list[str] = key([], "a fixed split: train=FILE,query=FILE,database=FILE, one name a line")
    all_in: list[str] = key([], "put every row into these splits and draw nothing", choices=tuple(FLAGS))
    seed: int = key(0, "seed of every draw", low=0)


def split(
    protocol: Protocol,
    n: int,
    labels: pa.Array | None = None,
    n_classes: int | None = None,
    names: pa.Array | None = None,
    fixed: np.ndarray | None = None,
) -> np.ndarray:
    """Flags uint8 (n,), see ``hashnet.data.splits``.

    ``labels`` are class id lists, ``names`` what split files may call a row. ``fixed`` is the split
    the data set came with; the protocol's own wishes come before it.
    """
    _check_classes(labels, n_classes)
    if protocol.split_files:
        flags = _from_files(protocol.split_files, names, n)
    elif protocol.all_in:
        flags = np.full(n, sum({FLAGS[name] for name in protocol.all_in}), dtype=np.uint8)
    elif protocol.zero_shot is not None:
        flags = _zero_shot(protocol, n, _needed(labels, "the zero-shot protocol"), n_classes or 0, fixed)
    elif fixed is not None and not _asks(protocol):
        flags = fixed.astype(np.uint8)
    else:
        flags = _draw(protocol, n, labels, fixed)
    _check(flags, labels)
    return flags


def _check_classes(labels: pa.Array | None, n_classes: int | None) -> None:
    """Before anything is counted by class: one id of a billion would take gigabytes."""
    if n_classes is not None and n_classes > MAX_CLASSES:
        raise DataError(
            f"{n_classes:,} classes are too many, at most {MAX_CLASSES:,} are possible; map the ids to "
            "0..n-1, or give class names instead of ids"
        )
    check_labels(labels, n_classes)


def _asks(protocol: Protocol) -> bool:
    wishes = (protocol.n_query, protocol.n_train, protocol.query_per_class, protocol.train_per_class)
    return any(wish is not None for wish in wishes)


def _needed(labels: pa.Array | None, what: str) -> pa.Array:
    if labels is None or labels.null_count == len(labels):
        raise DataError(f"{what} needs labels and these rows have none; give n_query and n_train instead")
    return labels


def _draw(protocol: Protocol, n: int, labels: pa.Array | None, fixed: np.ndarray | None) -> np.ndarray:
    """Queries, the rest as database, and training rows from it; a source's own queries stay queries."""
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
        labels = _needed(labels, "query_per_class")
        return _per_class(rng, rows, labels, protocol.query_per_class, "query")
    if protocol.n_query is not None:
        return _some(rng, rows, protocol.n_query, "query")
    if fixed is not None and (fixed & QUERY).any():
        return rows[(fixed[rows] & QUERY) > 0]
    # Nothing was asked for: rows without labels are only searched.
    return _some(rng, rows, 0 if labels is None else min(AUTO_QUERY, len(rows) // 10), "query")


def _draw_train(
    protocol: Protocol, rng: np.random.Generator, rows: np.ndarray, labels: pa.Array | None
) -> np.ndarray:
    if protocol.train_per_class:
        labels = _needed(labels, "train_per_class")
        return _per_class(rng, rows, labels, protocol.train_per_class, "training")
    n_train = protocol.n_train
    if n_train is None:
        n_train = 0 if labels is None else min(AUTO_TRAIN, len(rows))
    return _some(rng, rows, n_train, "training")


def _some(rng: np.random.Generator, rows: np.ndarray, wanted: int, what: str) -> np.ndarray:
    if wanted > len(rows):
        raise DataError(
            f"the protocol needs {wanted:,} {what} images, but there are only {len(rows):,} to draw from; "
            f"lower {'n_query (--n-query)' if what == 'query' else 'n_train (--n-train)'} or add images"
        )
    return rng.permutation(rows)[:wanted]


def _per_class(
    rng: np.random.Generator, rows: np.ndarray, labels: pa.Array, wanted: int, what: str
) -> np.ndarray:
    """``wanted`` rows of each class; a row of several classes counts for the first that draws it."""
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
        free = members[~chosen[members]][:wanted]
        if len(free) < wanted:
            option = "query_per_class" if what == "query" else "train_per_class"
            raise DataError(
                f"class {class_id} has only {len(free):,} images to draw {wanted:,} {what} images from; "
                f"lower {option} or leave the class out"
            )
        chosen[free] = True
    return np.flatnonzero(chosen)


def _zero_shot(
    protocol: Protocol, n: int, labels: pa.Array, n_classes: int, fixed: np.ndarray | None
) -> np.ndarray:
    """Training rows have only seen classes, queries and database only unseen ones; mixed rows are in none."""
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
    flags = np.zeros(n, dtype=np.uint8)
    flags[new] = DATABASE
    flags[_draw_query(protocol, rng, new, labels, fixed)] = QUERY
    flags[_draw_train(protocol, rng, old, labels)] = TRAIN
    return flags


def _from_files(words: list[str], names: pa.Array | None, n: int) -> np.ndarray:
    if names is None:
        names = pc.cast(pa.array(np.arange(n)), pa.string())
    flags = np.zeros(n, dtype=np.uint8)
    for word in words:
        split_name, equals, uri = word.partition("=")
        if not equals:
            raise DataError(f"split_files takes train=FILE, query=FILE or database=FILE, got {word!r}")
        bit = splits.flag_of(split_name)
        try:
            lines = storage.read_bytes(uri).decode("utf-8-sig").splitlines()
        except (StorageError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the split file {uri}: {error}") from error
        wanted = [line.strip() for line in lines]
        where = pc.index_in(pa.array(wanted, names.type), value_set=names)
        unknown = [i for i, row in enumerate(where.to_pylist()) if row is None and wanted[i]]
        if unknown:
            raise DataError(
                f"{uri} line {unknown[0] + 1}: there is no row named {wanted[unknown[0]]!r} "
                f"({len(unknown):,} such lines; a name looks like {names[0].as_py()!r})"
            )
        flags[where.drop_null().to_numpy()] |= bit
    both = np.flatnonzero((flags & QUERY > 0) & (flags & DATABASE > 0))
    if len(both):
        raise DataError(
            f"{len(both):,} rows are query and database at once, the first is {names[both[0]].as_py()!r}; "
            "a query in the database finds itself: take it out of one of the files"
        )
    return flags


def _check(flags: np.ndarray, labels: pa.Array | None) -> None:
    """A labelled training set must hold a similar pair, or there is nothing to learn."""
    train = np.flatnonzero(flags & TRAIN)
    if labels is None or len(train) == 0 or labels.null_count == len(labels):
        return
    of_train = labels.take(pa.array(train)).flatten().to_numpy()
    if len(of_train) == 0 or np.bincount(of_train).max() < 2:
        raise DataError(
            f"no two of the {len(train):,} training images share a label, so there is no similar pair to "
            "learn from; take more training images, or check that the labels are classes and not ids"
        )
