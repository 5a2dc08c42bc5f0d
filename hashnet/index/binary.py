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

import copy
import dataclasses
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hashnet import labels as label_sets
from hashnet.codes import check_codes
from hashnet.errors import IndexMismatch, LineageMismatch, StaleIndex, UnknownId, Unsupported
from hashnet.index import files, tuning
from hashnet.index.artefact import IndexArtefact
from hashnet.index.changelog import CodeBlock
from hashnet.index.faiss_search import GpuFlat, why_no_gpu
from hashnet.index.features import IndexFeatures
from hashnet.index.filters import Where, parse_where
from hashnet.index.kinds import KINDS
from hashnet.index.rows import (
    KEY,
    as_table,
    check_keyed,
    check_names,
    conform,
    refuse_names,
    schema_of,
)
from hashnet.index.search import (
    Request,
    check_dtype,
    check_excluded,
    check_has_features,
    check_ids,
    check_labels,
    check_new_features,
    check_queries,
    check_rescoring,
    check_search_size,
    check_width,
    default_oversample,
    refuse_empty,
    search,
)
from hashnet.index.segment import IndexSpec, read_code_blocks
from hashnet.index.snapshot import Snapshot
from hashnet.io import as_array, check_whole, storage
from hashnet.kernels import default_threads, merge_hits, merge_top_k, top_scores, warm_up
from hashnet.results import SearchResult
from hashnet.store import check_vectors

if TYPE_CHECKING:
    from hashnet.store import CodeStore, FeatureStore

