"""Encoder: packed codes of pictures or feature rows. It reads a model bundle and writes nothing.

    encoder = Encoder.load("runs/demo/model")
    codes = encoder.encode(["cat.jpg", open("dog.jpg", "rb").read()])     # uint8 (2, n_bits // 8)

A picture's code depends on the picture, the model and the engine alone: neither on the batch it came in
nor on its neighbours (see ``hashnet.encoding.engines``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import numpy as np
import pyarrow as pa
from PIL.Image import Image

from hashnet import __version__
from hashnet.codes import pack_signs
from hashnet.data import fetch_images
from hashnet.encoding.engines import Engine, EngineSpec
from hashnet.encoding.feature_cache import BackboneFeatures
from hashnet.encoding.worker import EncodeTask, RowReader, encode_features, with_output
from hashnet.errors import BadImage, DataError, ModelError
from hashnet.io import as_array, rechunk, storage
from hashnet.kernels import default_threads
from hashnet.models import BundleInfo, HashModel, load_bundle
from hashnet.store import BIT_ORDER


class Encoder:
    """A model ready to encode on this machine; ``engine`` is how it runs (see ``encoding.engines``)."""

    def __init__(
        self, model: HashModel, info: BundleInfo, engine: str = "auto", batch_rows: int | None = None
    ) -> None:
        self.info = info
        self.n_bits = info.n_bits
        self.modality = info.modality
        self.model_sha256 = info.sha256
        self.preprocess = info.preprocess
        self.n_features = model.spec.n_features
        self._engine = Engine(model, engine, batch_rows)

    def __repr__(self) -> str:
        return f"Encoder({self.modality} to {self.n_bits} bits, engine {self.engine})"

    @classmethod
    def load(cls, model_uri: str, engine: str = "auto", batch_rows: int | None = None) -> Encoder:
        """The encoder of a model bundle.

        ``engine`` is a device (auto, cpu, cuda) or an engine's name, as in the lineage of codes.
        ``batch_rows`` is the number of rows of the fixed batch: small for a server of single queries. Codes
        made with two batch sizes differ only where a logit is within rounding of zero.
        """
        return cls(*load_bundle(str(model_uri)), engine=engine, batch_rows=batch_rows)

    @property
    def engine(self) -> str:
        """cuda, cuda-nvjpeg, cpu-fused, cpu-compiled or cpu-eager."""
        return self._engine.name

    @property
    def dtype(self) -> str:
        return self._engine.spec.dtype

    @property
    def batch_rows(self) -> int:
        """Rows of the fixed internal batch: the best number of rows to pass, or a multiple of it."""
        return self._engine.spec.batch_rows

    @property
    def lineage(self) -> dict[str, Any]:
        """What decides a code's bits, and the versions it was made with."""
        return code_lineage(self.info, self.engine, self.batch_rows)

    def encode(self, batch: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), of pictures or feature rows (see ``prepare``)."""
        return pack_signs(self.logits(batch))

    def logits(self, batch: Any) -> np.ndarray:
        """Logits z, float32 (n, n_bits)."""
        return self._engine.run(self.prepare(batch))

    def features(self, batch: Any) -> np.ndarray:
        """The backbone's features, float32 (n, n_features)."""
        return self._engine.run(self.prepare(batch), "features")

    def decode(self, pictures: Sequence[bytes | BadImage]) -> tuple[np.ndarray, dict[int, BadImage]]:
        """uint8 (n, 3, crop, crop), and the pictures that cannot be used by position (their pixels are 0)."""
        return self._engine.decode(pictures)

    def head(self, features: np.ndarray) -> np.ndarray:
        """Logits z, float32 (n, n_bits), of what ``features`` returned, equal to the pictures' own."""
        return self._engine.head(features)

    def prepare(self, batch: Any) -> np.ndarray:
        """What the model takes: uint8 (n, 3, crop, crop) or float32 (n, d).

        Pictures are one or a list of paths, bytes, PIL pictures or uint8 (3, crop, crop) arrays, or one
        uint8 (n, 3, crop, crop) array; features are an array (n, d), or (d,) for one row. Arrays may be
        torch tensors. A picture that cannot be used raises BadImage with its position. A PIL picture has
        its full size, while a large JPEG is decoded smaller from its bytes: pass paths or bytes where a
        code must equal the database's to the last bit.
        """
        if hasattr(batch, "detach"):
            batch = batch.detach().cpu().numpy()
        if self.modality == "features":
            return self._feature_rows(batch)
        if isinstance(batch, np.ndarray) and batch.ndim == 4:
            return self._check_pixels(batch)
        one_picture = (str, bytes, bytearray, memoryview, os.PathLike)  # some of these are sequences too
        single = isinstance(batch, one_picture) or not isinstance(batch, (Sequence, np.ndarray))
        if isinstance(batch, np.ndarray) and batch.ndim == 3:
            single = True
        items = [batch] if single else list(batch)
        rows = [self._picture(item, i) for i, item in enumerate(items)]
        crop = self._crop
        return np.stack(rows) if rows else np.zeros((0, 3, crop, crop), dtype=np.uint8)

    @property
    def _crop(self) -> int:
        assert self.preprocess is not None
        return self.preprocess.crop

    def _picture(self, item: Any, position: int) -> np.ndarray:
        assert self.preprocess is not None
        if hasattr(item, "detach"):
            item = item.detach().cpu().numpy()
        if isinstance(item, np.ndarray):
            return self._check_pixels(item[None])[0]
        name = f"picture {position}"
        if isinstance(item, (str, os.PathLike)):
            name = str(item)
            item = storage.read_bytes(str(item))
        elif isinstance(item, (bytearray, memoryview)):
            item = bytes(item)
        if not isinstance(item, (bytes, Image)):
            raise DataError(
                f"picture {position} is a {type(item).__name__}; "
                "pass a path, bytes, a PIL picture or a uint8 array"
            )
        try:
            if isinstance(item, Image):
                return self.preprocess.eval(item)
            pixels, bad = self.decode([item])
            if bad:
                raise bad[0]
            return pixels[0]
        except BadImage as error:
            raise BadImage(error.reason, f"{name}: {error.detail}") from error

    def _check_pixels(self, pixels: np.ndarray) -> np.ndarray:
        crop = self._crop
        if pixels.dtype.kind == "f" and pixels.ndim < 3:
            raise DataError(f"this model takes pictures, got feature rows: {pixels.dtype} {pixels.shape}")
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (3, crop, crop):
            raise DataError(
                f"pixels must be uint8 (n, 3, {crop}, {crop}), got {pixels.dtype} {pixels.shape}; "
                "pass paths, bytes or PIL pictures to have them resized"
            )
        return np.ascontiguousarray(pixels)  # torch takes no negative strides, as of pixels[::-1]

    def _feature_rows(self, batch: Any) -> np.ndarray:
        rows = as_array(batch, "feature rows")
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != self.n_features or rows.dtype.kind not in "fiu":
            raise ModelError(
                f"this model takes feature rows (n, {self.n_features}), got "
                + ("text" if rows.dtype.kind in "US" else f"{rows.dtype} {rows.shape}")
            )
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            raise DataError(f"feature row {int(finite.argmin())} holds NaN or infinity")
        return rows


