"""ItemLookup: uri, labels, code and picture of an indexed item, by its id.

Rows are found by id in the code shards and in the run's copy of the manifest. Two bounded caches hold
what was read, so memory does not grow with the database. Pictures come from the manifest alone: no path
that a client sent is ever opened.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from hashnet.data import Manifest, decode, fetch_images
from hashnet.errors import BadImage, FormatError
from hashnet.io import storage
from hashnet.store.code_store import CodeStore
from hashnet.store.commit import ShardRecord

CACHE_BYTES = 64 << 20  # of shard rows; as much again of thumbnails
THUMBNAIL = 256  # pixels of the longer side
MAX_PIXELS = 50_000_000


@dataclass(frozen=True)
class StoredItem:
    """One indexed item. ``labels`` is None where the database has none; ``code`` is packed, hex."""

    id: int
    uri: str | None
    labels: list[int] | None
    code: str


class ItemLookup:
    """Looks items of a run up by id. Safe to use from several threads.

    Relative paths of pictures start from ``base_uri``.
    """

    def __init__(
        self, store: CodeStore, manifest: Manifest | None = None, base_uri: str | None = None
    ) -> None:
        self.base_uri = base_uri
        self._open(store, manifest)

    def _open(self, store: CodeStore, manifest: Manifest | None) -> None:
        self.store, self.manifest = store, manifest
        self._in_order = [shard for shard in store.shards if shard.rows and not shard.repair]
        self._repairs = [shard for shard in store.shards if shard.rows and shard.repair]
        # Keyed by a shard's sha256, because a store that is written again reuses the names.
        self._tables = _Cache(CACHE_BYTES)
        self._last: dict[str, int] = {}  # its last row id
        self._thumbnails = _Cache(CACHE_BYTES)

    def __len__(self) -> int:
        return len(self.store)

    def refresh(self) -> bool:
        """Whether the store has changed; store and manifest are opened again then."""
        store = CodeStore.open(self.store.uri)
        if store.sha256 == self.store.sha256:
            return False
        old = self.manifest
        self._open(store, None if old is None else Manifest.open(old.uri, verify=old.verify_files))
        return True

    def items(self, ids: Iterable[int]) -> list[StoredItem | None]:
        """The items in the order of ``ids``; None where the code store has no such id."""
        return [self.item(int(id_)) for id_ in ids]

    def item(self, id_: int) -> StoredItem | None:
        """One item, or None."""
        store = self.store
        try:
            return self._find(id_)
        except FormatError:  # perhaps the store was rewritten, and its shards with it
            if self.store is store and not self.refresh():
                raise
            return self._find(id_)

    def _find(self, id_: int) -> StoredItem | None:
        for shard in self._candidates(id_):
            table = self._table(shard)
            row_ids = table["row_id"].to_numpy()
            row = int(np.searchsorted(row_ids, id_))
            if row < len(row_ids) and row_ids[row] == id_:
                labels = table["labels"][row].as_py()
                uri = table["uri"][row].as_py()
                return StoredItem(id_, _without_options(uri), labels, table["code"][row].as_py().hex())
        return None

    def sample(self, n: int, seed: int = 0) -> list[int]:
        """At most ``n`` ids, drawn from a few shards: examples to start browsing from."""
        draw = np.random.default_rng(seed)
        shards = [self._in_order[i] for i in draw.permutation(len(self._in_order))[:4]]
        found: list[int] = []
        for i, shard in enumerate(shards):
            row_ids = self._table(shard)["row_id"].to_numpy()
            share = -(-(n - len(found)) // (len(shards) - i))
            found += draw.choice(row_ids, size=min(share, len(row_ids)), replace=False).tolist()
        return found[:n]

    def thumbnail(self, id_: int, size: int = THUMBNAIL) -> tuple[bytes, str] | None:
        """(bytes, media type) of a small picture, never larger than the original; None without one.

        Raises BadImage when the picture cannot be read.
        """
        manifest, thumbnails = self.manifest, self._thumbnails  # read once: another thread may reopen them
        if manifest is None or manifest.modality != "image":
            return None
        if (kept := thumbnails.get((id_, size))) is not None:
            return kept
        if not 0 <= id_ < len(manifest):
            return None
        columns = ["uri", "image"] if manifest.inline else ["uri"]
        row = manifest.read(columns=columns, start=id_, stop=id_ + 1)
        (picture,) = fetch_images(row, self.base_uri, threads=1)
        if isinstance(picture, BadImage):
            raise picture
        small = shrink(picture, size)
        thumbnails.put((id_, size), small, len(small[0]))
        return small

    def _candidates(self, id_: int) -> list[ShardRecord]:
        """The shards that may hold an id: ids ascend from shard to shard, repair shards are searched too."""
        in_order = self._in_order  # read once: another thread may reopen the store
        place = bisect_left(in_order, id_, key=self._last_id)
        return in_order[place : place + 1] + self._repairs

    def _last_id(self, shard: ShardRecord) -> int:
        last = self._last.get(shard.sha256)
        if last is None:
            with self.store.open_shard(shard) as file:
                about = file.metadata
            column = about.schema.names.index("row_id")
            statistics = about.row_group(about.num_row_groups - 1).column(column).statistics
            if statistics is not None and statistics.has_min_max:
                last = int(statistics.max)
            else:
                last = int(self._table(shard)["row_id"][-1].as_py())
            self._last[shard.sha256] = last
        return last

    def _table(self, shard: ShardRecord) -> pa.Table:
        table = self._tables.get(shard.sha256)
        if table is None:
            with self.store.open_shard(shard) as file:
                table = file.read(columns=["row_id", "uri", "labels", "code"]).combine_chunks()
            self._tables.put(shard.sha256, table, table.nbytes)
        return table


def shrink(picture: bytes, size: int = THUMBNAIL) -> tuple[bytes, str]:
    """(bytes, media type): JPEG within ``size`` x ``size`` pixels; PNG for tiny pictures, kept exact."""
    from PIL import Image

    pixels = Image.fromarray(decode(picture, at_least=size, max_pixels=MAX_PIXELS))
    sink = io.BytesIO()
    if max(pixels.size) <= 64:
        pixels.save(sink, "PNG")
        return sink.getvalue(), "image/png"
    pixels.thumbnail((size, size))
    pixels.save(sink, "JPEG", quality=85)
    return sink.getvalue(), "image/jpeg"


def _without_options(uri: str | None) -> str | None:
    """A uri without what follows ``?``: that may hold an endpoint or a key."""
    return uri.partition("?")[0] if uri and storage.is_uri(uri) else uri


class _Cache:
    """Least recently used values up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Any, value: Any, size: int) -> None:
        with self._lock:
            if key in self._kept:
                self.bytes -= self._kept.pop(key)[1]
            self._kept[key] = (value, size)
            self.bytes += size
            while self.bytes > self.max_bytes and len(self._kept) > 1:
                self.bytes -= self._kept.popitem(last=False)[1][1]
