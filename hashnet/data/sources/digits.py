"""``digits``: scikit-learn's 1,797 real handwritten digits, 8 x 8 pixels, ten classes, no download."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from hashnet import labels as label_sets
from hashnet.data.writer import SourceRows
from hashnet.io import key

DEFAULTS = {"n_query": 197, "n_train": 1000}  # 1,600 are left as database


@dataclass(frozen=True)
class Options:
    modality: str = key(
        "image", "8 x 8 pictures, or their 64 pixels as features", choices=("image", "features")
    )


def load(options: Options) -> SourceRows:
    """Digits as PNG bytes inside the manifest, or as float32 features (64,) in 0..1."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    n = len(digits.target)
    uris = pa.array([f"digits/{i:04d}.png" for i in range(n)])
    labels = label_sets.to_lists(digits.target)
    rows = partial(SourceRows, n=n, labels=labels, n_classes=10, class_names=tuple("0123456789"), names=uris)
    if options.modality == "features":
        features = (digits.data / 16).astype(np.float32)  # (1797, 64); ink goes from 0 to 16
        column = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), 64)
        table = pa.table({"uri": uris, "feature": column})
        return rows(payload=lambda a, b: table[a:b], modality="features", n_features=64)
    pictures = (digits.images * (255 / 16)).round().astype(np.uint8)  # (1797, 8, 8)
    table = pa.table({"uri": uris, "image": pa.array([_png(picture) for picture in pictures], pa.binary())})
    return rows(payload=lambda a, b: table[a:b], inline=True)


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
