"""The three sets as bit flags: one uint8 a row in memory, ``splits list<string>`` in a manifest.

>>> import numpy as np
>>> to_lists(np.array([TRAIN | DATABASE, QUERY, 0], dtype=np.uint8)).to_pylist()
[['train', 'database'], ['query'], []]
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from hashnet.errors import DataError

TRAIN, QUERY, DATABASE = 1, 2, 4
FLAGS = {"train": TRAIN, "query": QUERY, "database": DATABASE}
SPLITS = tuple(FLAGS)

_COMBINATIONS = pa.array(
    [[name for name, flag in FLAGS.items() if bits & flag] for bits in range(8)], pa.list_(pa.string())
)


def flag_of(split: str) -> int:
    """The bit of a split's name, or DataError."""
    if split not in FLAGS:
        raise DataError(f"there is no split {split!r}; a row is in some of {', '.join(SPLITS)}")
    return FLAGS[split]


def to_lists(flags: np.ndarray) -> pa.ListArray:
    """Arrow list<string> (n,) of flags uint8 (n,)."""
    return _COMBINATIONS.take(pa.array(flags, pa.uint8()))


def from_lists(lists: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Flags uint8 (n,) of an Arrow list<string>; an unknown name is a DataError."""
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
    """Rows of each split, those with none left out."""
    found = {name: int(np.count_nonzero(flags & flag)) for name, flag in FLAGS.items()}
    return {name: n for name, n in found.items() if n}
