"""The index inside a process, followed from version to version. A plain object; Ray is not needed here."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from hashnet.client import bad
from hashnet.errors import HashnetError, IndexMismatch, LineageMismatch, RequestRejected
from hashnet.results import SearchResult
from hashnet.server.calls import IndexAnswer, IndexAsk, blame

log = logging.getLogger(__name__)

RADIUS_BLOCK = 16  # queries of a radius search between two looks at how much was found


class IndexHolder:
    """One index, followed from version to version. A batch is answered by one version."""

    def __init__(
        self, uri: str, engine: str = "auto", device: str = "cpu", model_sha256: str | None = None
    ) -> None:
        from hashnet.index import BinaryIndex

        self.uri, self.model_sha256 = uri, model_sha256
        self.index = BinaryIndex.load(uri, engine=engine, device=device)
        check_model(self.index.lineage, model_sha256, uri)
        self.refused: str | None = None  # the seal of the version on disk that does not fit the model

    @property
    def version(self) -> int:
        return self.index.version

    def about(self) -> dict[str, Any]:
        """What is known of the index, as plain values."""
        index = self.index
        described = index.describe()
        return {
            "n_bits": index.n_bits,
            "size": len(index),
            "kind": index.kind,
            "engine": described["engine"],
            "version": index.version,
            "n_classes": index.n_classes,
            "lineage": index.lineage,
        }

    def follow(self) -> bool:
        """Takes over another version on disk, beside the searches that run; True when it did.

        A version made with another model or code length is not taken over: the old one goes on. An
        index that was deleted and built anew begins with version 1 again and is followed, too.
        """
        from hashnet.index import IndexArtefact

        seal = IndexArtefact(self.uri).sha256()
        if seal in (None, self.refused):
            return False
        fresh = self.index.newest()
        if fresh is self.index:
            return False
        try:
            if fresh.n_bits != self.index.n_bits:
                raise IndexMismatch(f"it has {fresh.n_bits} bits, {self.index.n_bits} are served")
            check_model(fresh.lineage, self.model_sha256, self.uri)
        except HashnetError as error:
            self.refused = seal
            log.error("index version %d is not served: %s", fresh.version, error)
            return False
        self.index = fresh
        return True

    def answer(self, asks: Sequence[IndexAsk]) -> list[IndexAnswer]:
        """One answer an ask, all from the same version; equal kinds of asks are searched together."""
        index = self.index
        answers: list[IndexAnswer | None] = [None] * len(asks)
        groups: dict[tuple, list[int]] = defaultdict(list)
        codes: list[np.ndarray] = [np.empty(0)] * len(asks)
        now = time.time()
        for i, ask in enumerate(asks):
            if ask.deadline < now:  # nobody waits for it any more
                answers[i] = IndexAnswer(
                    index.version, error=("timeout", "it waited too long; try again", 503)
                )
                continue
            try:
                codes[i] = ask.codes if ask.ids is None else index.codes(ask.ids)  # type: ignore[assignment]
                groups[ask.group].append(i)
            except HashnetError as error:
                answers[i] = IndexAnswer(index.version, error=blame(error))
        for members in groups.values():
            found = self._search(index, [asks[i] for i in members], [codes[i] for i in members])
            for i, answer in zip(members, found, strict=True):
                answers[i] = answer
        return answers  # type: ignore[return-value] # every place was filled

    def _search(self, index: Any, asks: list[IndexAsk], codes: list[np.ndarray]) -> list[IndexAnswer]:
        ask = asks[0]
        joined = np.concatenate(codes) if len(codes) > 1 else codes[0]
        options: dict[str, Any] = {"where": None if ask.labels is None else {"labels": list(ask.labels)}}
        if ask.exclude_self:
            options["exclude_self"] = np.concatenate([one.ids for one in asks if one.ids is not None])
        bounds = np.cumsum([0, *map(len, codes)])
        hits: SearchResult | list[SearchResult]
        try:
            _check_labels(index, ask.labels)
            if len(index) == 0:
                hits = _nothing(len(joined), ask)
            elif ask.k is not None:
                hits = index.search(joined, k=ask.k, **options)
            else:
                hits = self._within(index, joined, asks, options)
        except HashnetError as error:
            return [IndexAnswer(index.version, error=blame(error)) for _ in asks]
        answers = []
        for one, own, start, stop in zip(asks, codes, bounds[:-1], bounds[1:], strict=True):
            part = hits[start:stop] if isinstance(hits, list) else _slice(hits, start, stop)
            if isinstance(part, list) and sum(map(len, part)) > one.max_hits:
                answers.append(IndexAnswer(index.version, error=blame(_too_many(one))))
                continue
            hit_codes = index.codes(_used(part)) if one.want_hit_codes and len(index) else None
            answers.append(IndexAnswer(index.version, part, own if one.want_codes else None, hit_codes))
        return answers

    def _within(
        self, index: Any, codes: np.ndarray, asks: list[IndexAsk], options: dict[str, Any]
    ) -> list[SearchResult]:
        """A radius search; an ask that has found more than its answer may hold is not searched further."""
        ask_of = np.repeat(np.arange(len(asks)), [len(ask) for ask in asks])  # (q,)
        most = np.array([ask.max_hits for ask in asks])
        totals = np.zeros(len(asks), dtype=np.int64)
        found = _nothing_near(len(codes))
        own = options.pop("exclude_self", None)
        for start in range(0, len(codes), RADIUS_BLOCK):
            rows = np.arange(start, min(start + RADIUS_BLOCK, len(codes)))
            rows = rows[(totals <= most)[ask_of[rows]]]
            if not len(rows):
                continue
            some = options if own is None else options | {"exclude_self": own[rows]}
            block = index.search_radius(codes[rows], radius=asks[0].radius, **some)
            for row, hits in zip(rows, block, strict=True):
                found[row] = hits
                totals[ask_of[row]] += len(hits)
        return found

    def look(
        self, ids: np.ndarray, with_labels: bool = False
    ) -> tuple[int, np.ndarray, np.ndarray, list[list[int]] | None]:
        """(version, bool (n,) whether each is indexed, codes (n, bytes), labels of those that are).

        Codes of ids that are not indexed are 0; labels are None where not asked for or not there.
        """
        index = self.index
        held = index.contains(ids)
        codes = np.zeros((len(ids), index.n_bits // 8), dtype=np.uint8)
        if held.any():
            codes[held] = index.codes(ids[held])
        return index.version, held, codes, index.labels(ids[held]) if with_labels else None


def check_model(lineage: dict[str, Any], model_sha256: str | None, uri: str) -> None:
    """LineageMismatch with both hashes unless the index was made with this model (None: there is none)."""
    if model_sha256 is None:
        return
    made_with = lineage.get("model_sha256")
    if made_with is None:
        raise LineageMismatch(
            f"{uri} does not say which model made its codes, the encoder's model is {model_sha256}; "
            "build the index from a code store of that model, or serve with model=none"
        )
    if made_with != model_sha256:
        raise LineageMismatch(
            f"{uri} was made with model {made_with}, the encoder's model is {model_sha256}: queries would be "
            "compared with codes of another model; encode the database and build the index with this one, "
            "or serve the model it was made with"
        )


def _check_labels(index: Any, labels: tuple[int, ...] | None) -> None:
    """Refuses a filter by classes that this version does not have."""
    if labels is None:
        return
    if index.n_classes is None:
        raise bad("no_labels", "the items of this index have no labels to filter by", 422)
    if max(labels, default=0) >= index.n_classes:
        raise bad("unknown_label", f"no class {max(labels)} here; there are 0 to {index.n_classes - 1}", 422)


def _nothing(n: int, ask: IndexAsk) -> SearchResult | list[SearchResult]:
    if ask.k is None:
        return _nothing_near(n)
    return SearchResult(np.full((n, ask.k), -1, np.int64), np.full((n, ask.k), -1, np.int32))


def _nothing_near(n: int) -> list[SearchResult]:
    return [SearchResult(np.zeros(0, np.int64), np.zeros(0, np.int32)) for _ in range(n)]


def _too_many(ask: IndexAsk) -> RequestRejected:
    return bad(
        "too_many_hits",
        f"more than {ask.max_hits:,} items lie within {ask.radius} bits; "
        "ask for a smaller radius or fewer queries",
        413,
    )


def _slice(hits: SearchResult, start: int, stop: int) -> SearchResult:
    if start == 0 and stop == len(hits.ids):
        return hits
    return SearchResult(hits.ids[start:stop], hits.distances[start:stop], hits.version)


def _used(hits: SearchResult | list[SearchResult]) -> np.ndarray:
    """Ids of all hits, query after query, without unused slots."""
    if isinstance(hits, list):
        return np.concatenate([hit.ids for hit in hits] or [np.zeros(0, np.int64)])
    return hits.ids[hits.distances >= 0]
