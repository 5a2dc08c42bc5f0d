"""The duplicates of a code store as an artefact of a run: pairs, clusters, and what would be removed.

    OUT/duplicates.json      settings, counts, lineage; written last
    OUT/pairs/*.parquet      a, b, distance
    OUT/confirmed/*.parquet  instead, where pairs were confirmed: those that were
    OUT/clusters.parquet     row_id, cluster, size, representative: one row per item that has a duplicate
    OUT/matches.parquet      instead, where a store was compared with another: row_id, nearest, distance

A cluster is a connected component of the pairs, named by its smallest row id. Of each cluster one item, the
representative, is kept; the others would be removed. Of a comparison, the items that have a match would.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hashnet.data import FORMATS, Manifest, fetch_images
from hashnet.dedup.blocks import FIX, PAIRS, BlockRecord, read_table, write_table
from hashnet.dedup.pairs import connected_components
from hashnet.errors import BadImage, DataError, FormatError
from hashnet.io import Artefact, counted, storage

CLUSTERS, MATCHES, CONFIRMED = "clusters.parquet", "matches.parquet", "confirmed"
FIRST, LARGEST = "first", "largest"  # ways to choose a representative, beside a column's name
# Shares of the rows: where more would be removed, they are rarely all copies.
MANY, MANY_CONFIRMED = 0.05, 0.5


@dataclass(frozen=True)
class DuplicatesInfo:
    """What was found. ``n_at`` counts the pairs at each distance 0 … radius.

    ``complete_radius`` is the radius within which every pair is in the files: smaller than ``radius`` where
    ``max_pairs`` cut them. Clusters always follow from all pairs within ``radius``.
    """

    radius: int
    complete_radius: int
    n_rows: int
    n_against: int | None  # rows of the store it was compared with
    n_bits: int
    n_at: tuple[int, ...] = ()
    n_pairs: int = 0  # in the files
    n_clusters: int = 0
    n_near: int = 0  # items of the store that have a near-duplicate
    n_removed: int = 0
    keep: str = FIRST
    confirm: str | None = None  # by what pairs were confirmed
    n_candidates: int | None = None  # pairs within the radius before that

    @property
    def warning(self) -> str | None:
        """What to do where so many rows would be removed that they are hardly all copies."""
        if self.n_removed <= (MANY if self.confirm is None else MANY_CONFIRMED) * self.n_rows:
            return None
        told = f"{self.n_removed:,} of {self.n_rows:,} rows would be removed: so many are rarely all copies; "
        if self.confirm is not None:
            return told + "use a larger min_similarity, a smaller radius or more bits"
        where = "" if self.n_against is None else " (with against=query)"  # other stores have no vectors here
        return told + (
            f"use confirm=vectors{where}, which keeps the pairs whose vectors agree, too, "
            "or a smaller radius or more bits"
        )

    @property
    def sentence(self) -> str:
        """What was found, in short."""
        candidates = sum(self.n_at) if self.n_candidates is None else self.n_candidates
        confirmed = "" if self.n_candidates is None else f", {sum(self.n_at):,} confirmed"
        pairs = f"{counted(candidates, 'pair')} within {counted(self.radius, 'bit')}{confirmed}"
        return f"{pairs}; {self.n_removed:,} of {self.n_rows:,} rows would be removed"


@dataclass(frozen=True)
class Duplicates:
    """Opened duplicates: ``info``, and the tables."""

    uri: str
    info: DuplicatesInfo
    files: dict[str, str]  # → sha256
    lineage: dict[str, Any]

    def pairs(self) -> Iterator[pa.Table]:
        """Tables of a, b, distance, one per pair of blocks."""
        for name in self.files:
            if name not in (CLUSTERS, MATCHES):
                yield self._table(name)

    def clusters(self) -> pa.Table:
        """row_id, cluster, size, representative; by cluster, then row id."""
        return self._table(CLUSTERS)

    def matches(self) -> pa.Table:
        """row_id, nearest, distance of the items that have a match in the other store, by row id."""
        return self._table(MATCHES)

    def _table(self, name: str) -> pa.Table:
        return read_table(self.uri, name, self.files[name])

    def removed(self) -> np.ndarray:
        """Row ids, int64 ascending, of the items that are not kept."""
        if self.info.n_against is not None:
            return self.matches()["row_id"].to_numpy()
        table = self.clusters()
        ids, kept = table["row_id"].to_numpy(), table["representative"].to_numpy()
        return np.sort(ids[ids != kept])


class DuplicatesArtefact(Artefact):
    """RUN/duplicates."""

    kind, header_file = "duplicates", "duplicates.json"
    made_by, fix = "find them with jobs/dedup.py", FIX

    def open(self) -> Duplicates:
        values = self.read()
        try:
            known = {field.name for field in dataclasses.fields(DuplicatesInfo)}
            about = {name: value for name, value in values["info"].items() if name in known}
            info = DuplicatesInfo(**{**about, "n_at": tuple(about["n_at"])})
            for name in values["files"]:
                plain = name.removeprefix(f"{PAIRS}/").removeprefix(f"{CONFIRMED}/")
                storage.check_plain_name(plain, self.header_uri)
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self.header_uri} is damaged: {error!r} is missing or wrong") from error
        return Duplicates(self.uri, info, dict(values["files"]), dict(values["lineage"]))

    def write(self, info: DuplicatesInfo, files: Mapping[str, str], lineage: Mapping[str, Any]) -> Duplicates:
        self.write_header({"info": dataclasses.asdict(info), "files": dict(files)}, lineage=lineage)
        return self.open()

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        return dict(values["files"])

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(values["info"])


def find_clusters(folder: str, records: Sequence[BlockRecord]) -> tuple[np.ndarray, np.ndarray]:
    """(row ids, clusters) of everything that the records' links connect."""
    links = [
        read_table(folder, name, record.files[name]).select(["a", "b"])
        for record in records
        for name in record.files
        if record.links_file not in record.files or name == record.links_file
    ]
    table = pa.concat_tables(links) if links else pa.table({"a": pa.array([], pa.int64()), "b": []})
    return connected_components(table["a"].to_numpy(), table["b"].to_numpy())


