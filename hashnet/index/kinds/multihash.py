"""multihash: hash tables over parts of the code. Radius search by lookup, everything else through flat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from hashnet.errors import IndexMismatch
from hashnet.index.faiss_search import split_hits
from hashnet.index.rows import Selection, StoredRows, codes_in, with_ids
from hashnet.index.segment import IndexKind, KindOptions, Segment, option


@dataclass(frozen=True)
class MultihashOptions(KindOptions):
    """``nhash`` tables over ``bits`` bits each (0: by code length); lookups flip up to ``nflip`` bits."""

    nhash: int = option(0, "tables (none: n_bits / 16, at least 3)", low=1)
    bits: int = option(0, "bits per table (none: n_bits / nhash, at most 16)", low=1)
    nflip: int = option(0, "bits flipped in a lookup (none: 0)")

    @property
    def max_radius(self) -> int:
        """Two codes this near agree within nflip bits in at least one table (pigeonhole)."""
        return self.nhash * (self.nflip + 1) - 1


class Multihash(IndexKind):
    name = "multihash"
    summary = "exact, and faster within a small radius"
    options = MultihashOptions
    faiss_class = faiss.IndexBinaryMultiHash

    def complete(self, options: MultihashOptions, n_bits: int, n: int) -> MultihashOptions:
        nhash = options.nhash or (max(1, n_bits // options.bits) if options.bits else max(3, n_bits // 16))
        bits = options.bits or max(1, min(16, n_bits // nhash))
        if not 1 <= bits <= 32 or nhash * bits > n_bits:
            raise IndexMismatch(
                f"{nhash} tables of {bits} bits do not fit into {n_bits} bits; choose bits of at most 32 and "
                f"nhash x bits of at most {n_bits}"
            )
        if options.nflip > min(bits, 3):  # lookups grow as bits over nflip
            raise IndexMismatch(f"nflip must be at most {min(bits, 3)} here, got {options.nflip}")
        return dataclasses.replace(options, nhash=nhash, bits=bits)

    def build(
        self, options: MultihashOptions, flat: Any, ids: np.ndarray | None, centroids: np.ndarray | None
    ) -> Any:
        index = faiss.IndexBinaryMultiHash(flat.d, options.nhash, options.bits)
        index.nflip = options.nflip
        return with_ids(index, codes_in(flat), ids)

    def check_opened(self, rows: StoredRows, options: MultihashOptions, where: str) -> None:
        """Refills the tables if the file lost one: a table whose rows all lie in one bucket.

        FAISS stores a bucket's size in as many bits as an id takes: of 2**m rows, m bits, where 2**m
        reads as 0. Filling always would take ten times as long as reading.
        """
        if rows.n & (rows.n - 1):
            return
        codes, tables = rows.codes.copy(), rows.inner  # the view goes with what is reset
        differ = np.bitwise_or.reduce(codes, axis=0) ^ np.bitwise_and.reduce(codes, axis=0)
        hashed = np.unpackbits(differ, bitorder="little")[: tables.nhash * tables.b]
        if hashed.reshape(tables.nhash, tables.b).any(axis=1).all():
            return
        del rows.codes
        tables.reset()
        tables.add(codes)

    def search_radius(
        self, segment: Segment, queries: np.ndarray, radius: int, only: Selection | None, engine: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """By hash where the tables find everything, else by comparing every code."""
        options, rows = segment.options, segment.rows
        assert isinstance(options, MultihashOptions)
        if radius > options.max_radius or not len(queries):
            return segment.exact_search_radius(queries, radius, only, engine)
        limits, distances, found = rows.inner.range_search(queries, min(radius, rows.n_bits) + 1)
        kept = None if only is None else only.mask[found] == 1
        return split_hits(limits, distances, rows.ids_at(found), kept)

    def describe(self, options: MultihashOptions) -> dict[str, int]:
        return {"max_hash_radius": options.max_radius}
