"""BinaryIndex: search packed codes by Hamming distance.

>>> import numpy as np
>>> codes = np.array([[0b00000000], [0b00000111], [0b11111111], [0b00000001]], dtype=np.uint8)
>>> index = BinaryIndex.from_arrays(codes, ids=[10, 11, 12, 13])
>>> hits = index.search(codes[:1], k=3)
>>> hits.ids.tolist(), hits.distances.tolist()
([[10, 13, 11]], [[0, 1, 3]])
>>> index.search_radius(codes[:1], radius=1)[0].ids.tolist()
[10, 13]

Results are ordered by (distance, id), always. An index that was saved or loaded lives in its
folder: ``add``, ``remove``, ``compact`` and ``tune`` are on disk when they return, each as one new
``version``. Any number of threads may search while another updates.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.codes import check_codes
from hashnet.errors import IndexMismatch, StaleIndex, Unsupported
from hashnet.index import files, gpu, tuning
from hashnet.index.artefact import IndexArtefact
from hashnet.index.build import CodeBlock, IndexSpec, build_snapshot, read_code_blocks
from hashnet.index.filters import parse_where
from hashnet.index.kinds import KINDS
from hashnet.index.snapshot import Snapshot
from hashnet.index.validation import (
    check_excluded,
    check_ids,
    check_labels,
    check_queries,
    check_search_size,
    check_width,
    refuse_empty,
)
from hashnet.io import as_array, check_whole, storage
from hashnet.kernels import default_threads, merge_hits, merge_top_k, warm_up
from hashnet.results import SearchResult

if TYPE_CHECKING:
    from hashnet.store import CodeStore

ENGINES = ("auto", "faiss", "kernel")
KERNEL_BITS = 256  # up to here our kernel is the faster one (tests/bench/index.py)

log = logging.getLogger(__name__)


class BinaryIndex:
    """An index over codes of ``n_bits`` bits with int64 ids >= 0. Build, load, search, update."""

    def __init__(
        self, state: Snapshot, *, engine: str = "auto", device: str = "cpu", path: str | None = None
    ) -> None:
        """Use ``build``, ``from_arrays`` or ``load``."""
        if engine not in ENGINES:
            raise Unsupported(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        if device not in ("cpu", "cuda"):
            raise Unsupported(f"device must be cpu or cuda, got {device!r}")
        self._state = state
        self._path = path
        self._writing = threading.RLock()
        self.engine = engine if engine != "auto" else _engine_for(state.n_bits)
        self.device = "cpu"
        self._gpu: gpu.GpuFlat | None = None
        if device == "cuda":
            self._move_to_gpu()
        if self.engine == "kernel":
            warm_up(state.n_bits)
            if KINDS[state.kind].has_kernel and state.n_live:
                self.search(np.zeros((1, state.n_bits // 8), dtype=np.uint8), 1)

    # -- making one

    @classmethod
    def build(
        cls,
        store: CodeStore | str | Path,
        kind: str = "flat",
        *,
        engine: str = "auto",
        device: str = "cpu",
        labels: bool = True,
        **options: Any,
    ) -> BinaryIndex:
        """An index of a CodeStore (or of the one at a path or URI), read shard by shard.

        ``labels=False`` leaves labels out. ``options`` are the kind's: see ``hashnet.index.kinds``.
        """
        from hashnet.store import CodeStore

        source = store if isinstance(store, CodeStore) else CodeStore.open(str(store))
        spec = IndexSpec.of_store(source, kind, options, labels=labels)
        state = build_snapshot(read_code_blocks(source, labels), len(source), spec)
        return cls(state, engine=engine, device=device)

    @classmethod
    def from_arrays(
        cls,
        codes: np.ndarray,
        ids: Any = None,
        kind: str = "flat",
        *,
        labels: Any = None,
        engine: str = "auto",
        device: str = "cpu",
        n_classes: int | None = None,
        lineage: dict[str, Any] | None = None,
        **options: Any,
    ) -> BinaryIndex:
        """An index of ``codes`` uint8 (n, n_bits // 8); ids default to 0..n-1, labels are optional."""
        codes = check_codes(as_array(codes, "codes"))
        given = np.arange(len(codes), dtype=np.int64) if ids is None else check_ids(ids, len(codes))
        classes, rows, n_classes = (
            (None, None, None) if labels is None else check_labels(labels, len(codes), n_classes)
        )
        spec = IndexSpec(codes.shape[1] * 8, kind, options, n_classes, dict(lineage or {}))
        state = build_snapshot([CodeBlock(given, codes, classes, rows)], len(codes), spec)
        return cls(state, engine=engine, device=device)

    @classmethod
    def from_blocks(
        cls, blocks: Iterable[CodeBlock], n: int, spec: IndexSpec, *, engine: str = "auto"
    ) -> BinaryIndex:
        """An index of the ``n`` rows that the blocks hold together, as ``spec`` says."""
        return cls(build_snapshot(blocks, n, spec), engine=engine)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        engine: str = "auto",
        device: str = "cpu",
        mmap: bool = True,
        verify: bool = True,
    ) -> BinaryIndex:
        """The index saved at a path or URI, memory-mapped where FAISS can (flat, ivf).

        ``verify`` compares every file's sha256 first: a changed file is refused, never searched. Without
        it loading is faster, and FAISS may end the process over a file that is damaged.
        """
        folder = _folder(path)
        state = files.read_snapshot(folder, mmap=mmap, verify=verify)
        return cls(state, engine=engine, device=device, path=folder)

    def save(self, path: str | Path) -> int:
        """Writes the index to a folder and goes on living there; returns the version it has there.

        An index already there is replaced by the next version of it, which its readers follow.
        """
        folder = _folder(path)
        with self._writing, files.writer_lock(folder):
            state = self._state
            found = IndexArtefact(folder).version()
            if found and folder == self._path:
                self._refuse_stale(folder)
            else:
                state = state.unsaved()
            state = state.at_version(max(found + 1, state.version))
            self._state = files.write_snapshot(folder, state)
            self._path = folder
            return self._state.version

    # -- searching

    def search(
        self, codes: np.ndarray, k: int = 10, *, where: Any = None, exclude_self: Any = None
    ) -> SearchResult:
        """The k nearest of each query: ids int64 and distances int32, (q, k); -1 in unused slots.

        ``where`` limits what may be found: ids, or {"ids": …, "labels": …} (``hashnet.index.filters``).
        ``exclude_self`` holds the queries' own ids, (q,), where they are indexed items (-1: it is none).
        """
        state = self._state
        queries = check_queries(codes, state)
        k = check_search_size(k, len(queries))
        checked = parse_where(where, state.n_classes)
        exclude = check_excluded(exclude_self, queries, state)
        on_gpu = self._gpu if checked is None else None
        parts = [
            on_gpu.search(segment, queries, k, exclude, self.engine)
            if on_gpu is not None and on_gpu.holds(segment, k)
            else segment.search(queries, k, checked, exclude, self.engine)
            for segment in state.segments
        ]
        ids, distances = merge_top_k([i for i, _ in parts], [d for _, d in parts], k)
        return SearchResult(ids, distances, state.version)

    def search_radius(
        self, codes: np.ndarray, radius: int = 2, *, where: Any = None, exclude_self: Any = None
    ) -> list[SearchResult]:
        """For each query a 1-D SearchResult of everything with distance <= radius."""
        state = self._state
        queries = check_queries(codes, state)
        radius = check_whole("radius", radius, 0, IndexMismatch)
        checked = parse_where(where, state.n_classes)
        exclude = check_excluded(exclude_self, queries, state)
        parts = [s.search_radius(queries, radius, checked, exclude, self.engine) for s in state.segments]
        hits = [of[0] if len(of) == 1 else merge_hits(list(of)) for of in zip(*parts, strict=True)]
        return [SearchResult(ids, distances, state.version) for ids, distances in hits]

    # -- updating

    def add(self, codes: np.ndarray, ids: Any = None, labels: Any = None) -> np.ndarray:
        """Adds codes under new ids (by default those after the largest); returns their ids, int64.

        Nothing is rebuilt: they become a segment of their own.
        """
        with self._writing:
            state = self._state
            codes = check_width(codes, state.n_bits, "the new codes have")
            if ids is None:
                ids = np.arange(len(codes), dtype=np.uint64) + np.uint64(state.next_id())
            ids = check_ids(ids, len(codes), distinct=True)
            pairs = None
            if labels is not None:
                if state.n_classes is None:
                    raise Unsupported("this index was built without labels; add the codes without them")
                pairs = check_labels(labels, len(codes), state.n_classes)[:2]
            if len(ids):
                self._commit(state.added(codes, ids, pairs))
            return ids

    def remove(self, ids: Any) -> None:
        """Removes items; UnknownId (and nothing is removed) where one is not in the index."""
        with self._writing:
            ids = check_ids(ids, distinct=True)
            if len(ids):
                self._commit(self._state.removed(ids))

    def compact(self) -> bool:
        """Merges all segments and drops removed rows for good; False where there was nothing to do."""
        with self._writing:
            compacted = self._state.compacted()
            if compacted is self._state:
                return False
            self._commit(compacted)
            return True

    def tune(self, queries: np.ndarray | None = None, *, recall: float = 0.95, k: int = 10) -> dict[str, Any]:
        """Sets and stores the smallest nprobe of an IVF that reaches ``recall`` on sample queries.

        Without queries, indexed codes with a few bits flipped stand in. See ``hashnet.index.tuning``.
        """
        with self._writing:
            state = self._state
            if queries is not None:
                queries = check_queries(queries, state)
            refuse_empty(state)
            k = check_search_size(k, tuning.SAMPLE if queries is None else len(queries))
            tuned = tuning.tuned_snapshot(state, queries, recall, k)
            self._commit(tuned)
            return dict(tuned.tuned or {})

    def refresh(self) -> bool:
        """Takes over the version on disk if it is another; unchanged segments are not read again."""
        with self._writing:
            if self._path is None or IndexArtefact(self._path).sha256() == self._state.seal:
                return False
            self._take(files.read_snapshot(self._path, known=self._state.segments))
            return True

    def newest(self) -> BinaryIndex:
        """The version on disk as an index of its own where it is another, else this one.

        Unchanged segments are shared. This one stays as it is: for servers that look at a version
        before they take it over.
        """
        with self._writing:
            if self._path is None or IndexArtefact(self._path).sha256() == self._state.seal:
                return self
            state = files.read_snapshot(self._path, known=self._state.segments)
            newest = BinaryIndex(state, engine=self.engine, path=self._path)
            newest.device, newest._gpu = self.device, self._gpu
            newest._take(state)
            return newest

    # -- looking

    def __len__(self) -> int:
        return self._state.n_live

    @property
    def n_bits(self) -> int:
        return self._state.n_bits

    @property
    def kind(self) -> str:
        return self._state.kind

    @property
    def n_classes(self) -> int | None:
        """How many label classes it knows; None for an index without labels."""
        return self._state.n_classes

    @property
    def lineage(self) -> dict[str, Any]:
        """Where the codes come from: model sha256, code store, bit order …"""
        return dict(self._state.lineage)

    @property
    def version(self) -> int:
        """Grows by one with every update; every result carries it."""
        return self._state.version

    @property
    def path(self) -> str | None:
        """The folder it lives in; None while it is only in memory."""
        return self._path

    def disk_version(self) -> int:
        """The version on disk, by reading one small file: newer than ``version`` → ``refresh()``."""
        return IndexArtefact(self._path).version() if self._path is not None else self.version

    def ids(self) -> np.ndarray:
        """All ids, ascending int64."""
        return self._state.ids()

    def contains(self, ids: Any) -> np.ndarray:
        """bool (n,): whether the index holds each id."""
        return self._state.contains(check_ids(ids))

    def codes(self, ids: Any) -> np.ndarray:
        """The codes of these ids, uint8 (n, n_bits // 8); UnknownId where one is not here."""
        return self._state.codes_of(check_ids(ids))

    def labels(self, ids: Any) -> list[list[int]] | None:
        """The label ids of each of these ids; None for an index without labels. UnknownId as in ``codes``."""
        return self._state.labels_of(check_ids(ids))

    def describe(self) -> dict[str, Any]:
        """What it is and how it searches, as plain JSON-able values."""
        about = self._state.describe()
        return about | {
            "engine": self.engine,
            "device": self.device,
            "threads": default_threads(),
            "path": self._path,
        }

    def __repr__(self) -> str:
        return f"BinaryIndex({self.kind}, {len(self):,} x {self.n_bits} bits, version {self.version})"

    # -- inside

    def _commit(self, state: Snapshot) -> None:
        if self._path is not None:
            with files.writer_lock(self._path):
                self._refuse_stale(self._path)
                state = files.write_snapshot(self._path, state)
        self._take(state)

    def _take(self, state: Snapshot) -> None:
        """Searches from here on see this state; a GPU is sent the main rows where it lacks them."""
        self._state = state
        if self._gpu is not None and state.segments and state.segments[0].rows is not self._gpu.rows:
            self._move_to_gpu()

    def _refuse_stale(self, folder: str) -> None:
        if IndexArtefact(folder).sha256() != self._state.seal:
            on_disk = IndexArtefact(folder).version()
            which = f"another {self.version}" if on_disk == self.version else self.version
            raise StaleIndex(
                f"{folder} is at version {on_disk}, this index at {which}: somebody else wrote it; "
                "call refresh() and repeat the update"
            )

    def _move_to_gpu(self) -> None:
        missing = gpu.why_not(self._state)
        if missing is not None:
            log.warning("device=cuda: %s; searching on the CPU", missing)
            self.device, self._gpu = "cpu", None
            return
        self.device, self._gpu = "cuda", gpu.GpuFlat(self._state.segments[0].rows)


def _folder(path: str | Path) -> str:
    """One spelling of each folder: absolute, no slash at the end."""
    return storage.join(storage.absolute(str(path)))


def _engine_for(n_bits: int) -> str:
    return "kernel" if n_bits <= KERNEL_BITS else "faiss"
