"""Features of a frozen backbone, kept for the run: each picture passes through the backbone once.

    features = BackboneFeatures(model, manifest, folder="runs/pets/cache")
    values, usable = features(row_ids, read)      # from the cache, or computed and kept
    values, usable = features.of_view(seed, 0)(row_ids, read)      # of augmented pictures that ``read`` makes

Training, measuring, encoding, the queries of an evaluation and a comparison share them. What they depend on
is their key: the backbone's weights, the preprocessing, the engine, and the manifest part and row of the
picture. A file is written completely or not at all and is named by the sha256 of its content: one that does
not match its name is not used. The folder may be deleted at any time.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import torch

from hashnet.data import PREPROCESS_VERSION, Manifest
from hashnet.encoding.engines import Engine
from hashnet.errors import StorageError
from hashnet.io import storage
from hashnet.models import HashModel

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30  # of one manifest: 200,000 pictures of EfficientNet-Lite; more are not kept
FILE_ROWS = 4096
Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # positions → (uint8 pixels, bool usable)


class FeatureCache:
    """Features (n, width) of ``dtype`` by row id, of one manifest and one way to compute them (``key``)."""

    def __init__(
        self, folder: str, manifest: Manifest, width: int, key: str, dtype: type[np.floating] = np.float32
    ) -> None:
        self.folder, self.width = storage.join(folder, f"features-{key[:16]}"), width
        self.dtype = dtype
        self._parts = manifest.parts
        self._first = np.array([part.first_row_id for part in manifest.parts], dtype=np.int64)
        self._blocks: list[tuple[np.ndarray, np.ndarray]] | None = None  # (row ids, ascending; features)

    def get(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(features (n, width), bool (n,): rows that are there; the others are zeros)."""
        if self._blocks is None:
            self._blocks = list(self._read())
        features, found = np.zeros((len(row_ids), self.width), self.dtype), np.zeros(len(row_ids), bool)
        for ids, values in self._blocks:
            at = np.searchsorted(ids, row_ids).clip(max=len(ids) - 1)
            here = (ids[at] == row_ids) & ~found
            features[here], found = values[at[here]], found | here
        return features, found

    def put(self, row_ids: np.ndarray, features: np.ndarray) -> None:
        """Keeps the features of these rows; storage that refuses them is reported, not an error."""
        order = np.argsort(row_ids)
        part_of = np.searchsorted(self._first, row_ids[order], side="right") - 1
        for number in np.unique(part_of):
            rows = order[part_of == number]
            ids, values = row_ids[rows].astype(np.int64), features[rows].astype(self.dtype)
            data = io.BytesIO()
            np.savez(data, row_ids=ids, features=values)
            name = f"{self._parts[number].sha256[:16]}-{hashlib.sha256(data.getvalue()).hexdigest()}.npz"
            try:
                storage.write_bytes(storage.join(self.folder, name), data.getvalue())
            except StorageError as error:
                log.warning("features are not kept for later: %s", error)
            if self._blocks is not None:
                self._blocks.append((ids, values))

    def _read(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        known = {part.sha256[:16] for part in self._parts}
        for name in storage.list_names(self.folder):
            part, _, rest = name.partition("-")
            if part not in known or not rest.endswith(".npz"):
                continue
            data = storage.read_bytes(uri := storage.join(self.folder, name))
            if hashlib.sha256(data).hexdigest() != rest.removesuffix(".npz"):
                log.warning("%s is damaged; its features are computed again", uri)
                continue
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                yield arrays["row_ids"], arrays["features"]


class BackboneFeatures:
    """Callable: the backbone's features of pictures of a manifest, each computed once.

    ``engine`` is an Engine's; without ``manifest`` and ``folder`` nothing is kept. The backbone's weights
    must not change any more; the head may. ``dtype`` float16 halves the space of activations, of which a
    picture has many.
    """

    def __init__(
        self,
        model: HashModel,
        manifest: Manifest | None = None,
        *,
        engine: str = "auto",
        folder: str | None = None,
        base_uri: str | None = None,
        dtype: type[np.floating] = np.float32,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.engine = Engine(model, engine)
        self.width, self.dtype = model.spec.n_features, dtype
        self._cache: FeatureCache | None = None
        self._open: Callable[[tuple[int, int] | None], FeatureCache] | None = None
        size = np.dtype(dtype).itemsize * self.width
        if folder is not None and manifest is not None and size * len(manifest) <= max_bytes:

            def open_cache(view: tuple[int, int] | None) -> FeatureCache:
                key = _key(model, self.engine, base_uri, view)
                return FeatureCache(folder, manifest, self.width, key, dtype)

            self._open, self._cache = open_cache, open_cache(None)

    def of_view(self, seed: int, view: int) -> BackboneFeatures:
        """The same for the pictures as training's transform shows them at (seed, epoch ``view``)."""
        other = copy.copy(self)
        other._cache = self._open((seed, view)) if self._open else None
        return other

    def __call__(
        self, row_ids: np.ndarray, read: Read, on_rows: Callable[[int], None] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(features (n, width), bool (n,): rows whose picture can be read and has finite features).

        ``read`` decodes the pictures at these positions of ``row_ids``, one batch ahead on a thread of its
        own; ``on_rows`` gets the number of rows of each step.
        """
        features = np.zeros((len(row_ids), self.width), dtype=self.dtype)
        usable = np.zeros(len(row_ids), dtype=bool)
        if self._cache is not None:
            features, usable = self._cache.get(row_ids)
            if on_rows and usable.any():
                on_rows(int(usable.sum()))
        missing = np.flatnonzero(~usable)
        kept = 0  # of the missing ones, those that the cache has now
        done = 0
        for rows, values, good in self._computed(missing, read):
            values = values.astype(self.dtype, copy=False)
            usable[rows] = good & np.isfinite(values).all(axis=1)
            features[rows] = np.where(usable[rows, None], values, 0)
            done += len(rows)
            if on_rows:
                on_rows(len(rows))
            if done - kept >= FILE_ROWS or done == len(missing):
                self._keep(row_ids, features, usable, missing[kept:done])
                kept = done
        return features, usable

    def missing(self, row_ids: np.ndarray) -> int:
        """How many of these rows would have to be computed."""
        return len(row_ids) - int(self._cache.get(row_ids)[1].sum()) if self._cache else len(row_ids)

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Logits, float32 (n, n_bits), of features, with the model's head as it is now."""
        return self.engine.head(features)

    def _computed(
        self, missing: np.ndarray, read: Read
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(rows, features, bool: readable) of each batch, while the next one is decoded on a thread."""
        readable = np.zeros(len(missing), dtype=bool)

        def decode(start: int, stop: int) -> np.ndarray:
            pixels, readable[start:stop] = read(missing[start:stop])
            return pixels

        with ThreadPoolExecutor(1, thread_name_prefix="decode") as pool:
            for start, stop, values in self.engine.stream(decode, len(missing), pool.submit):
                yield missing[start:stop], values, readable[start:stop]

    def _keep(self, row_ids: np.ndarray, features: np.ndarray, usable: np.ndarray, rows: np.ndarray) -> None:
        rows = rows[usable[rows]]
        if self._cache is not None and len(rows):
            self._cache.put(row_ids[rows], features[rows])


def _key(model: HashModel, engine: Engine, base_uri: str | None, view: tuple[int, int] | None) -> str:
    """sha256 of what a picture's features depend on, besides the picture."""
    assert model.spec.preprocess is not None
    digest = hashlib.sha256()
    preprocess = model.spec.preprocess.to_dict()
    if view is None:  # the centre, whatever training does
        del preprocess["flip"], preprocess["min_area"]
    about = {
        "preprocess": [PREPROCESS_VERSION, preprocess],
        "view": view,
        "engine": asdict(engine.spec),
        "torch": torch.__version__,
        "base_uri": base_uri,
    }
    digest.update(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(model.backbone.state_dict().items()):
        values = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {values.dtype} {values.shape} ".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()
