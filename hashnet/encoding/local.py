"""LocalEncoder: encodes tasks in one process, and takes the features of pictures that are kept.

For few rows, as starting actors would take longer; and where the features of all pictures are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from hashnet.data import fetch_images
from hashnet.encoding.encoder import Encoder
from hashnet.encoding.feature_cache import BackboneFeatures
from hashnet.encoding.worker import EncodeTask, RowReader, encode_features, with_output
from hashnet.io import rechunk
from hashnet.kernels import default_threads
from hashnet.models import BundleInfo, HashModel

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
            assert info.preprocess is not None
            self._preprocess = info.preprocess
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
            pixels, errors = self._preprocess.eval_many(files, threads=default_threads())
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
