"""IndexWriter: the single writer of a served index. Changes that arrive together are one commit.

A change is acknowledged when the version that holds it is on disk. While one commit is written, further
changes collect, and the next commit takes them all: many clients share one flush of the disk. Compaction
runs beside them on a thread of its own.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hashnet.errors import HashnetError, IdTaken, LineageMismatch
from hashnet.io import storage
from hashnet.server.batching import Batcher
from hashnet.server.schemas import ApiError
from hashnet.server.settings import check_model

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

log = logging.getLogger(__name__)

OF_EVERY_ITEM = ("uri", "key")  # columns that items may have although the index was built without
MAX_ROWS = 100_000  # of changes committed together
# The index is compacted once this many rows, and this share of it, were added or removed since.
COMPACT_ROWS, COMPACT_SHARE = 10_000, 0.25


@dataclass(frozen=True)
class AddItems:
    """Items to add: codes uint8 (n, bytes), ids int64 (n,), and class ids per item or None.

    With ``upsert`` they replace the items that have these ids; without, an id that is taken is refused.
    Without ids the column "key" names every item: one that replaces another keeps its id, others get new ids.
    """

    codes: np.ndarray
    ids: np.ndarray | None
    labels: list[list[int]] | None = None
    upsert: bool = False
    columns: pa.Table | None = None  # the user's, keys as "key"
    vectors: np.ndarray | None = None  # float32 (n, width), for an index that is rescored by them

    def __len__(self) -> int:
        return len(self.codes)

    def of_slice(self, number: int, n: int) -> AddItems:
        """The part that slice ``number`` of ``n`` owns, of items that have ids."""
        if n == 1:
            return self
        assert self.ids is not None
        own = np.flatnonzero(self.ids % n == number)
        labels = None if self.labels is None else [self.labels[row] for row in own]
        columns = None if self.columns is None else self.columns.take(pa.array(own))
        vectors = None if self.vectors is None else self.vectors[own]
        return AddItems(self.codes[own], self.ids[own], labels, self.upsert, columns, vectors)


@dataclass(frozen=True)
class RemoveItems:
    """Items to remove: ids int64 (n,), or else keys."""

    ids: np.ndarray | None = None
    keys: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.keys) if self.ids is None else len(self.ids)

    def of_slice(self, number: int, n: int) -> RemoveItems:
        """The part that slice ``number`` of ``n`` owns, of items given by id."""
        if n == 1:
            return self
        assert self.ids is not None
        return RemoveItems(self.ids[self.ids % n == number])


Change = AddItems | RemoveItems


@dataclass(frozen=True)
class Written:
    """The index after a change."""

    version: int
    size: int


class IndexWriter:
    """Writes changes to the index in groups; each change is applied completely or not at all.

    ``uris`` are the slices of the index, most often one: item i belongs to number i % len(uris). ``lock`` is
    held during a commit, for writers that share no lock on the index's storage.
    """

    def __init__(
        self, *uris: str, model_sha256: str | None = None, lock: AbstractContextManager | None = None
    ) -> None:
        self.uris, self.model_sha256 = uris, model_sha256
        self.lock = lock or nullcontext()
        self._slices: list[Any] = []  # loaded with the first change
        self._changes: Batcher[Change, Written] = Batcher(self.commit, max_rows=MAX_ROWS, name="write")
        self._compactor = ThreadPoolExecutor(1, thread_name_prefix="compact")
        self._compaction: Future | None = None
        self._loose = False  # whether there is something to compact, as of the last commit

    async def write(self, change: Change) -> Written:
        """The index after the change, which is on disk; ApiError where it cannot be made."""
        written = await self._changes.submit(change)
        idle = self._compaction is None or self._compaction.done()
        if idle and self._loose:
            self._compaction = self._compactor.submit(self.compact_if_worthwhile)
        return written

    def commit(self, changes: Sequence[Change]) -> list[Written | HashnetError]:
        """Makes the changes as one new version; an ApiError in place of one that cannot be made."""
        before = [part.version for part in self._slices]
        try:
            with self.lock, ExitStack() as stack:
                drafts = [stack.enter_context(part.transaction()) for part in self.open()]
                for draft, uri in zip(drafts, self.uris, strict=True):
                    check_model(draft.lineage, self.model_sha256, uri)  # it may have been rebuilt
                refused = [error for run in _runs(changes) for error in _try_together(drafts, run)]
        except LineageMismatch as error:
            return [ApiError("index_changed", str(error), 409)] * len(changes)
        except HashnetError as error:
            changed = [n for n, version in enumerate(before) if self._slices[n].version != version]
            return [_storage_error(error, changed, len(self.uris))] * len(changes)
        self._loose = any(map(_is_loose, self._slices))
        written = Written(sum(part.version for part in self._slices), sum(map(len, self._slices)))
        return [error or written for error in refused]

    def compact_if_worthwhile(self) -> bool:
        """Merges rows added and removed since into the index proper, once they are many.

        Searches and, on a local disk, changes continue while it runs.
        """
        compacted = False
        for part, uri in zip(self._slices, self.uris, strict=True):
            try:
                with nullcontext() if storage.is_local(uri) else self.lock:
                    compacted |= _is_loose(part) and part.compact()
            except HashnetError as error:  # another process wrote it, or the disk is full: some other time
                log.warning("%s was not compacted: %s", uri, error)
        return compacted

    def open(self) -> list[Any]:
        """The slices, loaded with the first call. They are not searched: no kernel is compiled for them."""
        if not self._slices:
            from hashnet.index import BinaryIndex

            self._slices = [BinaryIndex.load(uri, engine="faiss") for uri in self.uris]
        return self._slices


def _is_loose(index: Any) -> bool:
    about = index.describe()
    loose = about["removed_rows"] + about["added_rows"]
    return loose >= max(COMPACT_ROWS, COMPACT_SHARE * about["rows"])


def _runs(changes: Sequence[Change]) -> list[list[Change]]:
    """Consecutive changes that can be made as one: of one kind, with the same things given for each item."""

    def kind(change: Change) -> tuple:
        if isinstance(change, RemoveItems):
            return RemoveItems, change.ids is None
        width = None if change.vectors is None else change.vectors.shape[1]
        return AddItems, change.upsert, change.labels is None, change.columns is None, width

    return [list(run) for _, run in groupby(changes, kind)]


def _try_together(drafts: list[Any], run: list[Change]) -> list[HashnetError | None]:
    """Why each change of a run cannot be made, or None; one by one only where they cannot be made at once."""
    if len(run) > 1 and getattr(run[0], "columns", None) is None and _try(drafts, _joined(run)) is None:
        return [None] * len(run)
    return [_try(drafts, change) for change in run]


def _joined(run: list[Any]) -> Change:
    if isinstance(run[0], RemoveItems) and run[0].ids is None:
        return RemoveItems(keys=[key for change in run for key in change.keys])
    ids = np.concatenate([change.ids for change in run])
    if isinstance(run[0], RemoveItems):
        return RemoveItems(ids)
    labels = None if run[0].labels is None else [row for change in run for row in change.labels]
    vectors = None if run[0].vectors is None else np.concatenate([change.vectors for change in run])
    codes = np.concatenate([change.codes for change in run])
    return AddItems(codes, ids, labels, run[0].upsert, vectors=vectors)


def _try(drafts: list[Any], change: Change) -> HashnetError | None:
    """Makes one change to the drafts of the slices' new versions; why it cannot be made, or None."""
    try:
        change = _with_ids(drafts, change)
        with ExitStack() as stack:  # an error leaves all of them as they were
            for number, draft in enumerate(drafts):
                part, given = change.of_slice(number, len(drafts)), getattr(change, "columns", None)
                of_every_item = [name for name in OF_EVERY_ITEM if given and name in given.column_names]
                if not len(part) and not of_every_item:
                    continue
                inner = stack.enter_context(draft.transaction())
                inner.add_columns(dict.fromkeys(of_every_item, pa.large_string()))
                if len(part):
                    _apply(inner, part)
    except IdTaken as error:
        return ApiError("id_taken", str(error), 409)
    except HashnetError as error:
        return ApiError.of(error) or error
    return None


