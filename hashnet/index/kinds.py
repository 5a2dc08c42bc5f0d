"""The four kinds of index: their options, and how each is built from rows in id order.

| kind      | k-NN                        | radius                              | filter |
|-----------|-----------------------------|-------------------------------------|--------|
| flat      | exact                       | exact                               | exact  |
| ivf       | the nprobe nearest lists    | the nprobe nearest lists            | no     |
| multihash | exact, through flat         | exact; by hash up to ``max_radius`` | exact  |
| hnsw      | graph walk                  | exact, through flat                 | exact  |
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from hashnet.errors import IndexMismatch, Unsupported
from hashnet.index.postings import Postings
from hashnet.index.rows import Rows, flat_rows, new_flat
from hashnet.io import check_whole
from hashnet.kernels import top_k

MAX_OPTION = 2**31 - 2  # FAISS keeps options, and seed + 1, as C ints
MAX_NEIGHBOURS = 1024  # links take 8 bytes each a row: more of them only cost memory
TRAIN_PER_LIST = 64  # codes k-means sees per list: enough for balanced lists, and fast


@dataclass(frozen=True)
class FlatOptions:
    """Exact search needs none."""


@dataclass(frozen=True)
class IvfOptions:
    """``nlist`` lists (0: about the square root of n), ``nprobe`` of them are scanned (0: nlist / 64)."""

    nlist: int = 0
    nprobe: int = 0
    seed: int = 0


@dataclass(frozen=True)
class MultihashOptions:
    """``nhash`` tables over ``bits`` bits each (0: by code length); lookups flip up to ``nflip`` bits."""

    nhash: int = 0
    bits: int = 0
    nflip: int = 0

    @property
    def max_radius(self) -> int:
        """Two codes this near agree within nflip bits in at least one table (pigeonhole)."""
        return self.nhash * (self.nflip + 1) - 1


@dataclass(frozen=True)
class HnswOptions:
    """``neighbours`` links a node, breadth of the walk when building and when searching."""

    neighbours: int = 32
    ef_construction: int = 80
    ef_search: int = 128


Options = FlatOptions | IvfOptions | MultihashOptions | HnswOptions
OPTIONS: dict[str, type] = {
    "flat": FlatOptions,
    "ivf": IvfOptions,
    "multihash": MultihashOptions,
    "hnsw": HnswOptions,
}
KINDS = tuple(OPTIONS)


def parse_options(kind: str, values: dict[str, Any], n_bits: int, n: int) -> Options:
    """Checked options of a kind, with the zeros that mean "choose" filled in for n codes."""
    if not isinstance(kind, str) or kind not in KINDS:
        got = repr(kind) if isinstance(kind, str) else type(kind).__name__  # labels, given as the third
        raise Unsupported(f"kind must be one of {', '.join(KINDS)}, got {got}")
    known = [field.name for field in dataclasses.fields(OPTIONS[kind])]
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise Unsupported(f"a {kind} index has no option {name!r}; {hint}")
        check_whole(name, value, 0, IndexMismatch)
        if value > MAX_OPTION:
            raise IndexMismatch(f"{name} must be at most {MAX_OPTION}, got {value}")
    options = OPTIONS[kind](**{name: int(value) for name, value in values.items()})
    if kind == "ivf":
        nlist = min(options.nlist or _default_lists(n), max(1, n))
        nprobe = min(options.nprobe or max(1, nlist // 64), nlist)
        return dataclasses.replace(options, nlist=nlist, nprobe=nprobe)
    if kind == "multihash":
        return _hash_options(options, n_bits)
    if kind == "hnsw" and not (
        2 <= options.neighbours <= MAX_NEIGHBOURS and options.ef_construction and options.ef_search
    ):
        raise IndexMismatch(
            f"hnsw needs neighbours >= 2 and <= {MAX_NEIGHBOURS}, ef_construction >= 1 and ef_search >= 1"
        )
    return options


def _default_lists(n: int) -> int:
    """The power of two near sqrt(n), with 39 codes a list or more, as k-means wants."""
    return max(1, min(2 ** round(math.log2(max(1.0, math.sqrt(n)))), n // 39))


def _hash_options(options: MultihashOptions, n_bits: int) -> MultihashOptions:
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


def build_rows(
    kind: str,
    options: Options,
    codes: np.ndarray,
    ids: np.ndarray | None,
    postings: Postings | None = None,
    *,
    centroids: np.ndarray | None = None,
) -> Rows:
    """Rows of a kind from ``codes`` uint8 (n, n_bits // 8) in ascending id order; ids None are 0..n-1.

    ``centroids`` reuses the lists of an earlier IVF instead of running k-means.
    """
    n_bits = codes.shape[1] * 8
    if isinstance(options, IvfOptions):
        ids = np.arange(len(codes), dtype=np.int64) if ids is None else ids
        return Rows(_build_ivf(options, codes, ids, centroids), kind, postings)
    if isinstance(options, FlatOptions):
        flat, room = new_flat(n_bits, len(codes))
        room[:] = codes
        return flat_rows(flat, ids, postings)
    if isinstance(options, MultihashOptions):
        inner = faiss.IndexBinaryMultiHash(n_bits, options.nhash, options.bits)
        inner.nflip = options.nflip
    else:
        inner = faiss.IndexBinaryHNSW(n_bits, options.neighbours)
        inner.hnsw.efConstruction = options.ef_construction
        inner.hnsw.efSearch = options.ef_search
    if ids is None:
        inner.add(codes)
        return Rows(inner, kind, postings)
    index = faiss.IndexBinaryIDMap(inner)
    index.add_with_ids(codes, ids)
    return Rows(index, kind, postings)


def train_centroids(codes: np.ndarray, nlist: int, seed: int) -> np.ndarray:
    """Binary k-means: ``nlist`` codes, uint8 (nlist, n_bits // 8), of a sample of the codes."""
    rng = np.random.default_rng(seed)
    if len(codes) > nlist * TRAIN_PER_LIST:
        codes = codes[np.sort(rng.choice(len(codes), nlist * TRAIN_PER_LIST, replace=False))]
    n_bits = codes.shape[1] * 8
    quantizer = faiss.IndexBinaryFlat(n_bits)
    ivf = faiss.IndexBinaryIVF(quantizer, n_bits, nlist)
    ivf.cp.seed = seed + 1
    ivf.cp.min_points_per_centroid = 1  # small lists are the caller's choice: no warning
    ivf.train(np.ascontiguousarray(codes))
    return faiss.rev_swig_ptr(quantizer.xb.data(), nlist * n_bits // 8).reshape(nlist, -1).copy()


def assign_lists(codes: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest list of each code, int64 (n,); the lowest number wins a tie, as in FAISS."""
    return top_k(centroids, codes, 1)[0][:, 0]


def _build_ivf(options: IvfOptions, codes: np.ndarray, ids: np.ndarray, centroids: np.ndarray | None) -> Any:
    n_bits = codes.shape[1] * 8
    if centroids is None:
        centroids = train_centroids(codes, options.nlist, options.seed)
    quantizer = faiss.IndexBinaryFlat(n_bits)
    quantizer.add(centroids)
    ivf = faiss.IndexBinaryIVF(quantizer, n_bits, len(centroids))
    ivf.own_fields = True  # the quantizer lives as long as the index
    quantizer.this.disown()
    ivf.nprobe = options.nprobe
    step = 1 << 20
    for start in range(0, len(codes), step):  # ascending ids: each list stays in id order
        block = np.ascontiguousarray(codes[start : start + step])
        lists = np.ascontiguousarray(assign_lists(block, centroids))
        block_ids = np.ascontiguousarray(ids[start : start + step], dtype=np.int64)
        ivf.add_core(len(block), faiss.swig_ptr(block), faiss.swig_ptr(block_ids), faiss.swig_ptr(lists))
    return ivf
