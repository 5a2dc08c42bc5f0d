"""What a manifest holds, in numbers: sizes, classes, labels per image, and the training set's pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet import labels as label_sets

if TYPE_CHECKING:
    from hashnet.data.manifest import Manifest

MAX_PATTERNS = 50_000  # different label sets up to which counting pairs takes seconds


def summarise(manifest: Manifest) -> dict[str, Any]:
    """Sizes, classes and labels per image of each split, and the training set's pairs (exact counts).

    The pairs are left out where counting them would take minutes.
    """
    about: dict[str, Any] = {"rows": len(manifest), "splits": {}}
    for name, rows in manifest.splits.items():
        about["splits"][name] = {"rows": rows, **_label_counts(manifest, name, rows)}
    train = manifest.labels("train") if manifest.count("train") else None
    if train is None or _patterns(train) > MAX_PATTERNS:
        return about
    counted = label_sets.count_pairs(train)
    about["train_pairs"] = {
        "pairs": counted.n_pairs,
        "similar": counted.n_similar,
        "dissimilar_per_similar": counted.ratio if counted.n_similar else None,
    }
    return about


def _patterns(labels: np.ndarray) -> int:
    packed = label_sets.pack_labels(labels)
    return len(np.unique(packed.view(f"V{packed.shape[1] * 8}").ravel()))


def _label_counts(manifest: Manifest, split: str, rows: int) -> dict[str, Any]:
    if manifest.n_classes is None:
        return {}
    per_class = np.zeros(manifest.n_classes, dtype=np.int64)
    labelled = 0
    for table in manifest.batches(split, columns=["labels"], rows=65_536):
        lists = table["labels"].combine_chunks()
        per_class += np.bincount(lists.flatten().to_numpy(), minlength=manifest.n_classes)
        labelled += int(np.count_nonzero(lists.value_lengths().fill_null(0).to_numpy()))
    return {
        "labelled": labelled,
        "classes": int(np.count_nonzero(per_class)),
        "labels_per_image": float(per_class.sum() / max(rows, 1)),
        "largest_class": int(per_class.max()),
        "smallest_class": int(per_class.min()),
    }