def _with_ids(drafts: list[Any], change: Change) -> Change:
    """The change with the ids that its keys stand for. A key belongs to one item of all slices."""
    if isinstance(change, RemoveItems):
        if change.ids is not None:
            return change
        ids = _find_keys(drafts, change.keys)
        if (ids < 0).any():
            unknown = change.keys[int((ids < 0).argmax())]
            raise ApiError("unknown_key", f"the index holds no key {unknown[:100]!r}", 404)
        return replace(change, ids=ids)
    table = change.columns
    if table is None or "key" not in table.column_names:
        return change
    if change.ids is not None and len(drafts) == 1:  # the index itself refuses a known key
        return change
    keys = table["key"].to_pylist()
    held = _find_keys(drafts, keys)
    if change.ids is None:
        ids = held.copy()
        first = max(int(draft.new_ids(1)[0]) for draft in drafts)
        ids[held < 0] = np.arange(first, first + (held < 0).sum())
        change = replace(change, ids=ids)
    others = np.flatnonzero((held >= 0) & ((held != change.ids) | (not change.upsert)))
    if len(others):
        sentence = f"key {keys[others[0]]!r} is in the index already ({len(others)} of {len(keys)} are)"
        raise ApiError("id_taken", f"{sentence}; upsert replaces them", 409)
    named = Counter(key for key in keys if key is not None)
    if named.total() > len(named):
        ((key, times),) = named.most_common(1)
        sentence = f"key {key!r} is given {times} times; a key belongs to one item"
        raise ApiError("id_taken", sentence, 409)
    return change


