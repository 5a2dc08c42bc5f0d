"""``cifar10``: the binary version of CIFAR-10 (data_batch_1.bin …); the pickled Python version is not read.

A picture is given by reference, its 3,072 bytes inside a batch file. Split as usual in hashing:
100 queries and 500 training images per class; everything that is not a query is the database.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hashnet.data.columns import lists_of_ids
from hashnet.data.fetch import byte_range_uris
from hashnet.data.writer import SourceRows, rows_of_uris
from hashnet.errors import DataError
from hashnet.io import REQUIRED, key, storage

DEFAULTS = {"query_per_class": 100, "train_per_class": 500}
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS  # a class byte, then planes of red, green and blue
FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Options:
    path: str = key(REQUIRED, "the unpacked folder cifar-10-batches-bin")


def load(options: Options) -> SourceRows:
    """Rows in the order of the files: the training batches, then the test batch."""
    files = [name for name in FILES if storage.exists(storage.join(options.path, name))]
    if not files:
        raise DataError(
            f"{options.path} has no {FILES[0]}; unpack cifar-10-binary.tar.gz, the binary version, "
            "and give its folder"
        )
    uris, classes, names = [], [], []
    for name in files:
        uri = storage.absolute(storage.join(options.path, name))
        data = np.frombuffer(storage.read_bytes(uri), dtype=np.uint8)
        if len(data) % RECORD or not len(data):
            raise DataError(
                f"{uri} has {len(data):,} bytes, not a multiple of {RECORD:,}: "
                "damaged, or not a CIFAR-10 batch"
            )
        ids = data[::RECORD]
        if ids.max() >= len(NAMES):
            row = int(np.argmax(ids >= len(NAMES)))
            raise DataError(
                f"{uri} record {row} has class {ids[row]}, CIFAR-10 has 10 (CIFAR-100 is another format)"
            )
        starts = np.arange(len(ids), dtype=np.int64) * RECORD + 1
        uris.append(byte_range_uris(uri, starts, PIXELS, raw="3x32x32"))
        classes.append(ids.astype(np.int32))
        names += [f"{name}/{i}" for i in range(len(ids))]
    labels = lists_of_ids(pa.array(np.concatenate(classes)))
    return rows_of_uris(
        pa.concat_arrays(uris), labels=labels, n_classes=len(NAMES), class_names=NAMES, names=pa.array(names)
    )
