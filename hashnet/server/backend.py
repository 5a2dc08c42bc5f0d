"""What the HTTP routes ask for: search, encode, items, writes.

``Backend`` does what needs no other process and leaves a few calls open; ``RayBackend`` (in
``ray_backend.py``) sends them to the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hashnet.client import Queries, bad
from hashnet.errors import BadImage, HashnetError, RequestRejected
from hashnet.results import SearchResult
from hashnet.server.calls import IndexAnswer, IndexAsk
from hashnet.server.telemetry import Meter, prometheus
from hashnet.store import ItemLookup

log = logging.getLogger(__name__)

REOPEN_S = 5.0  # between two looks whether the code store has grown
PICTURES_AT_ONCE = 4  # decoded for thumbnails: a large one is 150 MB of pixels


@dataclass(frozen=True)
class Call:
    """The options of one search, checked."""

    k: int | None = 10
    radius: int | None = None
    labels: list[int] | None = None
    exclude_self: bool = False
    min_version: int = 0
    max_hits: int = 4_000_000
    want_codes: bool = False
    want_items: bool = False


@dataclass(frozen=True)
class Found:
    """What a search found: (q, k), or a list of 1-D results; codes of queries and hits where asked for."""

    hits: SearchResult | list[SearchResult]
    version: int
    codes: np.ndarray | None = None
    hit_codes: np.ndarray | None = None


class Backend:
    """``fixed`` is what does not change while the server runs: modality, n_features, class names."""

    def __init__(self, catalog: ItemLookup | None, fixed: dict[str, Any], timeout_s: float = 20.0) -> None:
        self.catalog, self.fixed, self.timeout_s = catalog, fixed, timeout_s
        self._pictures = ThreadPoolExecutor(PICTURES_AT_ONCE, thread_name_prefix="thumbnail")
        self._reopened = 0.0

    # -- the open calls

    async def ask_index(self, ask: IndexAsk) -> IndexAnswer:
        raise NotImplementedError

    async def ask_about(self) -> dict[str, Any]:
        raise NotImplementedError

    async def look(
        self, ids: np.ndarray, with_labels: bool = False
    ) -> tuple[int, np.ndarray, np.ndarray, list[list[int]] | None]:
        """As IndexHolder.look."""
        raise NotImplementedError

    async def encode(self, queries: Queries) -> np.ndarray:
        raise NotImplementedError

    async def write(self, what: str, *arguments: Any) -> tuple[int, int]:
        """(version, size) after ``add`` or ``remove``."""
        raise NotImplementedError

    async def ready(self) -> None:
        await self.ask_about()

    async def metrics(self, meter: Meter) -> bytes:
        return prometheus([meter.snapshot()], gauges(await self.ask_about()))

    # -- what the routes use

    def about(self) -> dict[str, Any]:
        """What does not change: n_bits, kinds of queries, names of classes."""
        accepts = ["codes", "ids"]
        if self.fixed["modality"] is not None:
            accepts.append("images" if self.fixed["modality"] == "image" else "features")
        return self.fixed | {"accepts": accepts}

    async def info(self) -> dict[str, Any]:
        """What is served, as of now."""
        return await self.ask_about() | self.about()

    async def search(self, queries: Queries, call: Call) -> Found:
        """Encodes where needed, then searches."""
        codes = ids = None
        if queries.kind == "ids":
            ids = queries.values
        elif queries.kind == "codes":
            codes = queries.values
        else:
            codes = await self.encode(queries)
        ask = IndexAsk(
            codes=codes,
            ids=ids,
            k=call.k,
            radius=call.radius,
            labels=None if call.labels is None else tuple(call.labels),
            exclude_self=call.exclude_self,
            min_version=call.min_version,
            want_codes=call.want_codes and codes is None,
            want_hit_codes=call.want_items,
            max_hits=call.max_hits,
            deadline=time.time() + self.timeout_s,
        )
        answer = (await self.ask_index(ask)).checked()
        assert answer.hits is not None
        return Found(answer.hits, answer.version, answer.codes if codes is None else codes, answer.hit_codes)

    async def items(self, ids: np.ndarray) -> tuple[int, list[dict[str, Any]]]:
        """(version, what is known of each); RequestRejected (unknown_id) where one is not indexed."""
        version, held, codes, labels = await self.look(ids, with_labels=True)
        if not held.all():
            raise bad("unknown_id", f"the index holds no item {int(ids[~held][0])}", 404)
        by_id = {} if labels is None else dict(zip(ids.tolist(), labels, strict=True))
        return version, await self.describe(ids, codes, by_id)

    async def describe(
        self, ids: np.ndarray, codes: np.ndarray, by_id: dict[int, list[int]] | None = None
    ) -> list[dict[str, Any]]:
        """uri, labels, code and thumbnail of indexed items whose codes are at hand.

        ``by_id`` are the index's own labels, where they are at hand, too; of items that are not in the
        code store they are looked up otherwise.
        """
        records: list[Any] = [None] * len(ids)
        if self.catalog is not None and len(ids):
            records = await asyncio.to_thread(self._look_up, ids.tolist())
        texts = [code.tobytes().hex() for code in codes]
        # An id that was removed and given to something else is not the one in the code store.
        own = [
            record is not None and record.code == text for record, text in zip(records, texts, strict=True)
        ]
        if by_id is None and not all(own):
            foreign = ids[~np.array(own)]
            _, held, _, found = await self.look(foreign, with_labels=True)
            by_id = dict(zip(foreign[held].tolist(), found, strict=True)) if found is not None else None
        by_id = by_id or {}
        out = []
        for id_, record, text, ours in zip(ids.tolist(), records, texts, own, strict=True):
            item_labels = record.labels if ours else by_id.get(id_)
            out.append(
                {
                    "id": id_,
                    "uri": record.uri if ours else None,
                    "labels": item_labels,
                    "label_names": self._names(item_labels),
                    "code": text,
                    "thumbnail": f"/v1/items/{id_}/thumbnail" if ours and self.fixed["pictures"] else None,
                }
            )
        return out

    def _look_up(self, ids: list[int]) -> list[Any]:
        """Items of the code store; one that is missing may have been encoded since it was opened."""
        found = self._stored(ids)
        if None in found and time.monotonic() - self._reopened > REOPEN_S:
            self._reopened = time.monotonic()
            assert self.catalog is not None
            with contextlib.suppress(HashnetError):  # being written: what is known goes on being told
                if self.catalog.refresh():
                    found = self._stored(ids)
        return found

    def _stored(self, ids: list[int]) -> list[Any]:
        assert self.catalog is not None
        try:
            return self.catalog.items(ids)
        except HashnetError as error:  # a store that was written anew, or cannot be read: hits stay hits
            log.warning("items cannot be looked up: %s", error)
            return [None] * len(ids)

    async def sample(self, n: int, seed: int) -> tuple[int, list[dict[str, Any]]]:
        """(version, some indexed items)."""
        if self.catalog is None:
            return (await self.ask_about())["version"], []
        ids = np.array(await asyncio.to_thread(self.catalog.sample, n, seed), dtype=np.int64)
        version, held, codes, _ = await self.look(ids)
        return version, await self.describe(ids[held], codes[held])

    async def thumbnail(self, id_: int) -> tuple[bytes, str, str]:
        """(bytes, media type, tag) of a small picture of an indexed item."""
        _, items = await self.items(np.array([id_], dtype=np.int64))
        small = None
        if self.catalog is not None and items[0]["thumbnail"] is not None:
            try:
                loop = asyncio.get_running_loop()
                small = await loop.run_in_executor(self._pictures, self.catalog.thumbnail, id_)
            except BadImage as error:
                raise bad(
                    "no_picture", f"the picture of item {id_} cannot be shown: {error.reason}", 404
                ) from error
        if small is None:
            raise bad("no_picture", f"item {id_} has no picture", 404)
        return (*small, hashlib.sha256(small[0]).hexdigest()[:16])

    async def add(self, queries: Queries, ids: np.ndarray, labels: list[list[int]] | None) -> tuple[int, int]:
        """(version, size) with the new items."""
        codes = queries.values if queries.kind == "codes" else await self.encode(queries)
        return await self.write("add", codes, ids, labels)

    async def remove(self, ids: np.ndarray) -> tuple[int, int]:
        """(version, size) without them."""
        return await self.write("remove", ids)

    def _names(self, labels: list[int] | None) -> list[str] | None:
        names = self.fixed["class_names"]
        if names is None or labels is None:
            return None
        return [names[label] if label < len(names) else f"class {label}" for label in labels]


def behind(version: int, wanted: int) -> RequestRejected:
    """The error of an index that has not seen the version a client asks for."""
    return bad(
        "version_behind", f"the index is at version {version}, the request wants {wanted}; try again", 503
    )


def codes_or_raise(answer: np.ndarray | tuple[str, str, int]) -> np.ndarray:
    if isinstance(answer, tuple):
        raise bad(answer[0], answer[1], answer[2])
    return answer


def gauges(about: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """What /metrics says of the index."""
    return {
        "hashnet_index_version": ("Version of the index being served", about["version"]),
        "hashnet_index_size": ("Codes in the index being served", about["size"]),
    }