ENGINES = ("auto", "faiss", "kernel")

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
        self.engine = "faiss" if engine == "faiss" else "kernel"
        self.device = "cpu"
        self._gpu: GpuFlat | None = None
        if device == "cuda":
            self._move_to_gpu()
        if self.engine == "kernel":
            warm_up(state.n_bits)
            for n_queries in (1, 8):  # one query may have a kernel of its own
                logits = np.zeros((n_queries, state.n_bits), np.float32)
                top_scores(np.zeros((2, state.n_bits // 8), np.uint8), logits, 1)
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
        state = Snapshot.build(read_code_blocks(source, labels), len(source), spec)
        return cls(state, engine=engine, device=device)

    @classmethod
    def from_arrays(
        cls,
        codes: np.ndarray,
        ids: Any = None,
        kind: str = "flat",
        *,
        labels: Any = None,
        columns: Any = None,
        keys: Any = None,
        features: Any = None,
        features_dtype: str = "float16",
        engine: str = "auto",
        device: str = "cpu",
        n_classes: int | None = None,
        lineage: dict[str, Any] | None = None,
        **options: Any,
    ) -> BinaryIndex:
        """An index of ``codes`` uint8 (n, n_bits // 8); ids default to 0..n-1, the rest is optional.

        ``columns`` is an Arrow table or name → values, for filters and hits; ``keys`` are the items' names, a
        different text for each. ``features`` (n, width) are vectors for rescoring, kept as ``features_dtype``
        float16, int8 or float32.
        """
        codes = check_codes(as_array(codes, "codes"))
        given = np.arange(len(codes), dtype=np.int64) if ids is None else check_ids(ids, len(codes))
        classes, rows, n_classes = (
            (None, None, None) if labels is None else check_labels(labels, len(codes), n_classes)
        )
        table = as_table(columns, keys, len(codes))
        schema = None if table is None else table.schema
        spec = IndexSpec(codes.shape[1] * 8, kind, options, n_classes, dict(lineage or {}), schema)
        state = Snapshot.build([CodeBlock(given, codes, classes, rows, table)], len(codes), spec)
        if features is not None:
            vectors = check_vectors(features, None, "features", len(codes))
            of_items = IndexFeatures.of_arrays(given, vectors, check_dtype(features_dtype))
            state = dataclasses.replace(state, features=of_items)
        return cls(state, engine=engine, device=device)

    @classmethod
    def from_blocks(
        cls, blocks: Iterable[CodeBlock], n: int, spec: IndexSpec, *, engine: str = "auto"
    ) -> BinaryIndex:
        """An index of the ``n`` rows that the blocks hold together, as ``spec`` says."""
        return cls(Snapshot.build(blocks, n, spec), engine=engine)

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
        """Writes the index to a folder, which it lives in from then on; returns its version there.

        An index already there is replaced by the next version of it, which its readers follow.
        """
        folder = _folder(path)
        with self._writing, files.writer_lock(folder):
            return self._save(folder)

    def replace(self, path: str | Path) -> tuple[int, int]:
        """Saves in place of an older build of the same items and keeps the updates that were made to that:
        (items kept, removals kept), as ``merge_updates``.

        On a local disk nobody else can update it during the save, so no update is lost, however late.
        """
        folder = _folder(path)
        kept = gone = np.empty(0, dtype=np.int64)
        with self._writing:
            older = BinaryIndex.load(folder, engine="faiss") if IndexArtefact(folder).exists() else None
            if older is not None and older._state.updates:
                kept, gone = self._merge(older)
            with files.writer_lock(folder):  # few updates arrived during the merge: nobody waits for long
                if IndexArtefact(folder).exists():
                    newest = BinaryIndex.load(folder, engine="faiss") if older is None else older.newest()
                    if newest is not older and newest._state.updates:
                        late, late_gone = self._merge(newest, None if older is None else older._state)
                        gone = np.union1d(gone, np.setdiff1d(late_gone, kept))
                        kept = np.setdiff1d(np.union1d(kept, late), late_gone)
                self._save(folder)
        return len(kept), len(gone)

    def _save(self, folder: str) -> int:
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
        self,
        codes: np.ndarray | None = None,
        k: int = 10,
        *,
        logits: np.ndarray | None = None,
        where: Any = None,
        exclude_self: Any = None,
        oversample: float | None = None,
        rescore: str | None = None,
        features: np.ndarray | None = None,
        metric: str = "cosine",
        columns: Sequence[str] | None = None,
    ) -> SearchResult:
        """The k nearest of each query: ids int64 and distances int32, (q, k); -1 in unused slots.

        ``where`` limits what may be found: a condition such as "year >= 2020", an Arrow expression, ids, or
        {"ids": …, "labels": …, "condition": …} (``hashnet.index.filters``). ``exclude_self`` holds the
        queries' own ids, (q,), where they are indexed items (-1: it is none). ``columns`` names the items'
        columns to return as ``.columns``.

        ``logits`` (q, n_bits) in place of codes rank asymmetrically: the result has ``scores`` float32
        (q, k), <logits, signs of the item>, and is ordered by (score descending, id). Every item is scored
        in an exact kind and in a small index. Else, or with ``oversample``, the k x ``oversample`` nearest
        by Hamming distance are, and the k best of them returned.

        ``rescore="features"`` orders the first k x ``oversample`` items (none: 4, or what ``tune`` found) by
        the ``metric``, cosine or inner_product, of their stored vectors and the queries' own, ``features``
        (q, width): ``scores`` hold it then.
        """
        request = Request(
            codes, k, logits, where, exclude_self, oversample, rescore, features, metric, columns
        )
        return search(self._state, request, self._nearest)

    def _nearest(
        self, state: Snapshot, queries: np.ndarray, k: int, where: Where | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, distances) (q, k) of the nearest by Hamming distance."""
        on_gpu = self._gpu if where is None else None
        parts = [
            on_gpu.search(segment, queries, k, self.engine)
            if on_gpu is not None and on_gpu.holds(segment, k)
            else segment.search(queries, k, where, self.engine)
            for segment in state.segments
        ]
        return merge_top_k([i for i, _ in parts], [d for _, d in parts], k)

    def search_radius(
        self,
        codes: np.ndarray,
        radius: int = 2,
        *,
        where: Any = None,
        exclude_self: Any = None,
        columns: Sequence[str] | None = None,
    ) -> list[SearchResult]:
        """For each query a 1-D SearchResult of all with distance <= radius; the rest as in ``search``."""
        state = self._state
        names = check_names(columns or (), state.schema)
        queries = check_queries(codes, state)
        radius = check_whole("radius", radius, 0, IndexMismatch)
        checked = parse_where(where, state.n_classes, state.schema)
        exclude = check_excluded(exclude_self, queries, state)
        parts = [s.search_radius(queries, radius, checked, self.engine) for s in state.segments]
        hits = [of[0] if len(of) == 1 else merge_hits(list(of)) for of in zip(*parts, strict=True)]
        if exclude is not None:
            others = [ids != own for (ids, _), own in zip(hits, exclude, strict=True)]
            hits = [(ids[kept], far[kept]) for (ids, far), kept in zip(hits, others, strict=True)]
        return [
            SearchResult(
                ids,
                distances,
                state.version,
                columns=None if columns is None else state.columns_of(ids, names),
            )
            for ids, distances in hits
        ]

    # -- updating

    def add(
        self,
        codes: np.ndarray,
        ids: Any = None,
        labels: Any = None,
        *,
        columns: Any = None,
        keys: Any = None,
        features: Any = None,
    ) -> np.ndarray:
        """Adds codes under new ids (by default those after the largest); returns their ids, int64.

        ``columns`` and ``keys`` as in ``from_arrays``; a column left out holds nulls. An index with vectors
        needs ``features``, too. An id or key that the index holds is refused with IdTaken. Nothing is
        rebuilt: the rows become a segment of their own.
        """
        with self._writing:
            state = self._state
            codes = check_width(codes, state.n_bits, "the new codes have")
            ids = state.new_ids(len(codes)) if ids is None else ids
            block = self._block(codes, ids, labels, as_table(columns, keys, len(codes)), features)
            if len(block.ids):
                self._commit(state.added(block))
            return block.ids

    def upsert(
        self,
        codes: np.ndarray,
        ids: Any = None,
        labels: Any = None,
        *,
        columns: Any = None,
        keys: Any = None,
        features: Any = None,
    ) -> np.ndarray:
        """Adds codes in place of the items with the same ids or, without ids, keys; returns their ids.

        A replaced item keeps nothing of the old one but, by key, its id; a new key gets a new id. All of
        it is one new version.
        """
        with self._writing:
            state = self._state
            codes = check_width(codes, state.n_bits, "the new codes have")
            table = as_table(columns, keys, len(codes))
            if ids is None:
                if keys is None:
                    raise IndexMismatch("upsert needs ids or keys: which items are to be replaced?")
                check_keyed(state.schema)
                ids = state.ids_of_keys(table[KEY].combine_chunks())
                ids[ids < 0] = state.new_ids(int((ids < 0).sum()))
            block = self._block(codes, ids, labels, table, features)
            if len(block.ids):
                self._commit(state.upserted(block))
            return block.ids

    def add_columns(self, columns: dict[str, pa.DataType]) -> bool:
        """Gives the items further columns, null in all of them; False where they have every one already.

        The column "key" makes room for keys.
        """
        schema = schema_of(pa.schema(list(columns.items())).empty_table())
        refuse_names(schema)
        with self._writing:
            state = self._state.extended(schema)
            if state is self._state:
                return False
            self._commit(state)
            return True

    def _block(
        self, codes: np.ndarray, ids: Any, labels: Any, table: pa.Table | None, features: Any
    ) -> CodeBlock:
        """Rows to add, checked."""
        state = self._state
        ids = check_ids(ids, len(codes), distinct=True)
        vectors = check_new_features(features, len(codes), state)
        classes = rows = None
        if labels is not None:
            if state.n_classes is None:
                raise Unsupported("this index was built without labels; add the codes without them")
            classes, rows, _ = check_labels(labels, len(codes), state.n_classes)
        return CodeBlock(ids, codes, classes, rows, conform(table, state.schema, len(codes)), vectors)

    def remove(self, ids: Any = None, *, keys: Any = None) -> None:
        """Removes items by ids or keys; UnknownId (and nothing is removed) where one is not in the index."""
        if (ids is None) == (keys is None):
            raise IndexMismatch("remove needs ids or keys, one of them")
        with self._writing:
            ids = check_ids(self.ids_of(keys) if ids is None else ids, distinct=True)
            if len(ids):
                self._commit(self._state.removed(ids))

    @contextmanager
    def transaction(self) -> Iterator[BinaryIndex]:
        """Updates of the index it gives become one new version of this one when the block ends.

        They start from the newest version on disk, and on a local disk nobody else can write. After
        an error in the block nothing is changed.
        """
        with self._writing, nullcontext() if self._path is None else files.writer_lock(self._path):
            self.refresh()
            draft = copy.copy(self)
            draft._path = draft._gpu = None
            yield draft
            if draft._state is not self._state:
                state = draft._state.at_version(self.version + 1)
                self._take(files.commit(self._path, state) if self._path is not None else state)

    def merge_updates(self, updated: BinaryIndex) -> tuple[int, int]:
        """Carries the updates of an older build of the same items over to this one: (items kept, removed).

        What ``updated`` holds and this one does not, or holds with another code, other labels, columns or
        vectors, was added there; what was removed there is removed here. LineageMismatch where it is of
        another model, or did not keep what was removed from it.
        """
        kept, gone = self._merge(updated)
        return len(kept), len(gone)

    def _merge(self, updated: BinaryIndex, known: Snapshot | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The ids of ``merge_updates``. The updates of an earlier version, ``known``, are merged already."""
        updated.refuse_lost_updates(self.lineage.get("model_sha256"), self.n_bits)
        old = updated._state
        changed = self._state.changed_in(old, known)
        assert old.removed_ids is not None
        gone = old.removed_ids[self.contains(old.removed_ids)]
        vectors = labels = None
        if self._state.features is not None and len(changed):
            if old.features is None:
                raise LineageMismatch(
                    f"{len(changed)} items were added to {updated.path} since it was built, without vectors: "
                    "build without features (features=false), or give overwrite=true to drop them"
                )
            vectors = updated.features(changed)
        if self.n_classes is not None and (lists := updated.labels(changed)) is not None:
            labels = label_sets.from_lists(pa.array(lists, pa.list_(pa.int32())), self.n_classes)
        with self.transaction() as draft:
            draft.remove(gone)
            if old.schema is not None:
                draft.add_columns({column.name: column.type for column in old.schema})
            if len(changed):
                draft.upsert(
                    updated.codes(changed),
                    changed,
                    labels,
                    columns=None if old.schema is None else updated.columns(changed),
                    features=vectors,
                )
        return changed, gone

    def refuse_lost_updates(self, model_sha256: str | None, n_bits: int) -> None:
        """LineageMismatch where the updates made to this index cannot be carried over to a build of codes of
        ``n_bits`` bits made with a model."""
        own = self.lineage.get("model_sha256")
        if own != model_sha256:
            reason = f"its codes are of model {str(own)[:12]}…, the new ones of {str(model_sha256)[:12]}…"
        elif self.n_bits != n_bits:
            reason = f"its codes have {self.n_bits} bits, the new ones {n_bits}"
        elif self._state.removed_ids is None:
            reason = "it did not keep which items were removed from it"
        else:
            return
        raise LineageMismatch(
            f"{self.path} was updated {self._state.updates} times after it was built; building it again "
            f"would lose these updates: {reason}; give overwrite=true to drop them, or another out="
        )

    def compact(self) -> bool:
        """Merges all segments and drops removed rows for good; False where there was nothing to do.

        On a local disk, updates by this index and by others continue while it runs.
        """
        if self._path is not None and storage.is_local(self._path):
            compacted = files.compact(self._path, self._state)
            self.refresh()
            return compacted
        with self._writing:
            state = self._state.compacted()
            if state is self._state:
                return False
            self._commit(state)
            return True

    def tune(
        self,
        queries: np.ndarray | None = None,
        *,
        features: np.ndarray | None = None,
        recall: float = 0.95,
        k: int = 10,
        metric: str = "cosine",
    ) -> dict[str, Any]:
        """Sets and stores what reaches ``recall`` on queries: nprobe of an IVF, oversample of rescoring.

        ``features`` are the queries' own vectors. Without queries, indexed items stand in: codes with a few
        bits flipped for nprobe, vectors that may not find themselves for oversample. See
        ``hashnet.index.tuning``.
        """
        state = self._state
        if queries is not None:
            queries = check_queries(queries, state)
        refuse_empty(state)
        vectors = None
        if features is not None:
            n_queries = None if queries is None else len(queries)
            vectors = check_rescoring("features", features, metric, n_queries, state)
        k = check_search_size(k, tuning.SAMPLE if queries is None else len(queries))
        tuned = tuning.tune(state, queries, vectors, recall, k, metric, self._nearest)
        with self.transaction() as draft:  # of the current version: others may have updated the index
            draft._state = tuning.tuned_snapshot(draft._state, tuned)
        return dict(tuned)

    def refresh(self) -> bool:
        """Takes over the version on disk if it is another; unchanged segments are not read again."""
        with self._writing:
            if self._path is None or (state := files.newest_snapshot(self._path, self._state)) is self._state:
                return False
            self._take(state)
            return True

    def newest(self) -> BinaryIndex:
        """The version on disk as an index of its own where it is another, else this one.

        Unchanged segments are shared. This one stays as it is: for servers that look at a version
        before they take it over.
        """
        with self._writing:
            newest = copy.copy(self)
            newest._writing = threading.RLock()
            return newest if newest.refresh() else self

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

    def ids_of(self, keys: Any) -> np.ndarray:
        """The id of each key, int64 (n,); UnknownId where the index holds no such key."""
        names = [keys] if isinstance(keys, str) else list(keys)
        ids = self.find_keys(names)
        if (ids < 0).any():
            first, n = names[int((ids < 0).argmax())], int((ids < 0).sum())
            raise UnknownId(f"the index holds no key {first!r} ({n} of {len(ids)} keys are unknown)")
        return ids

    def find_keys(self, keys: Sequence[str]) -> np.ndarray:
        """The id of each key, int64 (n,); -1 where the index holds no such key."""
        state = self._state
        check_keyed(state.schema)
        return state.ids_of_keys(as_table(None, keys, len(keys))[KEY].combine_chunks())

    def new_ids(self, n: int) -> np.ndarray:
        """The ids that ``n`` codes added without ids would get, int64: those after the largest."""
        return check_ids(self._state.new_ids(n), distinct=True)

    def columns(self, ids: Any, names: Sequence[str] | None = None) -> pa.Table:
        """The columns (all, or those named) of these ids, in order; UnknownId as in ``codes``."""
        state = self._state
        if state.schema is None:
            raise Unsupported("this index was built without columns and keys")
        return state.columns_of(check_ids(ids), check_names(names or state.schema.names, state.schema))

    def features(self, ids: Any) -> np.ndarray:
        """The stored vectors of these ids, float32 (n, width); UnknownId as in ``codes``."""
        state, ids = self._state, check_ids(ids)
        check_has_features(state)
        state.refuse_unknown(ids)
        assert state.features is not None
        return state.features.take(ids)

    def feature_scores(self, vectors: np.ndarray, ids: np.ndarray, metric: str = "cosine") -> np.ndarray:
        """The ``metric`` of vectors (q, width) and those of the items with ids (q, m); -inf for id -1."""
        checked = check_rescoring("features", vectors, metric, len(ids), self._state)
        assert self._state.features is not None
        assert checked is not None
        return self._state.features.scores(checked, ids, metric)

    def attach_features(self, store: FeatureStore | str | Path) -> None:
        """Gives the index the vectors of a feature store, which stays where it is, for rescoring.

        LineageMismatch where it is of another model or other rows; IndexMismatch where an item has no vector.
        """
        from hashnet.store import FeatureStore

        source = store if isinstance(store, FeatureStore) else FeatureStore.open(str(store))
        with self._writing:
            state = self._state
            features = IndexFeatures.of_store(source, state.lineage)
            features.check_ids(state.ids())
            version = state.version + 1
            self._commit(dataclasses.replace(state, features=features, version=version, changes=None))

    @property
    def n_features(self) -> int | None:
        """Values of each item's vector, for rescoring; None for an index without vectors."""
        return None if self._state.features is None else self._state.features.width

    @property
    def oversample(self) -> float | None:
        """Candidates per result that are rescored unless a search says otherwise; None without vectors."""
        return None if self._state.features is None else default_oversample(self._state)

    @property
    def features_model(self) -> str | None:
        """sha256 of the model whose features the vectors are; None for vectors from elsewhere, or none."""
        return None if self._state.features is None else self._state.features.model_sha256

    @property
    def schema(self) -> pa.Schema | None:
        """Names and types of the items' columns, keys as "key"; None for an index without."""
        return self._state.schema

    def describe(self) -> dict[str, Any]:
        """What it is and how it searches, as plain JSON-able values."""
        return self._state.describe() | {
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
                state = files.commit(self._path, state)
        self._take(state)

    def _take(self, state: Snapshot) -> None:
        """Searches from here on see this state; a GPU is sent the main rows where it lacks them."""
        self._state = state
        if self._gpu is not None and state.segments and state.segments[0].rows is not self._gpu.rows:
            self._move_to_gpu()

    def _refuse_stale(self, folder: str) -> None:
        if not files.is_newest(folder, self._state):
            on_disk = IndexArtefact(folder).version()
            which = f"another {self.version}" if on_disk == self.version else self.version
            raise StaleIndex(
                f"{folder} is at version {on_disk}, this index at {which}: another process wrote it; "
                "call refresh() and repeat the update"
            )

    def _move_to_gpu(self) -> None:
        missing = why_no_gpu(self._state)
        if missing is not None:
            log.warning("device=cuda: %s; searching on the CPU", missing)
            self.device, self._gpu = "cpu", None
            return
        self.device, self._gpu = "cuda", GpuFlat(self._state.segments[0].rows)


def _folder(path: str | Path) -> str:
    """One spelling of each folder: absolute, no slash at the end."""
    return storage.join(storage.absolute(str(path)))
