"""Examples of retrieval: the ten nearest items of a few queries, with pictures where there are any."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hashnet.data import Manifest, decode, fetch_images
from hashnet.errors import BadImage, HashnetError
from hashnet.kernels import top_k
from hashnet.metrics import EvalReport, tie_hash
from hashnet.store import CodeStore

log = logging.getLogger(__name__)

TOP = 10
SIDE = 96  # pixels of a thumbnail


@dataclass(frozen=True)
class Tile:
    """One picture of an example; ``picture`` is a data URI, None where there is no picture."""

    row_id: int
    classes: str
    distance: int
    relevant: bool
    picture: str | None = None


@dataclass(frozen=True)
class Example:
    """A query with its nearest items. ``kind`` is best, median or worst, and the method's title; ``score`` is
    what queries were ordered by, as "AP 0.812"."""

    kind: str
    score: str
    query: Tile
    items: tuple[Tile, ...]

    @property
    def precision(self) -> float:
        return sum(item.relevant for item in self.items) / max(len(self.items), 1)


@dataclass(frozen=True)
class Neighbour:
    """An item near a query; ``labels`` is its multi-hot row."""

    row_id: int
    distance: int
    relevant: bool
    labels: np.ndarray


@dataclass(frozen=True)
class Pictures:
    """Where pictures and class names come from; without a manifest, examples show classes alone."""

    manifest: Manifest | None = None
    class_names: Sequence[str] | None = None
    base_uri: str | None = None  # folder that relative picture paths start from

    def names(self, labels: np.ndarray) -> str:
        """The class names of a multi-hot row."""
        classes = np.flatnonzero(labels).tolist()
        return ", ".join(self.class_names[c] if self.class_names else str(c) for c in classes)


def pick_queries(ap: Sequence[float], each: int = 2) -> list[tuple[str, int]]:
    """(kind, query) of the best, median and worst queries by AP; of equal ones the first is the better."""
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


def nearest_items(
    blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    codes: np.ndarray,
    labels: np.ndarray,
    seed: int,
) -> list[list[Neighbour]]:
    """The TOP nearest items of each query in blocks of (ids, codes, labels); ties are broken as MAP does."""
    best: list[list[tuple[int, int, Neighbour]]] = [[] for _ in codes]
    for ids, block, block_labels in blocks:
        assert block_labels is not None
        hashes = tie_hash(ids, seed)
        by_hash = np.argsort(hashes)  # rows in this order: equal distances come by hash
        positions, distances = top_k(block[by_hash], codes, min(TOP, len(ids)))
        for i, (rows, far) in enumerate(zip(by_hash[positions], distances, strict=True)):
            shared = (block_labels[rows] & labels[i]).any(axis=1)
            for j, distance, relevant in zip(rows, far, shared, strict=True):
                found = Neighbour(int(ids[j]), int(distance), bool(relevant), block_labels[j])
                best[i].append((found.distance, int(hashes[j]), found))
            best[i] = sorted(best[i], key=lambda ranked: ranked[:2])[:TOP]
    return [[found for _, _, found in ranked] for ranked in best]


def gather(store: CodeStore, queries: CodeStore, report: EvalReport, pictures: Pictures) -> list[Example]:
    """The examples of a report: its best, median and worst queries."""
    picked = pick_queries(report.ap)
    rows = [i for _, i in picked]
    codes, all_labels, ids = queries.codes()[rows], queries.labels(), queries.ids()[rows]
    assert all_labels is not None
    found = nearest_items(store.blocks(), codes, all_labels[rows], report.seed)
    asked = [Neighbour(int(i), 0, True, all_labels[row]) for i, row in zip(ids, rows, strict=True)]
    kinds = [(kind, ap_text(report.ap[i])) for kind, i in picked]
    return make_examples(kinds, asked, found, pictures)


def ap_text(ap: float) -> str:
    """An average precision as the heading of an example has it."""
    return f"AP {ap:.3f}"


def make_examples(
    kinds: list[tuple[str, str]], asked: list[Neighbour], found: list[list[Neighbour]], pictures: Pictures
) -> list[Example]:
    """Queries with what was found for each, as tiles; ``kinds`` are (kind, score)."""
    shown = {item.row_id for items in (asked, *found) for item in items}
    thumbs = thumbnails(pictures.manifest, shown, pictures.base_uri) if pictures.manifest is not None else {}

    def tile(item: Neighbour) -> Tile:
        what = pictures.names(item.labels) if item.labels.size else f"row {item.row_id}"
        return Tile(item.row_id, what, item.distance, item.relevant, thumbs.get(item.row_id))

    return [
        Example(kind, score, tile(query), tuple(map(tile, items)))
        for (kind, score), query, items in zip(kinds, asked, found, strict=True)
    ]


def thumbnails(manifest: Manifest, row_ids: set[int], base_uri: str | None = None) -> dict[int, str]:
    """Row id → small picture as a data URI; rows whose picture cannot be read are left out."""
    if manifest.modality != "image":
        return {}
    columns = [name for name in ("row_id", "uri", "image") if name in manifest.schema.names]
    made: dict[int, str] = {}
    for row_id in sorted(row_ids):
        if not 0 <= row_id < len(manifest):
            continue
        try:  # a report without one picture is better than no report
            # row ids are 0, 1, 2, …: a row's position is its id
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
    small = side < SIDE // 2  # tiny pictures are shown pixel by pixel, not blurred
    square = picture.crop((left, top, left + side, top + side)).resize(
        (SIDE, SIDE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    )
    buffer = io.BytesIO()
    if small:
        square.save(buffer, "PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    square.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
