"""IndexKind: what a kind of index says about itself; and flat, which is all of its defaults."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import faiss
import numpy as np
import pyarrow as pa

from hashnet.errors import FormatError
from hashnet.index.rows import Postings, StoredRows, new_flat, with_flat_ids

if TYPE_CHECKING:
    from hashnet.index.rows import Selection
    from hashnet.index.segment import Segment


@dataclass(frozen=True)
class KindOptions:
    """KindOptions of a kind: whole numbers >= 0. The default 0 of some means "choose by size"."""


def option(default: int, meaning: str, low: int = 0) -> Any:
    """A field of an options class; the build_index job has a key of this name, help and lower limit."""
    return dataclasses.field(default=default, metadata={"help": meaning, "low": low})


class IndexKind(ABC):
    """One kind of index. Stateless: what it works on is passed in."""

    name: ClassVar[str]
    options: ClassVar[type[KindOptions]]
    faiss_class: ClassVar[type]
    exact: ClassVar[bool] = True  # whether k-NN search is
    map_flags: ClassVar[int] = 0  # of faiss.read_index_binary, for the kinds FAISS can memory-map
    rows_class: ClassVar[type[StoredRows]] = StoredRows
    has_kernel: ClassVar[bool] = False  # whether it has a compiled kernel that no other kind uses
    scans_selections: ClassVar[bool] = (
        False  # whether it searches ``where=`` itself; else every code is compared
    )

    def complete(self, options: Any, n_bits: int, n: int) -> Any:
        """``options`` with those left open filled in for n codes; IndexMismatch where they do not fit."""
        return options

    @abstractmethod
    def build(
        self, options: Any, codes: np.ndarray, ids: np.ndarray | None, centroids: np.ndarray | None = None
    ) -> Any:
        """The FAISS index of ``codes`` uint8 (n, n_bits // 8) in ascending id order; ids None are 0..n-1.

        ``centroids`` are what ``kept_centroids`` said of the rows it replaces.
        """

    def rows(
        self,
        index: Any,
        postings: Postings | None = None,
        columns: pa.Table | None = None,
        *,
        mapped: bool = False,
    ) -> StoredRows:
        """The rows inside a FAISS index of this kind; FormatError where it is of another."""
        rows = self.rows_class(index, self.name, postings, columns, mapped=mapped)
        if not isinstance(rows.inner, self.faiss_class):
            raise FormatError(f"this is not a {self.name} index but {type(rows.inner).__name__}")
        return rows

    def check_opened(self, rows: Any, options: Any, where: str) -> None:  # noqa: B027 - most need none
        """Checks or repairs rows that were just read from the file ``where``."""

    def kept_centroids(self, rows: Any) -> np.ndarray | None:
        """What a compacted index takes over from these rows, so that its tuning stays true; or None."""
        return None

    def search(
        self, segment: Segment, queries: np.ndarray, k: int, only: Selection | None, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k) of the selected rows, ordered by (distance, id)."""
        return segment.exact_search(queries, k, only, engine)

    def search_radius(
        self, segment: Segment, queries: np.ndarray, radius: int, only: Selection | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query (ids, distances) within the radius, ordered by (distance, id)."""
        return segment.exact_search_radius(queries, radius, only, engine)

    def describe(self, options: Any) -> dict[str, int]:
        """Further facts for ``BinaryIndex.describe()``."""
        return {}


def with_ids(index: Any, codes: np.ndarray, ids: np.ndarray | None) -> Any:
    """``index`` filled with codes; inside an IDMap where ids are not 0..n-1."""
    if ids is None:
        index.add(codes)
        return index
    mapped = faiss.IndexBinaryIDMap(index)
    mapped.add_with_ids(codes, ids)
    return mapped


@dataclass(frozen=True)
class FlatOptions(KindOptions):
    """Exact search needs none."""


class Flat(IndexKind):
    """Every code is compared. Exact, memory-mapped, and the yardstick of the other kinds."""

    name = "flat"
    options = FlatOptions
    faiss_class = faiss.IndexBinaryFlat
    map_flags = faiss.IO_FLAG_MMAP_IFC

    def build(
        self,
        options: FlatOptions,
        codes: np.ndarray,
        ids: np.ndarray | None,
        centroids: np.ndarray | None = None,
    ) -> Any:
        flat, room = new_flat(codes.shape[1] * 8, len(codes))
        room[:] = codes
        return with_flat_ids(flat, ids)
