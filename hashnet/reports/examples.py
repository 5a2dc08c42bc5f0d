"""What a few queries retrieve: their ten nearest items, with pictures where there are any."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hashnet.codes import hamming_distances
from hashnet.data import Manifest, decode, fetch_images
from hashnet.errors import BadImage, HashnetError
from hashnet.metrics import tie_hash
from hashnet.store import CodeStore

log = logging.getLogger(__name__)

TOP = 10
SIDE = 96  # pixels of a thumbnail


@dataclass(frozen=True)
class Item:
    """One picture of the strip: ``picture`` is a data URI, or None where there is none."""

    row_id: int
    classes: str
    distance: int
    relevant: bool
    picture: str | None = None


@dataclass(frozen=True)
class Example:
    """A query with its nearest items. ``kind`` is best, median or worst (by AP)."""

    kind: str
    ap: float
    query: Item
    items: tuple[Item, ...]

    @property
    def precision(self) -> float:
        return sum(item.relevant for item in self.items) / max(len(self.items), 1)


def pick_queries(ap: Sequence[float], each: int = 2) -> list[tuple[str, int]]:
    """(kind, query) of the best, median and worst queries by AP; of equal ones the first count as better."""
    order = np.argsort(-np.asarray(ap), kind="stable")
    middle = max(0, (len(order) - each) // 2)
    picked: dict[int, str] = {}
    for kind, some in (("best", order[:each]), ("worst", order[::-1][:each]), ("median", order[middle:])):
        free = [int(i) for i in some if int(i) not in picked][:each]
        picked.update(dict.fromkeys(free, kind))
    rank = {"best": 0, "median": 1, "worst": 2}
    return sorted(
        ((kind, i) for i, kind in picked.items()),
        key=lambda pair: (rank[pair[0]], order.tolist().index(pair[1])),
    )


def nearest(
    store: CodeStore, codes: np.ndarray, labels: np.ndarray, seed: int = 0, k: int = TOP
) -> list[list[tuple[int, int, bool, np.ndarray]]]:
    """The k nearest of each query, ties by the hash MAP uses: (row id, distance, relevant, labels)."""
    best: list[list[tuple[int, int, int, bool, np.ndarray]]] = [[] for _ in codes]
    for ids, block, block_labels in store.blocks():
        assert block_labels is not None
        hashes = tie_hash(ids, seed)
        distances = hamming_distances(codes, block)  # (q, block)
        shared = labels.astype(np.float32) @ block_labels.T.astype(np.float32) > 0
        for i, row in enumerate(distances):
            for j in np.lexsort((hashes, row))[:k]:
                best[i].append(
                    (int(row[j]), int(hashes[j]), int(ids[j]), bool(shared[i, j]), block_labels[j])
                )
            best[i] = sorted(best[i], key=lambda found: found[:3])[:k]
    return [[(row_id, d, relevant, classes) for d, _, row_id, relevant, classes in found] for found in best]


def gather(
    store: CodeStore,
    queries: CodeStore,
    ap: Sequence[float],
    class_names: Sequence[str] | None,
    manifest: Manifest | None,
    seed: int = 0,
    base_uri: str | None = None,
) -> list[Example]:
    """The examples of a report; without a manifest of pictures they show classes alone."""
    picked = pick_queries(ap)
    rows = [i for _, i in picked]
    codes, all_labels, ids = queries.codes()[rows], queries.labels(), queries.ids()[rows]
    assert all_labels is not None
    labels = all_labels[rows]
    found = nearest(store, codes, labels, seed)
    wanted = {int(i) for i in ids} | {row_id for items in found for row_id, *_ in items}
    pictures = thumbnails(manifest, wanted, base_uri) if manifest is not None else {}

    def names(row: np.ndarray) -> str:
        return ", ".join(class_names[c] if class_names else str(c) for c in np.flatnonzero(row).tolist())

    return [
        Example(
            kind,
            float(ap[i]),
            Item(int(query_id), names(own), 0, True, pictures.get(int(query_id))),
            tuple(Item(r, names(classes), d, hit, pictures.get(r)) for r, d, hit, classes in items),
        )
        for (kind, i), query_id, own, items in zip(picked, ids, labels, found, strict=True)
    ]


def thumbnails(manifest: Manifest, row_ids: set[int], base_uri: str | None = None) -> dict[int, str]:
    """Row id → small picture as a data URI; rows whose picture cannot be had are left out."""
    if manifest.modality != "image":
        return {}
    columns = [name for name in ("row_id", "uri", "image") if name in manifest.schema.names]
    made: dict[int, str] = {}
    for row_id in sorted(row_ids):
        if not 0 <= row_id < len(manifest):
            continue
        try:  # a report without a picture is better than none
            # row ids are 0, 1, 2, …: a row's place is its id
            data = fetch_images(manifest.read(columns=columns, start=row_id, stop=row_id + 1), base_uri)[0]
            if not isinstance(data, BadImage):
                made[row_id] = _thumbnail(data)
        except HashnetError as error:
            log.info("no picture of row %d: %s", row_id, error)
    return made


def _thumbnail(data: bytes) -> str:
    from PIL import Image

    picture = Image.fromarray(decode(data, at_least=SIDE))
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    small = side < SIDE // 2  # pixels of tiny pictures stay pixels
    square = picture.crop((left, top, left + side, top + side)).resize(
        (SIDE, SIDE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    )
    buffer = io.BytesIO()
    if small:
        square.save(buffer, "PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    square.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