def _find_keys(drafts: list[Any], keys: Sequence[str | None]) -> np.ndarray:
    """The id of each key, int64 (n,), in whichever slice holds it; -1 where none does."""
    keyed = [draft for draft in drafts if draft.schema is not None and "key" in draft.schema.names]
    nowhere = np.full(len(keys), -1, dtype=np.int64)
    return np.max([nowhere, *(draft.find_keys(keys) for draft in keyed)], axis=0)


def _apply(draft: Any, change: Change) -> None:
    if isinstance(change, RemoveItems):
        draft.remove(change.ids)
        return
    labels = _multi_hot(change, draft.n_classes)
    write = draft.upsert if change.upsert else draft.add
    write(change.codes, change.ids, labels, columns=change.columns, features=change.vectors)


def _multi_hot(change: AddItems, n_classes: int | None) -> np.ndarray | None:
    """uint8 (n, n_classes) of the items' labels."""
    if change.labels is None:
        return None
    assert change.ids is not None
    if n_classes is None:
        raise ApiError("no_labels", "this index was built without labels; add the items without them")
    multi_hot = np.zeros((len(change.ids), n_classes), dtype=np.uint8)
    for row, labels in enumerate(change.labels):
        if any(label >= n_classes for label in labels):
            raise ApiError(
                "unknown_label", f"item {int(change.ids[row])} has class {max(labels)}; there are {n_classes}"
            )
        multi_hot[row, labels] = 1
    return multi_hot


def _storage_error(error: HashnetError, changed: list[int], n_slices: int) -> HashnetError:
    """507 where the disk is full: what was acknowledged is safe. ``changed`` slices were written before."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno in (errno.ENOSPC, errno.EDQUOT):
            done = "nothing was changed"
            if changed:
                listed = ", ".join(map(str, changed))
                done = f"slices {listed} of {n_slices} took their items, the others did not: repeat as upsert"
            return ApiError("disk_full", f"the server's disk is full; {done}", 507)
        inner = inner.__cause__
    return ApiError.of(error) or error
