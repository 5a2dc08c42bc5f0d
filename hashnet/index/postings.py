"""Postings: which rows carry which label, small enough to keep beside an index.

>>> import numpy as np
>>> postings = Postings.from_pairs(labels=np.array([0, 0, 1]), rows=np.array([0, 1, 1]), n_classes=2)
>>> postings.rows_with([1]).tolist(), postings.rows_with([0, 1]).tolist()
([1], [0, 1])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.errors import FormatError
from hashnet.io import storage


@dataclass(frozen=True)
class Postings:
    """Pairs (label, row), sorted by both: ``labels`` int32 (m,), ``rows`` int64 (m,)."""

    labels: np.ndarray
    rows: np.ndarray
    n_classes: int

    @classmethod
    def from_pairs(cls, labels: np.ndarray, rows: np.ndarray, n_classes: int) -> Postings:
        """Of pairs in any order."""
        if len(rows) and not (rows[1:] >= rows[:-1]).all():
            by_row = np.argsort(rows, kind="stable")
            labels, rows = labels[by_row], rows[by_row]
        small = labels.astype(np.uint16) if n_classes <= 1 << 16 else labels  # 16 bits: a radix sort
        order = np.argsort(small, kind="stable")
        sorted_labels = labels[order].astype(np.int32, copy=False)
        return cls(sorted_labels, rows[order].astype(np.int64, copy=False), n_classes)

    def rows_with(self, labels: list[int]) -> np.ndarray:
        """Rows that carry at least one of the labels, ascending int64."""
        starts = np.searchsorted(self.labels, labels, side="left")
        stops = np.searchsorted(self.labels, labels, side="right")
        found = [self.rows[a:b] for a, b in zip(starts, stops, strict=True)]
        if len(found) == 1:
            return found[0]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def labels_at(self, rows: np.ndarray) -> list[list[int]]:
        """The labels of each of these rows, ascending; one pass over all pairs."""
        found = np.isin(self.rows, rows)
        of_row: dict[int, list[int]] = {}
        for row, label in zip(self.rows[found].tolist(), self.labels[found].tolist(), strict=True):
            of_row.setdefault(row, []).append(label)
        return [list(of_row.get(row, ())) for row in rows.tolist()]

    def take(self, rows: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(labels, new rows) of the rows picked: row ``rows[i]`` of the ``n_rows`` becomes row i."""
        renamed = np.full(n_rows, -1, dtype=np.int64)
        renamed[rows] = np.arange(len(rows))
        new = renamed[self.rows]
        kept = new >= 0
        return self.labels[kept], new[kept]

    def write(self, uri: str) -> None:
        table = pa.table({"label": self.labels, "row": self.rows})
        with storage.open_output(uri) as sink:
            pq.write_table(table, sink, compression="zstd")

    @classmethod
    def read(cls, uri: str, n_rows: int, n_classes: int) -> Postings:
        with storage.open_input(uri) as source:
            try:
                table = pq.read_table(source)
                labels, rows = table["label"].to_numpy(), table["row"].to_numpy()
            except (pa.ArrowException, KeyError) as error:
                raise FormatError(f"{uri} does not hold labels of an index: {error}") from error
        if len(rows) and (rows.min() < 0 or rows.max() >= n_rows or labels.min() < 0):
            raise FormatError(f"{uri} names rows or labels that do not exist")
        return cls(labels, rows, n_classes)
