"""A manifest's rows as a source of inputs with labels: the training rows, and those held out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hashnet import labels as label_sets
from hashnet.data import Manifest, feature_matrix, feature_rows
from hashnet.errors import DataError
from hashnet.models import HashModel
from hashnet.training.config import TrainConfig
from hashnet.training.sources import ArraySource, ImageSource, Source

if TYPE_CHECKING:
    import pyarrow as pa

HELD_OUT_SEED = 20171  # not the run's seed: every trial of a sweep is scored on the same rows


@dataclass(frozen=True)
class Rows:
    """Some rows of a manifest: ids, multi-hot labels (None without), and their inputs."""

    row_ids: np.ndarray
    labels: np.ndarray | None
    source: Source

    def __len__(self) -> int:
        return len(self.row_ids)


def open_rows(
    manifest: Manifest,
    split: str,
    model: HashModel,
    config: TrainConfig,
    *,
    train: bool = False,
    positions: np.ndarray | None = None,
    lenient: bool = False,
) -> Rows:
    """The rows of a split (those at ``positions`` in it, or all); ``train`` turns augmentation on.

    ``lenient``: rows that cannot be used are marked so, however many: a trained model is not lost for them.
    """
    columns = ["row_id", "labels"]
    columns += ["feature"] if manifest.modality == "features" else ["uri"] + ["image"] * manifest.inline
    table = manifest.read(split, columns=columns)
    if positions is not None:
        table = table.take(positions)
    labels = label_sets.from_lists(table["labels"], manifest.n_classes) if manifest.n_classes else None
    return Rows(table["row_id"].to_numpy(), labels, _source(table, manifest, model, config, train, lenient))


def _source(
    table: pa.Table, manifest: Manifest, model: HashModel, config: TrainConfig, train: bool, lenient: bool
) -> Source:
    if manifest.modality == "features":
        if not lenient:
            return ArraySource(feature_matrix(table))
        features, reasons = feature_rows(table)
        good = reasons.is_null().to_numpy(zero_copy_only=False)
        return ArraySource(np.where(good[:, None], features, 0), good)
    assert model.spec.preprocess is not None
    return ImageSource(
        table,
        model.spec.preprocess,
        seed=config.seed,
        train=train,
        threads=config.threads,
        base_uri=config.base_uri,
        max_bad_fraction=1.0 if lenient else config.max_bad_fraction,
    )


def held_out(n_rows: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions (kept, held out), ascending: a fixed draw of ``share`` of the training rows.

    DataError when a share leaves fewer than two rows to learn from, or to ask one another.
    """
    order = np.random.default_rng([HELD_OUT_SEED, n_rows]).permutation(n_rows)
    n_held = round(share * n_rows)
    if share and min(n_held, n_rows - n_held) < 2:
        raise DataError(
            f"validation={share} of {n_rows} training rows holds {n_held} out and keeps {n_rows - n_held}; "
            "two of each are needed: give more rows or another share, or leave validation out"
        )
    return np.sort(order[n_held:]), np.sort(order[:n_held])


def sample(n_rows: int, n: int, seed: int) -> np.ndarray:
    """At most ``n`` positions, ascending, drawn with a seed."""
    if n_rows <= n:
        return np.arange(n_rows)
    return np.sort(np.random.default_rng([seed, n_rows]).choice(n_rows, n, replace=False))
