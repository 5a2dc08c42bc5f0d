"""IndexFeatures: the vectors by which hits are rescored; a feature store, and layers of what was added since.

    "features" of index.json: {"store": {"uri": "../features", "sha256": …}, "layers": [{"file": …, …}], …}

The store is only referred to: it may be larger than memory, and its rows are read in place. A layer
holds the vectors of items that were added to the index, as one more file of it. The newest vector of an id
counts; vectors of removed items do no harm.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hashnet.errors import FormatError, HashnetError, IndexMismatch, LineageMismatch
from hashnet.index.artefact import BUILD_AGAIN, HEADER
from hashnet.io import storage
from hashnet.store import FeatureStore, Vectors, read_vectors, write_vectors


@dataclass(frozen=True, eq=False)
class StoreReference:
    """A feature store by its place and content; it is opened when it is needed."""

    uri: str
    sha256: str

    @cached_property
    def store(self) -> FeatureStore:
        """LineageMismatch if another store is there now, FormatError if it is missing."""
        try:
            store = FeatureStore.open(self.uri)
        except HashnetError as error:
            raise FormatError(f"the features of this index cannot be read: {error}") from error
        if store.sha256 != self.sha256:
            raise LineageMismatch(
                f"{self.uri} holds other vectors than those this index was built with "
                f"({store.sha256[:12]}…, not {self.sha256[:12]}…); {BUILD_AGAIN}"
            )
        return store

    @cached_property
    def vectors(self) -> Vectors:
        return self.store.vectors()


@dataclass(frozen=True, eq=False)
class Layer:
    """Vectors of items added to an index; ``record`` is its entry in index.json, None until it is written."""

    vectors: Vectors
    record: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class IndexFeatures:
    """Vectors of ``width`` values, stored as ``dtype``, of every item of an index."""

    width: int
    dtype: str
    store: StoreReference | None = None
    layers: tuple[Layer, ...] = ()

    @classmethod
    def of_store(cls, store: FeatureStore, lineage: Mapping[str, Any]) -> IndexFeatures:
        """Of a feature store; LineageMismatch unless it is of the model and rows that ``lineage`` names."""
        found = {"model_sha256": store.lineage.get("model_sha256"), "rows_sha256": store.rows_sha256}
        what = {"model_sha256": "another model", "rows_sha256": "other rows, or another order of them,"}
        for name, here in found.items():
            expected = lineage.get(name)
            if expected is not None and here is not None and expected != here:
                raise LineageMismatch(
                    f"{store.uri} holds vectors of {what[name]} than the index ({here[:12]}…, not "
                    f"{expected[:12]}…); encode codes and features together (output=codes,features)"
                )
        store.vectors()  # refuses one whose rows cannot be read alone
        return cls(store.n_features, store.dtype, StoreReference(storage.absolute(store.uri), store.sha256))

    @classmethod
    def of_arrays(cls, ids: np.ndarray, vectors: np.ndarray, dtype: str = "float16") -> IndexFeatures:
        """Of vectors float32 (n, width)."""
        layer = Layer(Vectors.of_arrays(ids, vectors, dtype))
        return cls(vectors.shape[1], dtype, None, (layer,))

    @property
    def model_sha256(self) -> str | None:
        """The model whose features they are; None for vectors from elsewhere."""
        return None if self.store is None else self.store.store.lineage.get("model_sha256")

    def newest_first(self) -> Iterator[Vectors]:
        yield from (layer.vectors for layer in reversed(self.layers))
        if self.store is not None:
            yield self.store.vectors

    def added(self, ids: np.ndarray, vectors: np.ndarray) -> IndexFeatures:
        """With one more layer. Those before it that are no larger are merged into it, as segments are."""
        kept = list(self.layers)
        while kept and len(kept[-1].vectors) <= len(ids):
            older = kept.pop().vectors
            still = older.ids[~np.isin(older.ids, ids)]
            ids = np.concatenate([still, ids])
            vectors = np.concatenate([older.take(still), vectors])
        layer = Layer(Vectors.of_arrays(ids, vectors, self.dtype))
        return dataclasses.replace(self, layers=(*kept, layer))

    def in_layers(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): whether the vector of each id was given since the store was made."""
        found = np.zeros(len(ids), dtype=bool)
        for layer in self.layers:
            found |= layer.vectors.find(ids) >= 0
        return found

    def scores(self, queries: np.ndarray, ids: np.ndarray, metric: str) -> np.ndarray:
        """float32 (q, m) of queries float32 (q, width) and the items with ids (q, m); -inf for id -1."""
        scores = np.full(ids.shape, -np.inf, dtype=np.float32)
        missing = ids >= 0
        for vectors in self.newest_first():
            if not missing.any():
                break
            found = vectors.scores(queries, np.where(missing, ids, -1), metric)
            here = found > -np.inf
            scores[here] = found[here]
            missing &= ~here
        _refuse_missing(ids, missing)
        return scores

    def take(self, ids: np.ndarray) -> np.ndarray:
        """The vectors of these ids, float32 (n, width)."""
        taken = np.empty((len(ids), self.width), dtype=np.float32)
        missing = np.ones(len(ids), dtype=bool)
        for vectors in self.newest_first():
            here = missing & (vectors.find(ids) >= 0)
            taken[here] = vectors.take(ids[here])
            missing &= ~here
        _refuse_missing(ids, missing)
        return taken

    def blocks(self, ids: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, vectors float32) of these ids, ascending, block by block, each id once."""
        shown = np.zeros(len(ids), dtype=bool)
        for vectors in self.newest_first():
            for block_ids, block in vectors.blocks():
                place = np.minimum(np.searchsorted(ids, block_ids), len(ids) - 1)
                wanted = (ids[place] == block_ids) & ~shown[place]
                shown[place[wanted]] = True
                if wanted.any():
                    yield block_ids[wanted], block[wanted]

    def check_ids(self, ids: np.ndarray) -> None:
        """IndexMismatch where one of these ids has no vector."""
        missing = np.ones(len(ids), dtype=bool)
        for vectors in self.newest_first():
            missing &= vectors.find(ids) < 0
        if missing.any():
            raise IndexMismatch(
                f"{int(missing.sum())} of the {len(ids)} items have no vector, id {ids[missing][0]} for one; "
                "encode codes and features of the same rows (output=codes,features)"
            )

    # -- on disk

    def written(self, folder: str, version: int) -> tuple[IndexFeatures, dict[str, Any]]:
        """(the same with the records of its layers, its entry in index.json), after writing new layers."""
        layers = []
        for number, layer in enumerate(self.layers):
            record = layer.record
            if record is None:
                file = f"features-{version:06d}" + (f"-{number}" if number else "") + ".parquet"
                ids = layer.vectors.ids
                sha256 = write_vectors(storage.join(folder, file), ids, layer.vectors.take(ids), self.dtype)
                record = {"file": file, "sha256": sha256, "rows": len(ids)}
            layers.append(dataclasses.replace(layer, record=record))
        store = None
        if self.store is not None:
            store = {"uri": _relative(self.store.uri, folder), "sha256": self.store.sha256}
        entry = {"width": self.width, "dtype": self.dtype, "store": store}
        entry["layers"] = [layer.record for layer in layers]
        return dataclasses.replace(self, layers=tuple(layers)), entry

    @classmethod
    def read(cls, entry: Mapping[str, Any], folder: str, known: IndexFeatures | None) -> IndexFeatures:
        """What an entry of index.json names; files that ``known`` has opened are not opened again."""
        store = None
        if entry["store"] is not None:
            store = StoreReference(_absolute(entry["store"]["uri"], folder), entry["store"]["sha256"])
            if known is not None and known.store is not None and known.store.sha256 == store.sha256:
                store = known.store
        opened = {layer.record["sha256"]: layer for layer in known.layers if layer.record} if known else {}
        layers = []
        for record in entry["layers"]:
            layer = opened.get(record["sha256"])
            if layer is None:
                where = storage.join(folder, storage.check_plain_name(record["file"], f"{folder}/{HEADER}"))
                vectors = read_vectors(where, record["sha256"], entry["width"], entry["dtype"])
                layer = Layer(vectors)
            layers.append(dataclasses.replace(layer, record=dict(record)))
        return cls(entry["width"], entry["dtype"], store, tuple(layers))

    def unsaved(self) -> IndexFeatures:
        """The same, with layers that are not written anywhere yet."""
        return dataclasses.replace(self, layers=tuple(Layer(layer.vectors) for layer in self.layers))

    def describe(self) -> dict[str, Any]:
        """What it is, as plain JSON-able values."""
        store = None if self.store is None else self.store.uri
        return {"width": self.width, "dtype": self.dtype, "store": store, "layers": len(self.layers)}


def _refuse_missing(ids: np.ndarray, missing: np.ndarray) -> None:
    if missing.any():
        raise FormatError(f"the features of this index lack id {ids[missing][0]}; {BUILD_AGAIN}")


def _relative(uri: str, folder: str) -> str:
    """``uri`` as seen from a folder, so that a run can be moved; as it is where they share no root."""
    here, there = storage.split_options(folder)[0], storage.split_options(uri)[0]
    root, _, inside = there.rpartition("://")
    folder_root, _, folder_inside = here.rpartition("://")
    if root != folder_root or inside.split("/")[0] != folder_inside.split("/")[0]:
        return uri
    return posixpath.relpath(inside, folder_inside)


def _absolute(uri: str, folder: str) -> str:
    if not uri.startswith(".."):
        return uri
    base, options = storage.split_options(folder)
    root, mark, inside = base.rpartition("://")
    return root + mark + posixpath.normpath(posixpath.join(inside, uri)) + options
