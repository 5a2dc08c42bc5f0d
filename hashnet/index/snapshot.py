"""Snapshot: everything an index is at one version, never changed in place.

An update makes a new Snapshot that shares the untouched segments. A search takes the snapshot once and
keeps it, so it never sees half of an update, and any number of threads may search meanwhile.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.errors import IdTaken, UnknownId
from hashnet.index.kinds import KINDS, KindOptions, parse_options
from hashnet.index.segment import Segment
from hashnet.index.stored_rows import Postings


@dataclass(frozen=True, eq=False)
class Snapshot:
    """``segments[0]`` is of the index's kind; what was added since lies in flat segments behind it.

    A segment whose last row is removed goes: without the first, only flat ones are left until ``compacted``.
    """

    kind: str
    n_bits: int
    options: KindOptions
    n_classes: int | None
    lineage: dict[str, Any]
    segments: tuple[Segment, ...]
    version: int = 1
    seal: str | None = None  # of the index.json it was read from or written to, or grew out of
    updates: int = 0  # additions and removals since it was built from its codes
    tuned: dict[str, Any] | None = None

    @property
    def n_live(self) -> int:
        return sum(segment.n_live for segment in self.segments)

    @property
    def n_dead(self) -> int:
        return sum(len(segment.dead) for segment in self.segments)

    def ids(self) -> np.ndarray:
        """All ids, ascending int64."""
        parts = [segment.rows.ids[segment.live_positions] for segment in self.segments]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *parts]))

    def next_id(self) -> int:
        """The number after the largest id its segments hold, removed ones included."""
        return max([0, *(int(s.rows.ids[-1]) + 1 for s in self.segments if len(s.rows))])

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): whether the index holds each id."""
        held = np.zeros(len(ids), dtype=bool)
        for segment in self.segments:
            held |= segment.find(ids) >= 0
        return held

    def codes_of(self, ids: np.ndarray) -> np.ndarray:
        """The codes of these ids, uint8 (n, n_bits // 8); UnknownId where one is not here."""
        codes = np.empty((len(ids), self.n_bits // 8), dtype=np.uint8)
        missing = np.ones(len(ids), dtype=bool)
        for segment in self.segments:
            positions = segment.find(ids)
            here = positions >= 0
            codes[here] = segment.rows.take(positions[here])
            missing &= ~here
        self._refuse_missing(ids, missing)
        return codes

    def labels_of(self, ids: np.ndarray) -> list[list[int]] | None:
        """The labels of each id, ascending; None for an index without labels."""
        if self.n_classes is None:
            return None
        labels: list[list[int]] = [[] for _ in ids]
        missing = np.ones(len(ids), dtype=bool)
        for segment in self.segments:
            positions = segment.find(ids)
            missing &= positions < 0
            if segment.rows.postings is None:
                continue
            here = np.flatnonzero(positions >= 0)
            for i, found in zip(here, segment.rows.postings.labels_at(positions[here]), strict=True):
                labels[i] = found
        self._refuse_missing(ids, missing)
        return labels

    def added(
        self, codes: np.ndarray, ids: np.ndarray, pairs: tuple[np.ndarray, np.ndarray] | None = None
    ) -> Snapshot:
        """With these rows, and their (label, row) pairs, in a new segment.

        Segments before it that are no larger are merged into it: each merge at least doubles a
        segment, so there are never more than about log2(n) of them.
        """
        known = np.flatnonzero(self.contains(ids))
        if len(known):
            raise IdTaken(
                f"id {ids[known[0]]} is in the index already ({len(known)} of {len(ids)} are); "
                "remove them first to replace their codes"
            )
        order = np.argsort(ids, kind="stable")
        postings = None
        if pairs is not None and self.n_classes is not None:
            postings = Postings.from_pairs(pairs[0], np.argsort(order)[pairs[1]], self.n_classes)
        flat = KINDS["flat"]
        new = Segment(
            flat.rows(flat.build(flat.options(), codes[order], ids[order]), postings), flat.options()
        )
        kept = list(self.segments)
        while kept and kept[-1].rows.kind == "flat" and kept[-1].n_live <= new.n_live:
            new = merged([kept.pop(), new], "flat", flat.options(), self.n_classes)
        return self._next(segments=(*kept, new), updates=self.updates + 1)

    def removed(self, ids: np.ndarray) -> Snapshot:
        """Without these ids; UnknownId where one is not here."""
        missing = np.ones(len(ids), dtype=bool)
        segments = []
        for segment in self.segments:
            positions = segment.find(ids)
            missing &= positions < 0
            gone = positions[positions >= 0]
            if len(gone):
                dead = np.union1d(segment.dead, gone)
                segment = dataclasses.replace(segment, dead=dead)
            if segment.n_live:
                segments.append(segment)
        self._refuse_missing(ids, missing)
        return self._next(segments=tuple(segments), updates=self.updates + 1)

    def compacted(self) -> Snapshot:
        """The same items in one segment of the index's kind; itself where there is nothing to do."""
        if not self.segments:
            return self
        base = self.segments[0].rows
        if len(self.segments) == 1 and not self.n_dead and base.kind == self.kind:
            return self
        options, tuned = self.options, self.tuned
        centroids = KINDS[base.kind].kept_centroids(base)
        if centroids is None:  # what suited the old size need not suit the new one
            options = parse_options(self.kind, dataclasses.asdict(self.options), self.n_bits, self.n_live)
            tuned = None
        segment = merged(list(self.segments), self.kind, options, self.n_classes, centroids)
        return self._next(segments=(segment,), options=options, tuned=tuned)

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
            "segments": len(self.segments),
            "removed_rows": self.n_dead,
            "updates": self.updates,
            "memory_mapped": bool(self.segments) and self.segments[0].rows.mapped,
            "lineage": dict(self.lineage),
        }
        about |= KINDS[self.kind].describe(self.options)
        if self.tuned:
            about["tuned"] = dict(self.tuned)
        return about

    def unsaved(self) -> Snapshot:
        """The same, not written anywhere yet."""
        segments = tuple(dataclasses.replace(segment, record=None) for segment in self.segments)
        return dataclasses.replace(self, segments=segments, seal=None)

    def at_version(self, version: int) -> Snapshot:
        return dataclasses.replace(self, version=version)

    def _next(self, **changes: Any) -> Snapshot:
        return dataclasses.replace(self, version=self.version + 1, **changes)

    def refuse_unknown(self, ids: np.ndarray) -> None:
        """UnknownId where the index does not hold one of the ids."""
        self._refuse_missing(ids, ~self.contains(ids))

    def _refuse_missing(self, ids: np.ndarray, missing: np.ndarray) -> None:
        if missing.any():
            first = int(ids[missing][0])
            raise UnknownId(
                f"the index holds no id {first} ({int(missing.sum())} of {len(ids)} ids are unknown; "
                f"it has {self.n_live} items)"
            )


def merged(
    segments: list[Segment],
    kind: str,
    options: KindOptions,
    n_classes: int | None,
    centroids: np.ndarray | None = None,
) -> Segment:
    """One segment of all live rows of several, in id order."""
    ids = np.concatenate([segment.rows.ids[segment.live_positions] for segment in segments])
    codes = np.concatenate([segment.rows.take(segment.live_positions) for segment in segments])
    order = np.argsort(ids, kind="stable")
    place = np.empty(len(order), dtype=np.int64)  # where each row goes
    place[order] = np.arange(len(order))
    labels, rows, start = [], [], 0
    for segment in segments:
        if segment.rows.postings is not None:
            found, row = segment.rows.postings.take(segment.live_positions, len(segment.rows))
            labels.append(found)
            rows.append(place[row + start])
        start += segment.n_live
    postings = None
    if labels and n_classes is not None:
        postings = Postings.from_pairs(np.concatenate(labels), np.concatenate(rows), n_classes)
    ids = ids[order]
    given = None if is_plain_range(ids) else ids
    index = KINDS[kind].build(options, codes[order], given, centroids)
    return Segment(KINDS[kind].rows(index, postings), options)


def is_plain_range(ids: np.ndarray) -> bool:
    """Whether ascending distinct ids are 0..n-1, which need not be stored."""
    return not len(ids) or (int(ids[0]) == 0 and int(ids[-1]) == len(ids) - 1)