def code_lineage(info: BundleInfo, engine: str, batch_rows: int | None = None) -> dict[str, Any]:
    """What decides the bits of the codes that a model makes on an engine, and the versions of the software.

    It is stored with the codes; ``batch_rows`` None is the engine's default.
    """
    packages = ("numpy", "pillow", "torch", "torchvision")
    averaged = info.preprocess is not None and info.preprocess.average_flip
    return {
        "model_sha256": info.sha256,
        "preprocess_version": info.preprocess_version,
        **({"average_flip": True} if averaged else {}),
        **asdict(EngineSpec.of(engine, info.modality, batch_rows)),
        "bit_order": BIT_ORDER,
        "versions": {"hashnet": __version__} | {name: metadata.version(name) for name in packages},
    }


# ---------------------------------------------------------------- in one process
# LocalEncoder: encodes tasks in one process, and takes the features of pictures that are kept.
#
# For few rows, as starting actors would take longer; and where the features of all pictures are there.

TABLE_ROWS = 512  # of a table: progress every few seconds


class LocalEncoder:
    """Encodes the tasks of ``reader`` with a model; ``cache`` is the folder of kept features."""

    def __init__(
        self, reader: RowReader, model: HashModel, info: BundleInfo, engine: str, cache: str
    ) -> None:
        self.reader = reader
        if info.modality == "features":
            self._encoder = Encoder(model, info, engine)
        else:
            self._features = BackboneFeatures(
                model, reader.manifest, engine=engine, folder=cache, base_uri=reader.base_uri
            )
        self._modality = info.modality

    def missing(self, tasks: list[EncodeTask]) -> int:
        """How many rows of the tasks have to be computed."""
        if self._modality == "features":
            return sum(task.stop - task.start for task in tasks)
        tables = [table for task in tasks for table in self.reader.rows(task, ["row_id"])]
        return self._features.missing(np.concatenate([table["row_id"].to_numpy() for table in tables]))

    def encode(self, task: EncodeTask, output: str) -> Iterator[pa.Table]:
        """Encoded tables of a task, which ``ShardCollector`` takes."""
        if self._modality == "features":
            for shard, table in encode_features(self.reader, task, self._encoder, output):
                yield table.append_column("shard", pa.array([shard.name] * len(table), pa.string()))
        else:
            for table in rechunk(self.reader.rows(task), TABLE_ROWS):
                yield self._pictures(table, task.shards[0].name, output)

    def _pictures(self, table: pa.Table, shard: str, output: str) -> pa.Table:
        bad: dict[int, str] = {}

        def read(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            files = fetch_images(table.take(at), self.reader.base_uri)
            pixels, errors = self._features.engine.decode(files, default_threads())
            bad.update({int(at[i]): error.reason for i, error in errors.items()})
            return pixels, np.array([i not in errors for i in range(len(at))])

        values, usable = self._features(table["row_id"].to_numpy(), read)
        reasons = [None if good else bad.get(i, "not_finite") for i, good in enumerate(usable)]
        kept = ("row_id", "uri", "labels", *self.reader.manifest.columns)
        columns = {name: table[name] for name in kept}
        columns |= {
            "shard": pa.array([shard] * len(table), pa.string()),
            "reason": pa.array(reasons, pa.string()),
        }

        def outputs(good: np.ndarray) -> dict[str, np.ndarray]:
            features = values[good]
            found = {"features": features} if output != "codes" else {}
            return found | ({"codes": self._features.logits(features)} if output != "features" else {})

        return with_output(pa.table(columns), outputs)
