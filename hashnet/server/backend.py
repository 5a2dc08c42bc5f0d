"""Backend: a served run as the routes see it. It holds the items and reaches index, model and writer.

The index is in this process (``IndexService``) or in slices on others. The model and, on a cluster, the
writer are elsewhere, because torch and faiss never share a process and an index has one writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hashnet.client import Queries
from hashnet.codes import pack_signs
from hashnet.errors import BadImage, HashnetError
from hashnet.server.encoder import EncodeRequest
from hashnet.server.live_index import IndexedItems, IndexInfo, SearchRequest, SearchResponse
from hashnet.server.schemas import ApiError, ItemOut
from hashnet.server.settings import ServedRun
from hashnet.server.writer import AddItems, Change, Written
from hashnet.store import StoredItem

log = logging.getLogger(__name__)

REOPEN_S = 5.0  # between two checks whether the code store has grown
MAX_DECODING = 4  # thumbnails decoded at the same time: a large picture is 150 MB of pixels


class Index(Protocol):
    """The index, here or in slices on other processes. ``min_version``: that version or a newer one."""

    async def search(self, request: SearchRequest) -> SearchResponse: ...

    async def lookup(
        self, ids: np.ndarray, with_labels: bool = False, min_version: int = 0
    ) -> IndexedItems: ...

    async def info(self, min_version: int = 0) -> IndexInfo: ...

    async def check_vectors(self, model_sha256: str | None, min_version: int = 0) -> None: ...


class Model(Protocol):
    """The process that holds the model."""

    async def encode(self, request: EncodeRequest) -> np.ndarray: ...

    async def ready(self) -> None: ...


@dataclass(frozen=True)
class Thumbnail:
    """A small picture: its bytes, media type and entity tag."""

    data: bytes
    media_type: str
    etag: str


class Backend:
    """The parts of a served run behind the HTTP routes."""

    def __init__(
        self,
        served: ServedRun,
        index: Index,
        model: Model | None,
        write: Callable[[Change], Awaitable[Written]],
        timeout_s: float,
    ) -> None:
        self.served, self.index, self.model, self.write, self.timeout_s = (
            served,
            index,
            model,
            write,
            timeout_s,
        )
        self.stored = served.open_items()
        self._decoding = ThreadPoolExecutor(MAX_DECODING, thread_name_prefix="thumbnail")
        self._reopened = 0.0

    async def ready(self) -> None:
        """Returns once everything is loaded; ApiError (503) as long as it is not."""
        await self.index.info()
        if self.model is not None:
            await self.model.ready()

    async def logits(self, queries: Queries, vectors: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """(logits float32 (n, n_bits), if requested the vectors to rescore by) of pictures or features."""
        assert self.model is not None  # what cannot be encoded was refused by the parser
        request = EncodeRequest(queries, time.time() + self.timeout_s, vectors)
        found, n_bits = await self.model.encode(request), self.served.n_bits
        return found[:, :n_bits], found[:, n_bits:] if vectors else None

    async def encode(self, queries: Queries, vectors: bool = False) -> Queries:
        """Pictures or features as codes; with ``vectors`` where the index has any of this model."""
        if vectors:
            try:
                await self.index.check_vectors(self.served.model_sha256)
            except ApiError:
                vectors = False
        logits, found = await self.logits(queries, vectors)
        return Queries("codes", pack_signs(logits), found)

    async def search(self, request: SearchRequest) -> SearchResponse:
        """Encodes the queries where needed, then searches."""
        if request.queries.kind in ("codes", "ids"):
            return await self.index.search(request)
        rescore, asymmetric = request.options.rescore, request.options.asymmetric
        if rescore:
            await self.index.check_vectors(self.served.model_sha256, request.min_version)
        logits, vectors = await self.logits(request.queries, rescore)
        queries = Queries("codes", pack_signs(logits), vectors)
        return await self.index.search(
            replace(request, queries=queries, logits=logits if asymmetric else None)
        )

    async def add(self, queries: Queries, change: AddItems) -> Written:
        """Adds items, encoding them where needed."""
        items = queries if queries.kind == "codes" else await self.encode(queries, vectors=True)
        return await self.write(replace(change, codes=items.values, vectors=items.vectors))

    async def items(self, ids: np.ndarray, min_version: int = 0) -> list[ItemOut]:
        """The items with these ids; ApiError (unknown_id) where one is not indexed."""
        found = await self.index.lookup(ids, with_labels=True, min_version=min_version)
        if not found.held.all():
            raise ApiError("unknown_id", f"the index holds no item {int(ids[~found.held][0])}", 404)
        return await self._describe(ids, found)

    async def hits(self, ids: np.ndarray, codes: np.ndarray) -> list[ItemOut]:
        """Hits, described; their codes were found with them. One removed meanwhile has no labels."""
        found = await self.index.lookup(ids, with_labels=True)
        labels, columns = (_spread(values, found.held) for values in (found.labels, found.columns))
        return await self._describe(ids, replace(found, codes=codes, labels=labels, columns=columns))

    async def sample(self, n: int, seed: int) -> tuple[int, list[ItemOut]]:
        """(version, up to ``n`` random indexed items)."""
        if self.stored is None:
            return (await self.index.info()).version, []
        ids = np.array(await asyncio.to_thread(self.stored.sample, n, seed), dtype=np.int64)
        found = await self.index.lookup(ids, with_labels=True)
        held = replace(found, codes=found.codes[found.held])
        return found.version, await self._describe(ids[found.held], held)

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

    async def _describe(self, ids: np.ndarray, found: IndexedItems) -> list[ItemOut]:
        """Uri, labels, code and thumbnail of indexed items.

        Labels are the index's, which may be newer than the code store's; those of an index without labels
        come from there.
        """
        records: list[StoredItem | None] = [None] * len(ids)
        if self.stored is not None and len(ids):
            records = await asyncio.to_thread(self._look_up_fresh, ids.tolist())
        unknown = [None] * len(ids)
        rows = zip(
            ids.tolist(),
            found.codes,
            records,
            found.labels or unknown,
            found.columns or unknown,
            strict=True,
        )
        return [
            self._item(id_, code.tobytes().hex(), record, labels, columns)
            for id_, code, record, labels, columns in rows
        ]

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
        self,
        id_: int,
        code: str,
        record: StoredItem | None,
        labels: list[int] | None,
        columns: dict[str, Any] | None,
    ) -> ItemOut:
        """One item; ``record`` is what the code store has under its id."""
        given_uri = (columns or {}).get("uri")
        if record is not None and (record.code != code or given_uri not in (None, record.uri)):
            record = None  # the id was given to another item
        if labels is None and record is not None:
            labels = record.labels
        return ItemOut(
            id=id_,
            uri=given_uri if record is None else record.uri,
            labels=labels,
            label_names=self._names(labels),
            code=code,
            thumbnail=f"/v1/items/{id_}/thumbnail" if record is not None and self.served.pictures else None,
            columns=columns,
        )

    def _names(self, labels: list[int] | None) -> list[str] | None:
        names = self.served.class_names
        if names is None or labels is None:
            return None
        return [names[label] if label < len(names) else f"class {label}" for label in labels]


def _spread(values: list[Any] | None, held: np.ndarray) -> list[Any] | None:
    """Values of the items that are held, with None in the places of the others."""
    if values is None:
        return None
    of_held = iter(values)
    return [next(of_held) if one else None for one in held]
