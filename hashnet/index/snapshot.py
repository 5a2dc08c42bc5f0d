"""Snapshot: everything an index is at one version, never changed in place.

An update makes a new Snapshot that shares the untouched segments. A search takes the snapshot once and
keeps it, so it never sees half of an update, and any number of threads may search at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.errors import DataError, IdTaken, IndexMismatch, UnknownId
from hashnet.index.changelog import Change, CodeBlock, LogEnd, RemovedIds
from hashnet.index.features import IndexFeatures
from hashnet.index.kinds import KINDS, parse_options
from hashnet.index.rows import KEY, conform
from hashnet.index.segment import IndexSpec, KindOptions, Segment, build_segment, live_block
from hashnet.kernels import score_codes

MAX_GATHERED = 64 << 20  # bytes of candidates' codes scored at once


@dataclass(frozen=True, eq=False)
class Snapshot:
    """``segments[0]`` is of the index's kind; what was added since is in the flat segments after it.

    A segment without rows is dropped: without the first, only flat ones are left until ``compacted``.
    """

    kind: str
    n_bits: int
    options: KindOptions
    n_classes: int | None
    lineage: dict[str, Any]
    segments: tuple[Segment, ...]
    schema: pa.Schema | None = None  # of the items' columns, with string keys as the column "key"
    version: int = 1
    seal: str | None = None  # of the index.json that it was read from, written to or made from by updates
    updates: int = 0  # additions and removals since it was built from its codes
    # Ids removed since then and not added again, ascending int64; None in an index that did not keep them.
    removed_ids: np.ndarray | None = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    removed_ids_file: dict[str, Any] | None = None  # its entry in index.json; None: not written yet
    tuned: dict[str, Any] | None = None
    log: LogEnd | None = None  # of the changes on disk that its segments' files do not hold
    changes: tuple[Change, ...] | None = None  # not on disk yet; None: more than these differs
    features: IndexFeatures | None = None  # vectors of all items, for rescoring; None: without

    @classmethod
    def build(cls, blocks: Iterable[CodeBlock], n: int, spec: IndexSpec) -> Snapshot:
        """The first version of an index of the ``n`` rows that the blocks hold together."""
        if n == 0:
            raise DataError("there are no codes to index: the input has 0 rows; encode some first")
        options = parse_options(spec.kind, spec.options, spec.n_bits, n)
        segment = build_segment(
            blocks,
            n,
            KINDS[spec.kind],
            options,
            n_bits=spec.n_bits,
            n_classes=spec.n_classes,
            schema=spec.schema,
        )
        lineage = dict(spec.lineage)
        return cls(spec.kind, spec.n_bits, options, spec.n_classes, lineage, (segment,), spec.schema)

    @property
    def n_live(self) -> int:
        return sum(segment.n_live for segment in self.segments)

    @property
    def n_dead(self) -> int:
        return sum(len(segment.dead) for segment in self.segments)

    def ids(self, without: Iterable[Segment] = ()) -> np.ndarray:
        """All ids, ascending int64; not those of rows that the segments in ``without`` have."""
        known = {id(segment.rows) for segment in without}
        segments = [segment for segment in self.segments if id(segment.rows) not in known]
        parts = [segment.rows.ids[segment.live_positions] for segment in segments]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *parts]))

    def new_ids(self, n: int) -> np.ndarray:
        """The ``n`` numbers after the largest id its segments hold, removed ones included; uint64."""
        first = max([0, *(int(s.rows.ids[-1]) + 1 for s in self.segments if len(s.rows))])
        return np.arange(n, dtype=np.uint64) + np.uint64(first)

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): whether the index holds each id."""
        held = np.zeros(len(ids), dtype=bool)
        for segment in self.segments:
            held |= segment.find(ids) >= 0
        return held

    def codes_of(self, ids: np.ndarray) -> np.ndarray:
        """The codes of these ids, uint8 (n, n_bits // 8); UnknownId where one is not here."""
        codes = np.empty((len(ids), self.n_bits // 8), dtype=np.uint8)
        for segment, here, positions in self._located(ids):
            codes[here] = segment.rows.take(positions)
        return codes

    def distances(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Hamming distances int32 (q, k) of queries uint8 (q, n_bits // 8) to ids (q, k); -1 for id -1."""
        codes = self._codes_at(ids)
        far = np.bitwise_count(codes ^ queries[:, None, :]).sum(axis=2, dtype=np.int32)
        return np.where(ids >= 0, far, -1)

    def scores(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """float32 (q, m): <logits (q, n_bits), signs> of the items with ids (q, m); -inf for id -1."""
        scores = np.full(ids.shape, -np.inf, dtype=np.float32)
        step = max(1, MAX_GATHERED // (ids.shape[1] * self.n_bits // 8))
        for start in range(0, len(ids), step):
            some = slice(start, start + step)
            scores[some] = score_codes(self._codes_at(ids[some]), logits[some])
        scores[ids < 0] = -np.inf
        return scores

    def _codes_at(self, ids: np.ndarray) -> np.ndarray:
        """Codes uint8 (q, k, n_bits // 8) of ids (q, k); zeros for id -1."""
        codes = np.zeros((*ids.shape, self.n_bits // 8), dtype=np.uint8)
        codes[ids >= 0] = self.codes_of(ids[ids >= 0])
        return codes

    def columns_of(self, ids: np.ndarray, names: list[str]) -> pa.Table:
        """Columns of these ids, in order; nulls for id -1. UnknownId where one is not here."""
        assert self.schema is not None
        schema = pa.schema([self.schema.field(name) for name in names])
        places = np.full(len(ids), -1, dtype=np.int64)  # where each id lies in the parts together
        parts: list[pa.Table] = []
        for segment, here, positions in self._located(ids):
            assert segment.rows.columns is not None
            places[here] = sum(len(part) for part in parts) + np.arange(len(here))
            parts.append(segment.rows.columns.select(names).take(pa.array(positions)))
        found = pa.concat_tables([*parts, schema.empty_table()])
        return found.take(pa.array(places, mask=places < 0))

    def ids_of_keys(self, keys: pa.Array) -> np.ndarray:
        """The id of each key, int64; -1 where the index does not hold it."""
        ids = np.full(len(keys), -1, dtype=np.int64)
        for segment in self.segments:
            positions = segment.find_keys(keys)
            ids = np.where(positions >= 0, segment.rows.ids_at(positions), ids)
        return ids

    def _refuse_known_keys(self, columns: pa.Table | None) -> None:
        if columns is None or KEY not in columns.schema.names:
            return
        keys = columns[KEY].drop_null().combine_chunks()
        known = np.flatnonzero(self.ids_of_keys(keys) >= 0)
        if len(known):
            key = keys[int(known[0])].as_py()
            raise IdTaken(
                f"key {key!r} is in the index already ({len(known)} of {len(keys)} are); upsert replaces them"
            )

    def labels_of(self, ids: np.ndarray) -> list[list[int]] | None:
        """The labels of each id, ascending; None for an index without labels."""
        if self.n_classes is None:
            return None
        labels: list[list[int]] = [[] for _ in ids]
        for segment, here, positions in self._located(ids):
            if segment.rows.postings is not None:
                for i, found in zip(here, segment.rows.postings.labels_at(positions), strict=True):
                    labels[i] = found
        return labels

    def added(self, block: CodeBlock) -> Snapshot:
        """With these rows in a new segment, and their vectors where it has any.

        Segments before it that are no larger are merged into it: each merge at least doubles a
        segment, so there are never more than about log2(n) of them.
        """
        known = np.flatnonzero(self.contains(block.ids))
        if len(known):
            raise IdTaken(
                f"id {block.ids[known[0]]} is in the index already ({len(known)} of {len(block.ids)} are); "
                "upsert replaces them"
            )
        self._refuse_known_keys(block.columns)
        blocks, kept = [block], list(self.segments)
        size = len(block.ids)
        while kept and kept[-1].rows.kind.name == "flat" and kept[-1].n_live <= size:
            size += kept[-1].n_live
            blocks.append(live_block(kept.pop()))
        new = self._merged(blocks, "flat", KINDS["flat"].options())
        fields = self._removed_ids(np.setdiff1d, block.ids)
        if self.features is not None:
            if block.vectors is None:
                raise IndexMismatch(f"id {block.ids[0]} comes without a vector; every item here has one")
            fields["features"] = self.features.added(block.ids, block.vectors)
        return self._next(block, segments=(*kept, new), **fields)

    def upserted(self, block: CodeBlock) -> Snapshot:
        """With these rows in place of those with the same ids: one new version."""
        known = block.ids[self.contains(block.ids)]
        without = self.removed(known) if len(known) else self
        return dataclasses.replace(without.added(block), version=self.version + 1, updates=self.updates + 1)

    def removed(self, ids: np.ndarray) -> Snapshot:
        """Without these ids; UnknownId where one is not here."""
        segments = []
        for segment, _, gone in self._located(ids):
            if len(gone):
                segment = dataclasses.replace(segment, dead=np.union1d(segment.dead, gone))
            if segment.n_live:
                segments.append(segment)
        gone_ids = self._removed_ids(np.union1d, ids)
        return self._next(RemovedIds(ids), segments=tuple(segments), **gone_ids)

    def extended(self, schema: pa.Schema) -> Snapshot:
        """With these columns in addition, null in every item there is; itself where it has them all."""
        known = () if self.schema is None else self.schema.names
        new = [column for column in schema if column.name not in known]
        if not new:
            return self
        whole = pa.schema([*(self.schema or ()), *new])
        segments = tuple(
            dataclasses.replace(s, rows=s.rows.with_columns(conform(s.rows.columns, whole, len(s.rows))))
            for s in self.segments
        )
        return dataclasses.replace(
            self, version=self.version + 1, schema=whole, segments=segments, changes=None
        )

    def after(self, change: Change) -> Snapshot:
        """With one change made."""
        return self.added(change) if isinstance(change, CodeBlock) else self.removed(change.ids)

    def changed_in(self, updated: Snapshot, known: Snapshot | None = None) -> np.ndarray:
        """Ids, ascending, of the items of ``updated`` that are not here, or not with the same content.

        Segments that an earlier version of it, ``known``, has too are not looked at again.

        Content is the code, and labels, columns and vectors where both have them; a column that is missing
        here holds nulls.
        """
        ids = updated.ids() if known is None else updated.ids(without=known.segments)
        here = self.contains(ids)
        common = ids[here]
        differ = (updated.codes_of(common) != self.codes_of(common)).any(axis=1)
        if self.n_classes is not None and updated.n_classes is not None and len(common):
            differ[_unequal_labels(self, updated, common)] = True
        for name in () if updated.schema is None else updated.schema.names:
            there = updated.columns_of(common, [name])[name]
            has_it = self.schema is not None and name in self.schema.names
            mine = self.columns_of(common, [name])[name] if has_it else pa.nulls(len(common), there.type)
            differ |= _unequal(there, mine)
        if self.features is not None and updated.features is not None:
            added = np.flatnonzero(updated.features.in_layers(common))
            vectors = (one.features.take(common[added]) for one in (self, updated))  # type: ignore[union-attr]
            differ[added] |= np.not_equal(*vectors).any(axis=1)
        return np.union1d(ids[~here], common[differ])

    def label_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) of every label of every item."""
        ids, labels = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)]
        for segment in self.segments:
            if segment.rows.postings is not None:
                live = segment.live_positions
                of_rows, rows = segment.rows.postings.take(live, len(segment.rows))
                ids.append(segment.rows.ids[live][rows])
                labels.append(of_rows)
        return np.concatenate(ids), np.concatenate(labels)

    def _removed_ids(self, change: Callable[[Any, Any], np.ndarray], ids: np.ndarray) -> dict[str, Any]:
        """What ``removed_ids`` become when these ids join or leave them."""
        known = self.removed_ids
        if known is None or (change is np.setdiff1d and not _any_of(known, ids)):
            return {}
        changed = change(known, ids)
        return {"removed_ids": changed, "removed_ids_file": None} if len(changed) != len(known) else {}

    @property
    def is_compact(self) -> bool:
        """Whether all rows are in one segment of the index's kind, none of them removed."""
        if not self.segments:
            return True
        return len(self.segments) == 1 and not self.n_dead and self.segments[0].rows.kind.name == self.kind

    def compacted(self) -> Snapshot:
        """The same items in one segment of the index's kind; itself where there is nothing to do."""
        if self.is_compact:
            return self
        base = self.segments[0].rows
        options, tuned = self.options, self.tuned
        centroids = base.kind.kept_centroids(base)
        if centroids is None:  # what suited the old size need not suit the new one
            options = parse_options(self.kind, dataclasses.asdict(self.options), self.n_bits, self.n_live)
            tuned = None
        segment = self._merged([live_block(s) for s in self.segments], self.kind, options, centroids)
        return dataclasses.replace(
            self, version=self.version + 1, segments=(segment,), options=options, tuned=tuned, changes=None
        )

    def describe(self) -> dict[str, Any]:
        """What it is, as plain JSON-able values."""
        about: dict[str, Any] = {
            "kind": self.kind,
            "n_bits": self.n_bits,
            "rows": self.n_live,
            "version": self.version,
            "exact": KINDS[self.kind].exact,
            "options": dataclasses.asdict(self.options),
            "n_classes": self.n_classes,
            "columns": {column.name: str(column.type) for column in self.schema or ()},
            "segments": len(self.segments),
            "added_rows": sum(segment.n_live for segment in self.segments[1:]),
            "removed_rows": self.n_dead,
            "updates": self.updates,
            "memory_mapped": bool(self.segments) and self.segments[0].rows.mapped,
            "lineage": dict(self.lineage),
        }
        about |= KINDS[self.kind].describe(self.options)
        about["features"] = None if self.features is None else self.features.describe()
        if self.tuned:
            about["tuned"] = dict(self.tuned)
        return about

    def unsaved(self) -> Snapshot:
        """The same, not written anywhere yet."""
        segments = tuple(dataclasses.replace(segment, record=None) for segment in self.segments)
        features = None if self.features is None else self.features.unsaved()
        return dataclasses.replace(
            self,
            segments=segments,
            features=features,
            seal=None,
            removed_ids_file=None,
            log=None,
            changes=None,
        )

    def at_version(self, version: int) -> Snapshot:
        return dataclasses.replace(self, version=version)

    def _merged(
        self, blocks: list[CodeBlock], kind: str, options: KindOptions, centroids: np.ndarray | None = None
    ) -> Segment:
        """One segment of several blocks."""
        return build_segment(
            blocks,
            sum(len(block.ids) for block in blocks),
            KINDS[kind],
            options,
            n_bits=self.n_bits,
            n_classes=self.n_classes,
            schema=self.schema,
            centroids=centroids,
        )

    def _next(self, change: Change, **fields: Any) -> Snapshot:
        changes = None if self.changes is None else (*self.changes, change)
        return dataclasses.replace(
            self, version=self.version + 1, updates=self.updates + 1, changes=changes, **fields
        )

    def refuse_unknown(self, ids: np.ndarray) -> None:
        """UnknownId where the index does not hold one of the ids."""
        self._refuse_missing(ids, ~self.contains(ids))

    def _located(self, ids: np.ndarray) -> Iterator[tuple[Segment, np.ndarray, np.ndarray]]:
        """For each segment the places in ``ids`` of those it holds, and their positions in it.

        UnknownId at the end where no segment holds one of the ids; -1 is none.
        """
        missing = ids >= 0
        for segment in self.segments:
            positions = segment.find(ids)
            here = np.flatnonzero(positions >= 0)
            missing[here] = False
            yield segment, here, positions[here]
        self._refuse_missing(ids, missing)

    def _refuse_missing(self, ids: np.ndarray, missing: np.ndarray) -> None:
        if missing.any():
            first = int(ids[missing][0])
            raise UnknownId(
                f"the index holds no id {first} ({int(missing.sum())} of {len(ids)} ids are unknown; "
                f"it has {self.n_live} items)"
            )


def _any_of(ascending: np.ndarray, values: np.ndarray) -> bool:
    """Whether one of the values is among the ascending ones."""
    if not len(ascending):
        return False
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return bool((ascending[places] == values).any())


def _unequal_labels(a: Snapshot, b: Snapshot, ids: np.ndarray) -> np.ndarray:
    """Positions of the ids, which are ascending and in both, that do not have the same labels in both."""
    n_classes, pairs = max(a.n_classes or 0, b.n_classes or 0), []
    for of_ids, labels in (a.label_pairs(), b.label_pairs()):
        places = np.minimum(np.searchsorted(ids, of_ids), len(ids) - 1)
        known = ids[places] == of_ids
        pairs.append(places[known] * n_classes + labels[known])
    return np.setxor1d(*pairs) // n_classes


def _unequal(a: pa.ChunkedArray, b: Any) -> np.ndarray:
    """bool (n,): where two columns differ; nulls equal each other, and so do NaNs."""
    try:
        nan = pa.types.is_floating(a.type)
        both_missing = pc.and_(a.is_null(nan_is_null=nan), b.cast(a.type).is_null(nan_is_null=nan))
        differ = pc.not_equal(a, b).fill_null(True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # of nested types, or of two types
        pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
        return np.fromiter((x != y for x, y in pairs), dtype=bool, count=len(a))
    return pc.and_not(differ, both_missing).to_numpy(zero_copy_only=False)
