"""Class names: a choice of them, and labels given by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.errors import DataError
from hashnet.io import storage

_SYNSET = re.compile(r"n\d{8}\b")


def read_names(words: Sequence[str]) -> list[str]:
    """Class names given one by one, or as one text file with a name a line."""
    if len(words) == 1 and storage.exists(words[0]) and not storage.is_folder(words[0]):
        lines = storage.read_bytes(words[0]).decode("utf-8-sig", errors="replace").splitlines()
        # ImageNet's lists carry a description after the synset: "n01440764 tench, Tinca tinca"
        return [line.split()[0] if _SYNSET.match(line) else line.strip() for line in lines if line.strip()]
    return list(words)


def choose(wanted: Sequence[str], known: Sequence[str], where: str) -> list[str]:
    """``wanted``, in the order of ``known``; DataError names what is unknown and what is near."""
    unknown = [name for name in wanted if name not in set(known)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the first ones there are {', '.join(known[:5])}"
        raise DataError(
            f"{len(unknown)} of {len(wanted)} classes are not in {where}, the first is {unknown[0]!r}; {hint}"
        )
    chosen = set(wanted)
    return [name for name in known if name in chosen]


def by_name(names: pa.Array, classes: Sequence[str] | None = None) -> tuple[pa.Array, list[str]]:
    """One-element label lists of names (n,) and the class names, sorted; a null name has no label."""
    if classes is None:
        classes = sorted(name for name in pc.unique(names).to_pylist() if name is not None)
    ids = pc.index_in(names, value_set=pa.array(classes, names.type))
    return one_each(ids), list(classes)


def one_each(ids: pa.Array) -> pa.Array:
    """Lists list<int32> of one class id each; null where the id is null or negative."""
    ids = ids.cast(pa.int32())
    known = np.asarray(
        pc.fill_null(pc.greater_equal(ids, 0), False).to_numpy(zero_copy_only=False), dtype=bool
    )
    offsets = np.concatenate([[0], np.cumsum(known)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, ids.filter(pa.array(known)))
    return lists if known.all() else pc.if_else(pa.array(known), lists, pa.scalar(None, lists.type))


def class_sets(rows: np.ndarray, classes: np.ndarray, n: int) -> pa.Array:
    """Lists list<int32> (n,) of pairs (row, class) in any order: each class once, ascending."""
    order = np.lexsort((classes, rows))
    rows, classes = rows[order], classes[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]) | (classes[1:] != classes[:-1])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[new], minlength=n))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(classes[new], pa.int32()))


def renumber(labels: pa.Array, old: Sequence[str], new: Sequence[str]) -> pa.Array:
    """Label lists whose ids mean names in ``old``, as ids of ``new``; DataError for names ``new`` lacks."""
    if list(old) == list(new):
        return labels
    used = np.unique(labels.flatten().to_numpy())
    choose([old[i] for i in used], new, "the manifest")
    where = {name: i for i, name in enumerate(new)}
    table = np.array([where.get(name, -1) for name in old], dtype=np.int32)
    lengths = labels.value_lengths().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(len(labels)), lengths)
    return class_sets(rows, table[labels.flatten().to_numpy()], len(labels))
