"""Backend: what the routes need of the index, the model, the writer and the items.

The calls that may cross a process boundary are abstract: ``cluster.serve`` sends them to Ray Serve replicas.
Everything that needs no other process is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from hashnet.client import Queries
from hashnet.errors import BadImage, HashnetError
from hashnet.server.errors import ApiError
from hashnet.server.messages import (
    AddItems,
    IndexedItems,
    IndexInfo,
    RemoveItems,
    SearchRequest,
    SearchResponse,
    Written,
)
from hashnet.server.schemas import ItemOut
from hashnet.server.served_run import ServedRun
from hashnet.store import StoredItem

log = logging.getLogger(__name__)

REOPEN_S = 5.0  # between two checks whether the code store has grown
MAX_DECODING = 4  # thumbnails decoded at the same time: a large picture is 150 MB of pixels


@dataclass(frozen=True)
class Thumbnail:
    """A small picture: its bytes, media type and entity tag."""

    data: bytes
    media_type: str
    etag: str


class Backend(ABC):
    """The parts of a served run behind the HTTP routes."""

    def __init__(self, served: ServedRun, timeout_s: float) -> None:
        self.served, self.timeout_s = served, timeout_s
        self.stored = served.open_items()
        self._decoding = ThreadPoolExecutor(MAX_DECODING, thread_name_prefix="thumbnail")
        self._reopened = 0.0

    # -- calls that may go to another process

    @abstractmethod
    async def search_index(self, request: SearchRequest) -> SearchResponse:
        """The response of the index to a search by codes or ids."""

    @abstractmethod
    async def index_info(self) -> IndexInfo:
        """The index as it is served at the moment."""

    @abstractmethod
    async def lookup(self, ids: np.ndarray, with_labels: bool = False) -> IndexedItems:
        """As LiveIndex.lookup."""

    @abstractmethod
    async def encode(self, queries: Queries) -> np.ndarray:
        """Codes uint8 (n, n_bits // 8) of pictures or features."""

    @abstractmethod
    async def write(self, change: AddItems | RemoveItems) -> Written:
        """The index after the change."""

    async def ready(self) -> None:
        """Returns once everything is loaded."""
        await self.index_info()

    # -- what the routes use

    async def search(self, request: SearchRequest) -> SearchResponse:
        """Encodes the queries where needed, then searches."""
        queries = request.queries
        if queries.kind not in ("codes", "ids"):
            queries = Queries("codes", await self.encode(queries))
        by_code = queries.kind == "codes"
        response = await self.search_index(
            replace(
                request,
                queries=queries,
                with_codes=request.with_codes and not by_code,  # they are known here already
                deadline=time.time() + self.timeout_s,
            )
        )
        return replace(response, query_codes=queries.values) if by_code else response

    async def items(self, ids: np.ndarray) -> list[ItemOut]:
        """The items with these ids; ApiError (unknown_id) where one is not indexed."""
        found = await self.lookup(ids, with_labels=True)
        if not found.held.all():
            raise ApiError("unknown_id", f"the index holds no item {int(ids[~found.held][0])}", 404)
        labels = {} if found.labels is None else dict(zip(ids.tolist(), found.labels, strict=True))
        return await self.describe(ids, found.codes, labels)

    async def describe(
        self, ids: np.ndarray, codes: np.ndarray, labels: dict[int, list[int]] | None = None
    ) -> list[ItemOut]:
        """Uri, labels, code and thumbnail of indexed items whose codes are known.

        ``labels`` are the index's own, by id. Where they are not given, those of items that are not in
        the code store are looked up.
        """
        records: list[StoredItem | None] = [None] * len(ids)
        if self.stored is not None and len(ids):
            records = await asyncio.to_thread(self._look_up_fresh, ids.tolist())
        texts = [code.tobytes().hex() for code in codes]
        # An id that was removed and given to another item is not the one in the code store.
        records = [
            record if record is not None and record.code == text else None
            for record, text in zip(records, texts, strict=True)
        ]
        if labels is None and None in records:
            labels = await self._index_labels(ids[[record is None for record in records]])
        return [
            self._item(id_, text, record, (labels or {}).get(id_))
            for id_, text, record in zip(ids.tolist(), texts, records, strict=True)
        ]

    async def sample(self, n: int, seed: int) -> tuple[int, list[ItemOut]]:
        """(version, up to ``n`` random indexed items)."""
        if self.stored is None:
            return (await self.index_info()).version, []
        ids = np.array(await asyncio.to_thread(self.stored.sample, n, seed), dtype=np.int64)
        found = await self.lookup(ids)
        return found.version, await self.describe(ids[found.held], found.codes[found.held])

    async def thumbnail(self, id_: int) -> Thumbnail:
        """A small picture of an indexed item."""
        (item,) = await self.items(np.array([id_], dtype=np.int64))
        small = None
        if self.stored is not None and item.thumbnail is not None:
            try:
                loop = asyncio.get_running_loop()
                small = await loop.run_in_executor(self._decoding, self.stored.thumbnail, id_)
            except BadImage as error:
                sentence = f"the picture of item {id_} cannot be shown: {error.reason}"
                raise ApiError("no_picture", sentence, 404) from error
        if small is None:
            raise ApiError("no_picture", f"item {id_} has no picture", 404)
        data, media_type = small
        return Thumbnail(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:16]}"')

    async def add(self, queries: Queries, ids: np.ndarray, labels: list[list[int]] | None) -> Written:
        """Adds items, encoding them where needed."""
        codes = queries.values if queries.kind == "codes" else await self.encode(queries)
        return await self.write(AddItems(codes, ids, labels))

    async def _index_labels(self, ids: np.ndarray) -> dict[int, list[int]]:
        found = await self.lookup(ids, with_labels=True)
        return {} if found.labels is None else dict(zip(ids[found.held].tolist(), found.labels, strict=True))

    def _look_up_fresh(self, ids: list[int]) -> list[StoredItem | None]:
        """Items of the code store; a missing one may have been encoded since the store was opened."""
        found = self._look_up(ids)
        if None in found and time.monotonic() - self._reopened > REOPEN_S:
            self._reopened = time.monotonic()
            assert self.stored is not None
            with contextlib.suppress(HashnetError):  # being written: what is known is served meanwhile
                if self.stored.refresh():
                    found = self._look_up(ids)
        return found

    def _look_up(self, ids: list[int]) -> list[StoredItem | None]:
        assert self.stored is not None
        try:
            return self.stored.items(ids)
        except HashnetError as error:  # a store that was rewritten, or cannot be read: hits are served anyway
            log.warning("items cannot be looked up: %s", error)
            return [None] * len(ids)

    def _item(
        self, id_: int, code: str, record: StoredItem | None, index_labels: list[int] | None
    ) -> ItemOut:
        """One item; ``record`` is what the code store has of it, None where it is not from there."""
        labels = index_labels if record is None else record.labels
        return ItemOut(
            id=id_,
            uri=None if record is None else record.uri,
            labels=labels,
            label_names=self._names(labels),
            code=code,
            thumbnail=f"/v1/items/{id_}/thumbnail" if record is not None and self.served.pictures else None,
        )

    def _names(self, labels: list[int] | None) -> list[str] | None:
        names = self.served.class_names
        if names is None or labels is None:
            return None
        return [names[label] if label < len(names) else f"class {label}" for label in labels]