def confirm_pairs(
    folder: str, records: Sequence[BlockRecord], confirm: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> list[BlockRecord]:
    """Records of the pairs that are confirmed, in files of their own; each is linked to itself alone."""
    found = []
    for record in records:
        table = read_table(folder, record.pairs_file, record.files[record.pairs_file])
        table = table.filter(pa.array(confirm(table["a"].to_numpy(), table["b"].to_numpy())))
        name = f"{CONFIRMED}/{record.name}.parquet"
        n_at = np.bincount(table["distance"].to_numpy(), minlength=len(record.n_at))
        files = {name: write_table(folder, name, table)}
        found.append(dataclasses.replace(record, n_at=tuple(n_at.tolist()), n_kept=len(table), files=files))
    return found


def paired_ids(folder: str, records: Sequence[BlockRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64, ascending, that are on the left and on the right of any pair."""
    left, right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for record in records:
        table = read_table(folder, record.pairs_file, record.files[record.pairs_file])
        left.append(pc.unique(table["a"]).to_numpy())
        right.append(pc.unique(table["b"]).to_numpy())
    return np.unique(np.concatenate(left)), np.unique(np.concatenate(right))


def representatives(ids: np.ndarray, clusters: np.ndarray, score: np.ndarray | None) -> np.ndarray:
    """int64 (m,): the item that each item's cluster keeps: of the greatest score, else the smallest id.

    >>> representatives(np.array([1, 5, 7]), np.array([1, 1, 7]), np.array([2.0, 9.0, 0.0])).tolist()
    [5, 5, 7]
    """
    score = np.zeros(len(ids)) if score is None else np.nan_to_num(score, nan=-np.inf)
    order = np.lexsort((ids, -score, clusters))
    first = np.ones(len(ids), dtype=bool)
    first[1:] = clusters[order][1:] != clusters[order][:-1]
    named = np.searchsorted(clusters[order][first], clusters)
    return ids[order][first][named]


def write_clusters(folder: str, ids: np.ndarray, clusters: np.ndarray, kept: np.ndarray) -> str:
    """Writes clusters.parquet, by cluster and row id; returns its sha256."""
    _, place, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    order = np.lexsort((ids, clusters))
    table = pa.table(
        {
            "row_id": ids[order],
            "cluster": clusters[order],
            "size": sizes[place][order].astype(np.int64),
            "representative": kept[order],
        }
    )
    return write_table(folder, CLUSTERS, table)


def cut_pairs(folder: str, records: Sequence[BlockRecord], radius: int) -> list[BlockRecord]:
    """The records, after all pairs beyond the radius were dropped from the files."""
    cut = []
    for record in records:
        name = record.pairs_file
        if record.n_kept > sum(record.n_at[: radius + 1]):
            table = read_table(folder, name, record.files[name])
            table = table.filter(pc.less_equal(table["distance"], radius))
            files = {**record.files, name: write_table(folder, name, table)}
            record = dataclasses.replace(record, n_kept=len(table), files=files).save(folder)
        cut.append(record)
    return cut


def write_matches(folder: str, records: Sequence[BlockRecord]) -> tuple[int, str]:
    """Writes matches.parquet, each item of the store with its nearest match; returns (rows, sha256)."""
    best = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("distance", pa.int32())]).empty_table()
    for record in records:
        name = record.pairs_file if record.pairs_file in record.files else next(iter(record.files))
        found = read_table(folder, name, record.files[name])
        both = pa.concat_tables([best, found])
        order = np.lexsort((both["b"].to_numpy(), both["distance"].to_numpy(), both["a"].to_numpy()))
        a = both["a"].to_numpy()[order]
        best = both.take(pa.array(order[np.diff(a, prepend=-1) != 0]))
    best = best.rename_columns(["row_id", "nearest", "distance"])
    return len(best), write_table(folder, MATCHES, best)


def scores(
    keep: str, manifest: Manifest | None, ids: np.ndarray, base_uri: str | None = None
) -> np.ndarray | None:
    """float64 (n,): what the representative has most of, pixels or a column's value; None keeps the first id.

    ``ids`` int64 ascending. A picture that cannot be read has 0 pixels, a missing value is less than any.
    """
    if keep == FIRST:
        return None
    if manifest is None:
        raise DataError(f"keep={keep} needs the run's manifest, which is not there; use keep={FIRST}")
    names = manifest.schema.names
    if keep != LARGEST:
        if keep not in names:
            raise DataError(
                f"keep={keep}: the manifest has no such column; use {FIRST}, {LARGEST} or one of "
                f"{', '.join(names)}"
            )
        tables = manifest.rows_by_id(ids, [keep])
        return np.concatenate([np.zeros(0), *(_numbers(table[keep], keep) for table in tables)])
    if manifest.modality != "image":
        raise DataError(
            f"keep={LARGEST} compares pictures, but the manifest holds {manifest.modality}; use {FIRST}"
        )
    columns = [name for name in ("uri", "image") if name in names]
    pixels: list[int] = []
    for first in range(0, len(ids), 1024):
        for table in manifest.rows_by_id(ids[first : first + 1024], columns):
            pixels += map(_pixels, fetch_images(table, base_uri))
    return np.array(pixels, dtype=np.float64)


def _pixels(data: bytes | BadImage) -> int:
    from PIL import Image

    if isinstance(data, BadImage):
        return 0
    try:
        width, height = Image.open(io.BytesIO(data), formats=FORMATS).size
    except Exception:  # a damaged header may raise nearly anything
        return 0
    return width * height


def _numbers(column: pa.ChunkedArray, name: str) -> np.ndarray:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"keep={name}: the column holds {column.type}, not numbers")
    return column.cast(pa.float64()).fill_null(np.nan).to_numpy()


def finish(
    artefact: DuplicatesArtefact,
    info: DuplicatesInfo,
    records: Sequence[BlockRecord],
    max_pairs: int | None,
    lineage: Mapping[str, Any],
    score: Callable[[np.ndarray], np.ndarray | None],
    confirm: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Duplicates:
    """Writes clusters or matches and the header, from the records of all tasks.

    ``info`` holds the settings; its counts are filled in. ``score`` gives the scores of row ids, ``confirm``
    decides which pairs (a, b) count.
    """
    folder = artefact.uri
    if confirm is not None:
        candidates = sum(record.n_kept for record in records)
        info = dataclasses.replace(info, n_candidates=candidates)
        records = confirm_pairs(folder, records, confirm)
    n_at = np.array([record.n_at for record in records]).sum(axis=0)
    complete = len(n_at) - 1
    if max_pairs is not None:
        complete = int((np.cumsum(n_at) <= max_pairs).sum()) - 1
        records = cut_pairs(folder, records, complete)
    files = {
        name: sha256
        for record in records
        for name, sha256 in record.files.items()
        if name != record.links_file
    }
    if info.n_against is None:
        ids, clusters = find_clusters(folder, records)
        kept = representatives(ids, clusters, score(ids))
        files[CLUSTERS] = write_clusters(folder, ids, clusters, kept)
        n_near, n_clusters = len(ids), len(np.unique(clusters))
        n_removed = n_near - n_clusters
    else:
        n_near, files[MATCHES] = write_matches(folder, records)
        n_clusters, n_removed = 0, n_near
    found = dataclasses.replace(
        info,
        complete_radius=complete,
        n_at=tuple(n_at.tolist()),
        n_pairs=int(n_at[: complete + 1].sum()),
        n_clusters=n_clusters,
        n_near=n_near,
        n_removed=n_removed,
    )
    return artefact.write(found, files, lineage)
